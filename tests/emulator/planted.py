"""Programs in plain torch.distributed, right and wrong ones, each on a new group.

``told`` runs one on a rank and returns the error it ended with, as text; "" if it passed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

Program = Callable[[int, int, Any], None]
"""``program(rank, size, group)``"""


def told(rank: int, program: Program, warm: bool = False) -> str:
    """The error of ``program`` on a new group, whose communicators are open if it is ``warm``."""
    group = dist.new_group()
    size = dist.get_world_size()
    if warm:
        dist.barrier(group)
        in_one_order(rank, size, group)
    try:
        program(rank, size, group)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _message(rank: int) -> torch.Tensor:
    return torch.full((4,), float(rank))


def _exchange(rank: int, size: int, k: int, group: Any, receive_first: bool = False) -> None:
    """Send to r+k and receive from r-k, posted one by one."""
    works, into = [], torch.zeros(4)
    for receive in (receive_first, not receive_first):
        if receive:
            works.append(dist.irecv(into, (rank - k) % size, group=group))
        else:
            works.append(dist.isend(_message(rank), (rank + k) % size, group=group))
    for work in works:
        work.wait()
    assert (into == (rank - k) % size).all()


def batch(rank: int, size: int, k: int, group: Any) -> list[Any]:
    """Send to r+k and receive from r-k, posted as one; the works."""
    operations = [
        dist.P2POp(dist.isend, _message(rank), (rank + k) % size, group),
        dist.P2POp(dist.irecv, torch.zeros(4), (rank - k) % size, group),
    ]
    return dist.batch_isend_irecv(operations)


# ---------------------------------------------------------------------- right ones


def in_one_order(rank: int, size: int, group: Any) -> None:
    """Single operations in one order for all ranks: (step, source)."""
    works = []
    for k in range(1, size):
        for source in range(size):
            if rank == source:
                works.append(dist.isend(_message(rank), (rank + k) % size, group=group))
            elif rank == (source + k) % size:
                works.append(dist.irecv(torch.zeros(4), source, group=group))
    for work in works:
        work.wait()


def batch_per_step(rank: int, size: int, group: Any) -> None:
    works = [work for k in range(1, size) for work in batch(rank, size, k, group)]
    for work in works:
        work.wait()


def even_odd(rank: int, size: int, group: Any) -> None:
    _exchange(rank, size, 1, group, receive_first=rank % 2 == 1)


# ---------------------------------------------------------------------- wrong ones


def ring_all_send_first(rank: int, size: int, group: Any) -> None:
    _exchange(rank, size, 1, group)


def ring_blocking_sends(rank: int, size: int, group: Any) -> None:
    dist.send(_message(rank), (rank + 1) % size, group=group)
    dist.recv(torch.zeros(4), (rank - 1) % size, group=group)


def shifted_send_then_receive(rank: int, size: int, group: Any) -> None:
    for k in range(1, size):
        _exchange(rank, size, k, group)


def even_odd_over_two_groups(rank: int, size: int, group: Any) -> None:
    """The second operation of each rank goes over a second group."""
    other = dist.new_group()
    into, up, down = torch.zeros(4), (rank + 1) % size, (rank - 1) % size
    if rank % 2 == 0:
        works = [
            dist.isend(_message(rank), up, group=group),
            dist.irecv(into, down, group=other),
        ]
    else:
        works = [
            dist.irecv(into, down, group=group),
            dist.isend(_message(rank), up, group=other),
        ]
    for work in works:
        work.wait()
    assert (into == down).all()


def receives_first(rank: int, size: int, group: Any) -> None:
    works = [dist.irecv(torch.zeros(4), (rank - k) % size, group=group) for k in range(1, size)]
    works += [dist.isend(_message(rank), (rank + k) % size, group=group) for k in range(1, size)]
    for work in works:
        work.wait()


def batch_and_collective(rank: int, size: int, group: Any) -> None:
    """Rank 0 posts the batch first, the others the collective."""
    token = torch.ones(1)

    def both() -> Iterator[Any]:
        if rank == 0:
            yield from batch(rank, size, 1, group)
        yield dist.all_reduce(token, group=group, async_op=True)
        if rank != 0:
            yield from batch(rank, size, 1, group)

    for work in list(both()):
        work.wait()


def transfer_skipped(rank: int, size: int, group: Any) -> None:
    """Rank 1 leaves out the last step."""
    steps = range(1, size - 1) if rank == 1 else range(1, size)
    works = [work for k in steps for work in batch(rank, size, k, group)]
    for work in works:
        work.wait()


def first_batch_of_two(rank: int, size: int, group: Any) -> None:
    """Only ranks 0 and 1 come to a group's first batch."""
    if rank < 2:
        peer = 1 - rank
        operations = [
            dist.P2POp(dist.isend, _message(rank), peer, group),
            dist.P2POp(dist.irecv, torch.zeros(4), peer, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def two_threads(rank: int, size: int, group: Any) -> None:
    """A second thread starts a batch while the first one's is under way."""
    works = batch(rank, size, 1, group)
    found: list[RuntimeError] = []

    def second() -> None:
        try:
            batch(rank, size, 1, group)
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=second)
    thread.start()
    thread.join()
    for work in works:
        work.wait()
    if found:
        raise found[0]


def other_collective(rank: int, size: int, group: Any) -> None:
    dist.all_reduce(torch.ones(4 if rank else 5), group=group)


def other_size(rank: int, size: int, group: Any) -> None:
    into = torch.zeros(8 if rank == 1 else 4)
    operations = [
        dist.P2POp(dist.isend, _message(rank), (rank + 1) % size, group),
        dist.P2POp(dist.irecv, into, (rank - 1) % size, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def same_peer_twice(rank: int, size: int, group: Any) -> None:
    operations = [
        dist.P2POp(dist.isend, _message(rank), (rank + 1) % size, group) for _ in range(2)
    ]
    dist.batch_isend_irecv(operations)
