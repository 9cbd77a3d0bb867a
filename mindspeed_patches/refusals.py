"""Refuses a launch whose options exclude CommFuse (:mod:`commfuse_npu.refusals`)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from commfuse_npu.refusals import ATTENTION_REFUSALS, REFUSALS, Refusal

__all__ = [
    "ATTENTION_REFUSALS",
    "REFUSALS",
    "IncompatibleOptionsError",
    "check_compatible",
    "check_flag",
]


class IncompatibleOptionsError(AssertionError):
    """Options that exclude each other; an AssertionError, as MindSpeed's own checks raise."""


def check_compatible(args: argparse.Namespace, refusals: Sequence[Refusal] = REFUSALS) -> None:
    """Refuse options that exclude CommFuse, as far as ``args`` has them.

    Raises:
        IncompatibleOptionsError: lists all such options, with the reason and the remedy of each.
    """
    problems = [str(refusal) for refusal in refusals if refusal.given(args)]
    if problems:
        raise IncompatibleOptionsError("\n".join(problems))


def check_flag(args: argparse.Namespace) -> None:
    """Refuse options that have no effect without ``--use-commfuse``, if it is not given.

    Raises:
        IncompatibleOptionsError: names the option.
    """
    for name in ("ulysses", "dp"):
        if getattr(args, f"commfuse_{name}", None) and not getattr(args, "use_commfuse", None):
            raise IncompatibleOptionsError(
                f"--commfuse-{name} needs --use-commfuse, which switches CommFuse on; add "
                f"it, or leave --commfuse-{name} out"
            )
