"""`--link-rate`: a rate for gloo's connections, so that a training on one machine has a wire.

On loopback a transfer is a copy, which costs the CPU that should compute meanwhile: nothing can be
hidden. A paced socket (`commfuse_npu.tools.bench.wire`) waits in the kernel's timers instead, and
the time that a transfer takes is there to be hidden.

A link here is a pair of ranks, one direction and one process group, because each group has
connections of its own. That is one link for all that compares: the lanes of the fused layers keep
the transfers of a pair in one direction on one lane, collectives on one group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from commfuse_npu.tools.bench.wire import pace

from .usage_error import UsageError

__all__ = ["COLLECTIVES_NOTE", "paced_links"]

_BYTES_PER_MEGABYTE = 1e6

COLLECTIVES_NOTE = (
    "note: plain and Megatron's layers use torch's collectives over gloo, whose reduce-scatter "
    "sends the bytes of an all-reduce, twice those of the fused layers' direct transfers. Over "
    "such links a part of the ratio is these bytes, not hiding"
)
"""What a comparison over links with a rate has to say about itself."""


@contextmanager
def paced_links(megabytes_per_second: float | None) -> Iterator[Callable[[], int]]:
    """Give this process's connections a rate inside the block; take it away when it ends.

    Collective over all ranks, and so is what it gives: a function that paces again, for
    connections that came later (with `TORCH_GLOO_LAZY_INIT` gloo connects at first use), and
    returns how many of this rank have the rate. Enter it when all groups and lanes exist.

    Args:
        megabytes_per_second: of each connection and direction, 1 MB being 10^6 bytes; `None`
            leaves the connections as they are, and the function returns 0.

    Raises:
        UsageError: the kernel of a rank refuses. It is raised on every rank, by the block's
            beginning or by the function: nothing trains over links that only seem to have a rate.
    """
    if megabytes_per_second is None:
        yield lambda: 0
        return
    rate = megabytes_per_second
    try:
        _pace_on_all_ranks(rate)
        yield lambda: _pace_on_all_ranks(rate)
    finally:
        pace(None)


def _pace_on_all_ranks(megabytes_per_second: float) -> int:
    outcome = pace(megabytes_per_second * _BYTES_PER_MEGABYTE)
    # A rank that raised alone would leave the others in their next collective.
    problems = [""] * dist.get_world_size()
    dist.all_gather_object(problems, outcome.problem)
    for rank, problem in enumerate(problems):
        if problem:
            raise UsageError(
                f"--link-rate {megabytes_per_second:g} cannot be set on rank {rank}: {problem}; "
                "leave --link-rate out for the loopback as it is, or run on Linux 4.20 or newer, "
                "outside of sandboxes that replace the kernel's sockets"
            )
    return outcome.sockets
