"""Creates the lanes of a transport, on all processes of the job or on none.

A lane is a process group: on HCCL a communicator with a stream, which keeps its transfers in order;
on gloo a set of sockets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.plan import Schedule
from commfuse_npu.runtime.agreement import MismatchError, TransportError
from commfuse_npu.runtime.gather_objects import gather_objects

__all__ = ["agreed_groups", "all_or_none", "make_lanes", "making", "post_swap"]

Ranks = tuple[int, ...]


def post_swap(
    lane: dist.ProcessGroup,
    tensor: torch.Tensor,
    received: torch.Tensor,
    target: int,
    source: int,
    tag: int = 0,
) -> Sequence[Any]:
    """Send one tensor and receive another as one batch, a step of a program; return the works.

    The receive is first: on gloo the message that it is ready shares the socket with bulk data.

    Args:
        target, source: global ranks.
        tag: by which gloo matches messages.
    """
    receive = dist.P2POp(dist.irecv, received, source, lane, tag)
    return dist.batch_isend_irecv([receive, dist.P2POp(dist.isend, tensor, target, lane, tag)])


@contextmanager
def making(task: str) -> Iterator[None]:
    """Turn a RuntimeError in this block into a TransportError that begins with ``task``."""
    try:
        yield
    except RuntimeError as error:
        raise TransportError(f"{task}: {error}") from error


@contextmanager
def all_or_none(world: dist.ProcessGroup, timeout: timedelta) -> Iterator[None]:
    """Raise a TransportError on every process if one of them failed to create lanes in this block.

    Processes that wait in a lane for the failed one continue only after their timeout; the others
    wait for them here, for at most twice the timeout.
    """
    problem: TransportError | None = None
    try:
        yield
    except TransportError as error:
        problem = error
    try:
        problems = gather_objects(None if problem is None else str(problem), world, 2 * timeout)
    except RuntimeError as error:
        here = "" if problem is None else f"{problem}; "
        raise TransportError(f"Transport.create: {here}{error}") from error
    met: defaultdict[str, list[str]] = defaultdict(list)
    for rank, text in enumerate(problems):
        if text is not None:
            met[text].append(str(rank))
    if met:
        # The error of the fewest processes is likely the cause; the others timed out.
        rarest = sorted(met.items(), key=lambda item: len(item[1]))
        listed = "; ".join(f"peer {', '.join(ranks)}: {text}" for text, ranks in rarest)
        raise TransportError(
            f"Transport.create: no transport, lanes could not be created everywhere ({listed})"
        ) from problem


def agreed_groups(
    group: dist.ProcessGroup, world: dist.ProcessGroup, lanes: int | None, timeout: timedelta
) -> list[Ranks]:
    """The ranks of every group that gets lanes, sorted, so that all processes have one order.

    Raises:
        TypeError: a process has no group; raised on all of them.
        MismatchError: the processes ask for different numbers of lanes.
        TransportError: a process did not answer in time.
    """
    ranks = None
    if isinstance(group, dist.ProcessGroup):
        ranks = tuple(dist.get_process_group_ranks(group))
    request = ranks, lanes
    with making("Transport.create, before lane 0: comparing with the other processes"):
        everyone = gather_objects(request, world, timeout)
    without = [str(rank) for rank, (ranks, _) in enumerate(everyone) if ranks is None]
    if without:
        here = "" if ranks is not None else f"; here group is {group!r}"
        raise TypeError(
            f"Transport.create: rank {', '.join(without)} has no process group{here}. Pass a group "
            "that the process belongs to; if there is none, one of its rank alone, made by calling "
            "new_group([rank]) on all processes"
        )
    if len({count for _, count in everyone}) > 1:
        counts = ", ".join(f"rank {r}: {count}" for r, (_, count) in enumerate(everyone))
        raise MismatchError(
            "Transport.create: the processes ask for different numbers of lanes "
            f"({counts}). No lane was created; pass the same lanes on every process"
        )
    return sorted({ranks for ranks, _ in everyone})


def make_lanes(
    group: dist.ProcessGroup,
    groups: Sequence[Ranks],
    lanes: int | None,
    timeout: timedelta,
    options: Any,
) -> tuple[list[Any], Any]:
    """Create lanes; return those of ``group``, and a group of the same ranks for comparisons.

    Every process creates the lanes of all ``groups``, as ``new_group`` requires.

    Raises:
        TransportError: a group could not be created.
    """
    backend = dist.get_backend(group)
    created = {}
    for ranks in groups:
        channels: list[Any] = []
        count = Schedule(lanes=lanes).lanes_for(len(ranks))
        for lane in range(count):
            with making(f"lane {lane} of {count}"):
                channels.append(
                    dist.new_group(
                        list(ranks), timeout=timeout, backend=backend, pg_options=options
                    )
                )
        with making("the group for comparisons"):
            control: Any = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
            if control is None:
                # With MindSpeed's --disable-gloo-group there is none; use the device's backend.
                control = dist.new_group(list(ranks), timeout=timeout, backend=backend)
        created[ranks] = channels, control
    return created[tuple(dist.get_process_group_ranks(group))]
