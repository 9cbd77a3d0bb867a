"""Buckets under way, in the order in which they were started.

:class:`BucketExchange` is the handle that a caller waits for, :class:`BucketQueue` keeps the
buckets of one transport.  Why its order cannot hang is said in :mod:`commfuse_npu.ops.buckets`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import torch

from commfuse_npu.runtime.executor import Running, Work
from commfuse_npu.runtime.transport import Transport

__all__ = ["BucketExchange", "BucketQueue", "queue_of"]


class BucketExchange:
    """A bucket under way, as :class:`~commfuse_npu.ops.buckets.Buckets` hands it out.

    It may be forgotten: waiting for a bucket that was started later on the same transport finishes
    this one too.  But the other ranks get what they need of this rank only in such a wait.
    """

    def __init__(
        self, name: str, elements: int, queue: BucketQueue, running: Running | None, *, sums: bool
    ) -> None:
        self._name = name
        self._elements = elements
        self._queue = queue
        # None: there is nothing to transfer, in a group of one or for an empty bucket.
        self._running = running
        self._sums = sums

    def wait(self) -> None:
        """Finish this bucket, and before it all that were started earlier on its transport.

        A second call returns at once.  On HCCL it holds the current stream, not the host.

        Raises:
            TransportError: a transfer failed, here or in an earlier wait.  The shard of this rank
                is as it was if a reduction fails; a gather may have filled some of the others.
        """
        if self._running is not None:
            self._queue.finish(self._running)
            self._running = None

    def wait_rows(self, start: int, stop: int) -> None:
        """Wait until the elements ``start:stop`` of a gathered bucket are there.

        Those of this rank always are.  Buckets started earlier are finished first.  :meth:`wait` is
        needed all the same, before the bucket changes again: its own shard may still be on the way.

        Raises:
            ValueError: the bucket is being reduced, or has no such elements.
            TransportError: as :meth:`wait`.
        """
        if not 0 <= start <= stop <= self._elements:
            raise ValueError(
                f"{self._name}: elements {start}:{stop} are not within the bucket; choose from "
                f"0:{self._elements}"
            )
        if self._sums:
            raise ValueError(
                f"{self._name}: the elements of a sum are all there at once, at the end; call "
                "wait() instead of wait_rows()"
            )
        if self._running is not None and start < stop:
            self._queue.finish_before(self._running)
            if not self._running.done:
                self._running.wait_rows("bucket", start, stop)

    def is_completed(self) -> bool:
        """Whether the bucket is finished.

        It never becomes so without a wait, for this bucket or a later one: do not poll it.
        """
        return self._running is None or self._running.done


class _UnderWay(NamedTuple):
    bucket: torch.Tensor
    running: Running
    works: Mapping[str, Work]


class BucketQueue:
    """The buckets of one transport, in the order in which they were started.

    Args:
        transport: of the buckets.
    """

    def __init__(self, transport: Transport) -> None:
        # A rank that waits for a bucket must not need one that waits in a comparison.
        transport.before_comparing = self.finish_all
        self._transport = transport
        self._under_way: deque[_UnderWay] = deque()
        self._not_posted: deque[_UnderWay] = deque()
        self._last_posted: Running | None = None

    def add(self, bucket: torch.Tensor, running: Running, works: Mapping[str, Work]) -> None:
        """Put a bucket at the end and post what may be posted."""
        one = _UnderWay(bucket, running, works)
        self._under_way.append(one)
        self._not_posted.append(one)
        self._post()

    def finish(self, last: Running) -> None:
        """Finish the buckets up to ``last``, the oldest first."""
        self.finish_before(last)
        if not last.done:
            self._finish_oldest()

    def finish_before(self, running: Running) -> None:
        """Finish the buckets that were started before this one."""
        while not running.done and self._under_way[0].running is not running:
            self._finish_oldest()

    def finish_all(self) -> None:
        while self._under_way:
            self._finish_oldest()

    def same_memory(self, bucket: torch.Tensor) -> bool:
        """Whether a bucket under way has elements in common with this one."""
        return any(
            bucket.data_ptr() < other.data_ptr() + other.nbytes
            and other.data_ptr() < bucket.data_ptr() + bucket.nbytes
            for other, _, _ in self._under_way
        )

    def _finish_oldest(self) -> None:
        oldest = self._under_way[0]
        with torch.no_grad():
            # After an error it stays here, and says so in every later wait.
            oldest.running.run(oldest.works)
            self._under_way.popleft()
            self._post()

    def _post(self) -> None:
        # Batches match by order, so no bucket may overtake another.
        while self._not_posted and (not self._transport.batched or self._all_posted()):
            bucket, running, works = self._not_posted.popleft()
            self._last_posted = running
            running.run(works, ahead=True, bucket=bucket.view(-1, 1))

    def _all_posted(self) -> bool:
        """Whether the bucket that was posted last has no transfer left to post in its wait."""
        return self._last_posted is None or self._last_posted.all_posted


def queue_of(transport: Transport) -> BucketQueue:
    """The queue of a transport: one, however many users it has, because its lanes are theirs."""
    queue: BucketQueue | None = transport.remembered.get(__name__)
    if queue is None:
        queue = transport.remembered[__name__] = BucketQueue(transport)
    return queue
