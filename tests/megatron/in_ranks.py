"""Megatron in the processes of a test: its groups, applied wrappers, and whole trainings."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.distributed.ranks import Ranks
from tests.megatron.training import without_groups_afterwards

TINY = (
    "--fp32 --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 "
    "--num-query-groups 2 --seq-length 32 --micro-batch-size 2 --global-batch-size 8 "
    "--train-iters 6 --distributed-timeout-minutes 2"
)
"""Options of the CPU pretraining; later options override them."""


def asked(rank: int, method: str, args: Sequence[Any]) -> tuple[Any, str]:
    """Calls a method of the worker on one rank; returns its result and its output."""
    from scripts.cpu_pretraining.training import Worker

    out = io.StringIO()
    with without_groups_afterwards(), contextlib.redirect_stdout(out):
        return getattr(Worker(), method)(*args), out.getvalue()


@dataclass(frozen=True)
class _Asked:
    """Test ranks in place of those that the command line starts."""

    group: Ranks

    def __call__(self, size: int, **_: Any) -> contextlib.AbstractContextManager[Any]:
        assert size == self.group.size
        return contextlib.nullcontext(SimpleNamespace(ask=self.ask))

    def ask(self, method: str, *args: Any) -> list[Any]:
        results = self.group.run(asked, method, args)
        print(results[0][1], end="")
        return [value for value, _ in results]


def pretrained(group: Ranks, output: Path, *options: str, code: int = 0) -> str:
    """What the command line prints with :data:`TINY` and more options, on the ranks of a group."""
    from scripts.cpu_pretraining import __main__ as command

    printed = io.StringIO()
    with (
        mock.patch.object(command, "Ranks", _Asked(group)),
        mock.patch.dict(os.environ),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        done = command.main([*TINY.split(), *options, "--output", str(output)])
    assert done == code, printed.getvalue()
    return printed.getvalue()
