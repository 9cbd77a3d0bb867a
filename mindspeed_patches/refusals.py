"""Ends a launch with options that exclude CommFuse (:mod:`commfuse_npu.refusals`)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from commfuse_npu.refusals import ATTENTION_REFUSALS, REFUSALS, Needs, Refusal, missing
from mindspeed_patches.layout import parallel_size

__all__ = [
    "ATTENTION_REFUSALS",
    "REFUSALS",
    "IncompatibleOptionsError",
    "check_compatible",
    "check_flag",
    "check_needs",
]


class IncompatibleOptionsError(AssertionError):
    """Options that exclude each other; an AssertionError as in MindSpeed's own checks."""


def check_compatible(args: argparse.Namespace, refusals: Sequence[Refusal] = REFUSALS) -> None:
    """Refuse what is already known to exclude CommFuse.

    Raises:
        IncompatibleOptionsError: names all such options, the reasons and the way out.
    """
    found = [str(refusal) for refusal in refusals if refusal.given(args)]
    if found:
        raise IncompatibleOptionsError("\n".join(found))


def check_flag(args: argparse.Namespace) -> None:
    """Refuse options that do nothing without ``--use-commfuse``, where it is not given.

    Raises:
        IncompatibleOptionsError: names the option.
    """
    for name in ("ulysses", "dp"):
        if getattr(args, f"commfuse_{name}", None) and not getattr(args, "use_commfuse", None):
            raise IncompatibleOptionsError(
                f"--commfuse-{name} needs --use-commfuse, which switches CommFuse on; add "
                f"it, or leave --commfuse-{name} out"
            )


def check_needs(args: argparse.Namespace, ours: str) -> None:
    """Refuse an option of CommFuse where the launch lacks what it needs.

    Args:
        args: the real arguments, complete.
        ours: the option.

    Raises:
        IncompatibleOptionsError: no distributed optimizer, no Ulysses context parallelism, or
            sizes that do not divide.
    """
    needs = Needs(
        parallel_size(args, "tensor_model"),
        parallel_size(args, "context"),
        bool(getattr(args, "use_distributed_optimizer", None)),
        getattr(args, "context_parallel_algo", None),
        getattr(args, "num_attention_heads", None),
        getattr(args, "seq_length", None),
    )
    if lacks := missing(ours, needs):
        raise IncompatibleOptionsError(lacks)
