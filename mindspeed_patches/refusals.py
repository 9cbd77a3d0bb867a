"""What the feature refuses, by the table of :mod:`commfuse_npu.tools.refusals`.

At patch time options that nobody typed are absent and values are strings.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from commfuse_npu.tools.refusals import (
    ATTENTION_REFUSALS,
    DATA_PARALLEL_REFUSALS,
    FLOW_REFUSALS,
    REFUSALS,
    ULYSSES_REFUSALS,
    Refusal,
    data_parallel_obstacle,
    flow_obstacle,
    ulysses_obstacle,
)
from mindspeed_patches.layout import parallel_size

__all__ = [
    "ATTENTION_REFUSALS",
    "DATA_PARALLEL_REFUSALS",
    "FLOW_REFUSALS",
    "REFUSALS",
    "ULYSSES_REFUSALS",
    "IncompatibleOptionsError",
    "Refusal",
    "check_compatible",
    "check_data_parallel",
    "check_flag",
    "check_flow_layout",
    "check_ulysses_layout",
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
    for name in ("ulysses", "dp", "flow"):
        if getattr(args, f"commfuse_{name}", None) and not getattr(args, "use_commfuse", None):
            raise IncompatibleOptionsError(
                f"--commfuse-{name} needs --use-commfuse, which switches CommFuse on; add "
                f"it, or leave --commfuse-{name} out"
            )


def check_data_parallel(args: argparse.Namespace) -> None:
    """Refuse ``--commfuse-dp`` where gradients and parameters are not sharded.

    Args:
        args: the real arguments, complete.

    Raises:
        IncompatibleOptionsError: no distributed optimizer.
    """
    _refuse(data_parallel_obstacle(bool(getattr(args, "use_distributed_optimizer", None))))


def check_flow_layout(args: argparse.Namespace, chunks: int) -> None:
    """Refuse ``--commfuse-flow`` where nothing would flow, or not alike on all stages.

    Args:
        args: the real arguments, complete.

    Raises:
        IncompatibleOptionsError: no sequence parallelism, or a length that is not cut evenly.
    """
    size, length = parallel_size(args, "tensor_model"), getattr(args, "seq_length", None)
    sequence_parallel = bool(getattr(args, "sequence_parallel", None))
    _refuse(flow_obstacle(chunks, size, sequence_parallel, length))


def check_ulysses_layout(args: argparse.Namespace) -> None:
    """Refuse a layout over which ``--commfuse-ulysses`` cannot exchange heads.

    Args:
        args: the real arguments, complete.

    Raises:
        IncompatibleOptionsError: no Ulysses context parallelism, or sizes that do not divide.
    """
    sizes = parallel_size(args, "context"), parallel_size(args, "tensor_model")
    names = ("context_parallel_algo", "num_attention_heads", "seq_length")
    algorithm, heads, length = (getattr(args, name, None) for name in names)
    _refuse(ulysses_obstacle(*sizes, algorithm, heads, length))


def _refuse(obstacle: str) -> None:
    if obstacle:
        raise IncompatibleOptionsError(obstacle)
