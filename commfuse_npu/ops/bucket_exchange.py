"""Buckets under way, in the order in which they were started.

:class:`BucketExchange` is the handle that a caller waits for, :class:`BucketQueue` keeps the
buckets of one transport.  Why its order cannot hang is said in :mod:`commfuse_npu.ops.buckets`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

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
        self,
        name: str,
        bucket: torch.Tensor,
        queue: BucketQueue,
        running: Running | None,
        works: Mapping[str, Work],
    ) -> None:
        self._name = name
        self._elements = bucket.numel()
        self._queue = queue
        self.works = works
        # None when it is finished, or was never under way: in a group of one, or empty.
        self.running = running
        self.bucket = None if running is None else bucket
        if running is not None:
            queue.add(self)

    def wait(self) -> None:
        """Finish this bucket, and before it all that were started earlier on its transport.

        A second call returns at once.  On HCCL it holds the current stream, not the host.

        Raises:
            TransportError: a transfer failed, here or in an earlier wait.  The shard of this rank
                is as it was if a reduction fails; a gather may have filled some of the others.
        """
        self._queue.finish(self)

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
        if self.works:
            raise ValueError(
                f"{self._name}: the elements of a sum are all there at once, at the end; call "
                "wait() instead of wait_rows()"
            )
        if start < stop:
            self._queue.finish_before(self)
            if self.running is not None:
                self.running.wait_rows("bucket", start, stop)

    def is_completed(self) -> bool:
        """Whether the bucket is finished.

        It never becomes so without a wait, for this bucket or a later one: do not poll it.
        """
        return self.running is None


class BucketQueue:
    """The buckets of one transport, in the order in which they were started.

    Args:
        transport: of the buckets.
    """

    def __init__(self, transport: Transport) -> None:
        # A rank that waits for a bucket must not need one that waits in a comparison.
        transport.before_comparing = self.finish
        self._transport = transport
        self._under_way: deque[BucketExchange] = deque()
        self._not_posted: deque[BucketExchange] = deque()
        self._last_posted: Running | None = None

    def add(self, exchange: BucketExchange) -> None:
        """Put a bucket at the end and post what may be posted."""
        self._under_way.append(exchange)
        self._not_posted.append(exchange)
        self._post()

    def finish(self, last: BucketExchange | None = None) -> None:
        """Finish the buckets up to ``last``, by default all of them, the oldest first."""
        while self._under_way and (last is None or last.running is not None):
            self._finish_oldest()

    def finish_before(self, exchange: BucketExchange) -> None:
        """Finish the buckets that were started before this one."""
        while exchange.running is not None and self._under_way[0] is not exchange:
            self._finish_oldest()

    def same_memory(self, bucket: torch.Tensor) -> bool:
        """Whether a bucket under way has elements in common with this one."""
        return any(
            bucket.data_ptr() < other.data_ptr() + other.nbytes
            and other.data_ptr() < bucket.data_ptr() + bucket.nbytes
            for other in (one.bucket for one in self._under_way)
            if other is not None
        )

    def _finish_oldest(self) -> None:
        oldest = self._under_way[0]
        assert oldest.running is not None
        with torch.no_grad():
            # After an error it stays here, and says so in every later wait.
            oldest.running.run(oldest.works)
            oldest.running = oldest.bucket = None
            self._under_way.popleft()
            self._post()

    def _post(self) -> None:
        # Batches match by order, so no bucket may overtake another: one is posted when the one
        # that was posted last has no transfer left to post in its wait.
        while self._not_posted and (
            not self._transport.batched or self._last_posted is None or self._last_posted.all_posted
        ):
            one = self._not_posted.popleft()
            assert one.running is not None
            assert one.bucket is not None
            self._last_posted = one.running
            one.running.run(one.works, ahead=True, bucket=one.bucket.view(-1, 1))


def queue_of(transport: Transport) -> BucketQueue:
    """The queue of a transport: one, however many users it has, because its lanes are theirs."""
    queue: BucketQueue | None = transport.remembered.get(__name__)
    if queue is None:
        queue = transport.remembered[__name__] = BucketQueue(transport)
    return queue
