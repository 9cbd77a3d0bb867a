"""Buckets in flight, in the order in which they were started.

:class:`BucketExchange` is the handle that a caller waits on; :class:`BucketQueue` has the buckets
of one transport.  :mod:`commfuse_npu.ops.buckets` explains why its order cannot deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch

from commfuse_npu.runtime.executor import Running, Work
from commfuse_npu.runtime.transport import Transport

__all__ = ["BucketExchange", "BucketQueue", "queue_of"]


class BucketExchange:
    """A bucket in flight, returned by :class:`~commfuse_npu.ops.buckets.Buckets`.

    The handle may be dropped: a wait for a bucket started later on the same transport finishes this
    one too.  But without such a wait other ranks may not get the transfers that they need from
    this rank.
    """

    def __init__(
        self,
        bucket: torch.Tensor,
        queue: BucketQueue,
        running: Running | None,
        works: Mapping[str, Work],
    ) -> None:
        self._queue = queue
        self.works = works
        # None if finished, or if there was nothing to transfer: in a group of one, or empty.
        self.running = running
        self.bucket = None if running is None else bucket
        if running is not None:
            queue.add(self)

    def wait(self) -> None:
        """Finish all buckets started earlier on the transport, and then this one.

        A second call returns at once.  On HCCL it blocks the current stream, not the host.

        Raises:
            TransportError: a transfer failed, here or in an earlier wait.  A failed sum leaves
                this rank's shard unchanged; a failed gather may have filled some other shards.
        """
        self._queue.finish(self)

    def is_completed(self) -> bool:
        """Whether the bucket is finished.

        Only a wait, for this bucket or a later one, finishes it: do not poll.
        """
        return self.running is None


class BucketQueue:
    """The buckets of one transport in flight, in the order in which they were started."""

    def __init__(self, transport: Transport) -> None:
        # Else a rank in a wait could need transfers of a rank that waits in a comparison.
        transport.before_comparing = self.finish
        self._transport = transport
        self._under_way: deque[BucketExchange] = deque()
        self._not_posted: deque[BucketExchange] = deque()
        self._last_posted: Running | None = None

    def add(self, exchange: BucketExchange) -> None:
        """Append a bucket and post the transfers that may be posted."""
        self._under_way.append(exchange)
        self._not_posted.append(exchange)
        self._post()

    def finish(self, last: BucketExchange | None = None) -> None:
        """Finish the buckets up to ``last``, by default all, the oldest first."""
        while self._under_way and (last is None or last.running is not None):
            self._finish_oldest()

    def same_memory(self, bucket: torch.Tensor) -> bool:
        """Whether a bucket in flight overlaps with this one in memory."""
        return any(
            bucket.data_ptr() < other.data_ptr() + other.nbytes
            and other.data_ptr() < bucket.data_ptr() + bucket.nbytes
            for other in (exchange.bucket for exchange in self._under_way)
            if other is not None
        )

    def _finish_oldest(self) -> None:
        oldest = self._under_way[0]
        assert oldest.running is not None
        with torch.no_grad():
            # After an error it stays in the queue, so that every later wait raises, too.
            oldest.running.run(oldest.works)
            oldest.running = oldest.bucket = None
            self._under_way.popleft()
            self._post()

    def _post(self) -> None:
        # Batches match by order, so buckets are posted in order: the next one may start when the
        # last one has posted all its transfers.
        while self._not_posted and (
            not self._transport.batched or self._last_posted is None or self._last_posted.all_posted
        ):
            exchange = self._not_posted.popleft()
            assert exchange.running is not None
            assert exchange.bucket is not None
            self._last_posted = exchange.running
            exchange.running.run(exchange.works, ahead=True, bucket=exchange.bucket.view(-1, 1))


def queue_of(transport: Transport) -> BucketQueue:
    """The queue of a transport; all users share one, because they share the lanes."""
    queue: BucketQueue | None = transport.remembered.get(__name__)
    if queue is None:
        queue = transport.remembered[__name__] = BucketQueue(transport)
    return queue
