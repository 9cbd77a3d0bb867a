"""Asynchronous exchange of gradients and parameters between data-parallel ranks, in buckets.

A *bucket* is a flat tensor ``[n * s]``: a part of the gradient or parameter buffer of Megatron's
distributed optimizer.  The *shard* of rank r is the view ``bucket[r * s : (r + 1) * s]``.  There
are two operations, both in place and asynchronous::

    Buckets.reduce_scatter   the own shard becomes the sum over the ranks   after the backward of
                                                                            the bucket's layers
    Buckets.all_gather       the other shards are fetched                   before the forward

They overlap with the backward and forward of *other* buckets' layers, so there is no work between
the transfers of one bucket.  The start posts all transfers for which there is scratch memory; the
wait posts the rest and adds the partials.  Timeline of three buckets ``a, b, c`` on rank r of 4,
one chunk each::

    compute  | backward of a | backward of b | backward of c | wait a, b, c: add r-1, r-2, r-3, own
    links    |               | a -> r+1..r+3 | b -> r+1..r+3 | c -> r+1..r+3

Shards are sent directly from the bucket.  Partials arrive in scratch memory and are added in the
order of the schedule (``r-1, ..., r+1`` unless it is ``two_level``), the own shard last.

**No deadlock**, whenever and in whatever order the ranks wait.  Number the transfers by (position
of the bucket in the order of starts, step of its program); the ranks start the same buckets in the
same order, so these numbers are equal on all ranks.  A rank waits for a transfer only in a wait,
which finishes the buckets in the order of starts and their steps in rising order, and before the
ranks compare options that are new, where it first finishes all buckets in flight.  Take the
transfer with the lowest number that is not finished.  All lower ones are finished, so both of its
ends are posted, or will be when their ranks get to a wait: none waits for a higher number before.

On HCCL messages of a lane match by order, so buckets are posted in order, everywhere: one that is
started while an earlier one still waits for scratch memory is posted after it, in a later wait.  So
every rank posts in rising order of the numbers, wherever its waits are.  Transfers ``bucket.step``
with memory for one piece::

    rank 0 calls  | start a | start b |         | wait b                        |
    rank 0 posts  | a.0     |         |         | a.1   a.2   b.0   b.1   b.2   |

    rank 1 calls  | start a | wait a            | start b | wait b              |
    rank 1 posts  | a.0     | a.1   a.2         | b.0     | b.1   b.2           |

**Rules for callers.**  A wait may depend on the waits of other ranks, which post their remaining
transfers.  So place a barrier, or another synchronization, on the same side of the wait on all
ranks.

Give buckets their own transport: the transfers of another op would come between those of the start
and those of the wait, at different positions on different ranks.  On a device, start and wait on
one stream, from one thread at a time.  The lanes must not share a communication stream with a group
whose collectives come before a bucket's transfers on one rank and after them on another: the ranks
would deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from weakref import WeakKeyDictionary

import torch

from commfuse_npu.ops.call import check_call, check_tensors, sum_ending
from commfuse_npu.ops.linear_options import LinearOptions, check_type
from commfuse_npu.plan.program import aligned
from commfuse_npu.plan.rules import BucketGather, BucketScatter
from commfuse_npu.runtime.eager_only import eager_only
from commfuse_npu.runtime.executor import Running, Work
from commfuse_npu.runtime.transport import Transport

__all__ = [
    "BucketExchange",
    "Buckets",
]


SCRATCH_BYTES = 256 << 20
"""Limit on the scratch memory of one reduction, for the sum of the own shard and arriving partials.

The sum and one piece (a chunk of a shard) are always allocated.  If a whole bucket does not fit,
some transfers start only in the wait; if a chunk of all ranks does not fit, partials are added one
by one.  A gather needs no scratch memory.
"""


class Buckets:
    """Exchanges the buckets of one data-parallel group.

    Every rank starts the same buckets in the same order, with the same options.  It may wait for
    them in any order, at any time.

    Args:
        transport: lanes of the data-parallel group, for buckets only.  Several ``Buckets`` may
            share a transport; the order of starts then includes the buckets of all of them.
        options: ``schedule``; a shard has at most as many chunks as elements.  ``reduce_dtype``:
            add partials in this dtype, divide there, and round once.  By default in the bucket's
            own, rounded at every addition: bitwise the collective's sum.  Partials are sent in the
            bucket's dtype either way.  The others do not apply.

    Raises:
        TypeError: ``transport`` or ``options`` has another type.
    """

    def __init__(self, transport: Transport, options: LinearOptions = LinearOptions()) -> None:
        created = "what Transport.create(group) returned on every rank"
        check_type("Buckets", "transport", transport, Transport, created)
        check_call("Buckets", options)
        self._transport = transport
        self._reduce_dtype = options.reduce_dtype
        self._schedule = options.schedule
        if transport not in _queues:
            _queues[transport] = _BucketQueue(transport)
        # All users share it, because they share the lanes.
        self._queue = _queues[transport]

    @eager_only
    def reduce_scatter(
        self, bucket: torch.Tensor, *, average: bool = False, scale: float = 1.0
    ) -> BucketExchange:
        """Start the reduce-scatter of a bucket: each rank gets the sum of its shard.

        Equals, after the wait::

            bucket *= scale
            bucket[r * s : (r + 1) * s] = reduce_scatter(bucket)    # divided by n for the average

        With the bucket's own dtype the sum is rounded at every addition, and the average once more
        after the division; with a ``reduce_dtype`` sum and division are rounded once, together.

        Timeline, rank r of 4, the sum of r-1 first::

            host   | scale, post  | caller's work           | wait: + r-2, + r-3, + own, / n, write
            links  |              | recv r-1 | recv r-2 | recv r-3  |

        Args:
            bucket: ``[n * s]``, contiguous, the same size and dtype on every rank.  It must not be
                changed, nor the own shard read, until the wait returns.  The other shards keep this
                rank's scaled gradients.
            average: divide by the number of ranks.
            scale: multiplies the bucket in place before it is sent, rounded to its dtype, as
                Megatron's ``gradient_scaling_factor`` does.

        Returns:
            A handle; :meth:`BucketExchange.wait` on it, or on one started later, writes the shard.

        Raises:
            TypeError: the bucket is not a tensor; or an average, a scale or a ``reduce_dtype`` for
                a non-floating-point dtype.
            ValueError: the shape, the device or the schedule does not fit, or the bucket is in
                flight already.
            MismatchError: another rank exchanges a different bucket.
            TransportError: a transfer failed.  Nothing was summed.
        """
        name = "reduce_scatter_bucket"
        transport = self._transport
        running = None
        check_tensors(name, bucket=bucket)
        reduce_dtype = self._reduce_dtype
        total = reduce_dtype or bucket.dtype
        if not bucket.dtype.is_floating_point and (average or scale != 1.0 or reduce_dtype):
            raise TypeError(
                f"{name}: the bucket is {bucket.dtype}; an average, a scale and a reduce_dtype "
                "need a floating-point dtype, a sum does not"
            )
        with torch.no_grad():
            if elements := self._elements(name, bucket, average):
                stacks = self._stacks(elements, bucket.dtype, total)
                rule = BucketScatter(elements, *stacks)
                running = transport.begin(rule, name, bucket, self._schedule, average, total)
            if scale != 1.0:
                bucket.mul_(scale)
            finish = sum_ending(transport.size if average else 1)
            return BucketExchange(bucket, self._queue, running, finish)

    @eager_only
    def all_gather(self, bucket: torch.Tensor) -> BucketExchange:
        """Start the all-gather of a bucket: the other ranks' shards arrive in place.

        Equals, after the wait::

            bucket[:] = all_gather(bucket[r * s : (r + 1) * s])

        Timeline, rank r of 4::

            host   | post | caller's work                  | wait
            links  |      | recv r-1 | recv r-2 | recv r-3 |

        Args:
            bucket: ``[n * s]``, contiguous, the same size and dtype on every rank, any dtype.
                Until the wait returns, the other ranks' shards must not be read, nor the own one
                changed.

        Raises:
            ValueError, MismatchError, TransportError: as :meth:`reduce_scatter`.
        """
        name = "all_gather_bucket"
        running = None
        check_tensors(name, bucket=bucket)
        with torch.no_grad():
            if elements := self._elements(name, bucket):
                rule = BucketGather(elements)
                running = self._transport.begin(rule, name, bucket, self._schedule)
            return BucketExchange(bucket, self._queue, running)

    def _stacks(self, elements: int, dtype: torch.dtype, total: torch.dtype) -> tuple[int, int]:
        """Number of partials in a stack, which is added at once, and of stacks with memory.

        A stack has a chunk from every peer if that fits into the scratch memory, else one partial.
        """
        chunks = self._schedule.runs(elements)
        peers = self._transport.size - 1
        piece = max(chunk.stop - chunk.start for chunk in chunks)
        room = SCRATCH_BYTES - aligned(elements) * total.itemsize

        def fit(stack: int) -> int:
            return room // (aligned(stack * piece) * dtype.itemsize)

        return (peers, min(len(chunks), fit(peers))) if fit(peers) > 0 else (1, max(1, fit(1)))

    def _elements(self, name: str, bucket: torch.Tensor, facts: Hashable = ()) -> int:
        """Number of elements of a shard; 0 if there is nothing to transfer, on all ranks alike."""
        transport = self._transport
        elements, rest = divmod(bucket.numel(), transport.size)
        if bucket.dim() != 1 or not bucket.is_contiguous():
            raise ValueError(
                f"{name}: the bucket has shape {tuple(bucket.shape)} and strides "
                f"{bucket.stride()}; it has to be one contiguous dimension; pass the flat buffer "
                "or a run of it"
            )
        if rest:
            raise ValueError(
                f"{name}: {bucket.numel()} elements are not divisible by the group size "
                f"{transport.size}; pad the bucket to {(elements + 1) * transport.size}"
            )
        if transport.size == 1:
            return 0
        transport.expect_unbroken()
        if self._queue.same_memory(bucket):
            raise ValueError(
                f"{name}: elements of the bucket are on their way already; wait for that exchange "
                "first"
            )
        if elements == 0:
            transport.agree(name, path="empty", dtype=bucket.dtype, options=facts)
        return elements


# ---------------------------------------------------------- buckets in flight


class BucketExchange:
    """A bucket in flight, returned by :class:`Buckets`.

    The handle may be dropped: a wait for a bucket started later on the same transport finishes this
    one too.  But without such a wait other ranks may not get the transfers that they need from
    this rank.
    """

    def __init__(
        self,
        bucket: torch.Tensor,
        queue: _BucketQueue,
        running: Running | None,
        finish: Work | None = None,
    ) -> None:
        self.bucket = bucket
        self._queue = queue
        self.finish = finish
        # None if finished, or if there was nothing to transfer: in a group of one, or empty.
        self.running = running
        self.started = False
        if running is not None:
            queue.under_way.append(self)
            queue.post()

    @eager_only
    def wait(self) -> None:
        """Finish all buckets started earlier on the transport, and then this one.

        A second call returns at once.  On HCCL it blocks the current stream, not the host.

        Raises:
            TransportError: a transfer failed, here or in an earlier wait.  A failed sum leaves
                this rank's shard unchanged; a failed gather may have filled some other shards.
        """
        if self.running is not None:
            self._queue.finish(self)


class _BucketQueue:
    """The buckets of one transport in flight, in the order in which they were started."""

    def __init__(self, transport: Transport) -> None:
        # Else a rank in a wait could need transfers of a rank that waits in a comparison.
        transport.before_comparing = self.finish
        self.under_way: deque[BucketExchange] = deque()

    def same_memory(self, bucket: torch.Tensor) -> bool:
        """Whether a bucket in flight overlaps with this one in memory."""
        return any(
            bucket.data_ptr() < other.data_ptr() + other.nbytes
            and other.data_ptr() < bucket.data_ptr() + bucket.nbytes
            for other in (exchange.bucket for exchange in self.under_way)
        )

    def finish(self, last: BucketExchange | None = None) -> None:
        """Finish the buckets up to ``last``, by default all, the oldest first."""
        while self.under_way:
            oldest = self.under_way[0]
            assert oldest.running is not None
            with torch.no_grad():
                # After an error it stays in the queue, so that every later wait raises, too.
                oldest.running.run(finish=oldest.finish)
                oldest.running = None
                del oldest.bucket
                self.under_way.popleft()
                self.post()
            if oldest is last:
                break

    def post(self) -> None:
        """Post the transfers that may be posted.

        The next bucket may start when the one before has posted all its transfers.
        """
        for exchange in self.under_way:
            assert exchange.running is not None
            if not exchange.started:
                exchange.started = True
                exchange.running.run(ahead=True, bucket=exchange.bucket.view(-1, 1))
            if not exchange.running.all_posted:
                break


_queues: WeakKeyDictionary[Transport, _BucketQueue] = WeakKeyDictionary()
