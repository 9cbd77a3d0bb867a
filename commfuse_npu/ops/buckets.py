"""Gradients and parameters of the distributed optimizer, exchanged between data-parallel ranks.

A *bucket* is a flat tensor ``[n * s]``: a run of Megatron's gradient or parameter buffer.  The
*shard* of rank r is ``bucket[r * s : (r + 1) * s]``, a view.  Two operations, both in place, both
asynchronous::

    Buckets.reduce_scatter   the own shard becomes the sum over the ranks   after the backward of
                                                                            the bucket's layers
    Buckets.all_gather       the other shards are fetched                   before the forward

What they hide behind is the backward and forward of *other* buckets' layers, so nothing is computed
between the transfers of one bucket: all that can be posted is posted at the start, the rest, and
the additions, in the wait.  Timeline of three buckets ``a, b, c`` on rank r of 4, one chunk each::

    compute  | backward of a | backward of b | backward of c | wait a, b, c: add r-1, r-2, r-3, own
    links    |               | a -> r+1..r+3 | b -> r+1..r+3 | c -> r+1..r+3

Shards are sent from the bucket as it is; partials arrive in scratch memory and are added in the
order of the schedule, ``r-1, ..., r+1`` unless it is ``two_level`` or has costs, the own one last.

**No deadlock**, whichever rank waits for which bucket when.  Number the transfers by (place of
their bucket in the order of starts, step of its program); the ranks start the same buckets in the
same order, so the numbers are the same on all of them.  A rank waits for a transfer only

1. in a wait, which takes the buckets in the order of starts and their steps in rising order.  With
   too little scratch memory for a whole bucket, a step is posted when an earlier one is added;
2. before the ranks compare options that are new to them: they finish everything under way first,
   so that nobody waits in the comparison who is still needed.  For the digests of what was begun
   (:mod:`commfuse_npu.runtime.agreement`) a rank waits only with nothing under way.

So take the transfer with the lowest number that is not finished.  Everything below it is, so both
of its ends have been posted, or will be as soon as their ranks come to a wait: for a lower one they
need not wait, and for a higher one they do not wait before.

HCCL needs more: on a lane messages match by their order.  There no bucket may overtake another, so
one that is started while an earlier one still waits for scratch memory is posted behind it, in a
later wait.  Posts then rise with the numbers on every rank, wherever its waits are; transfers
``bucket.step`` with room for one piece::

    rank 0 calls  | start a | start b |         | wait b                        |
    rank 0 posts  | a.0     |         |         | a.1   a.2   b.0   b.1   b.2   |

    rank 1 calls  | start a | wait a            | start b | wait b              |
    rank 1 posts  | a.0     | a.1   a.2         | b.0     | b.1   b.2           |

On gloo tags tell the messages apart, and every bucket is posted at its start.

A wait may need the waits of the other ranks, for what was not posted at the start.  So a barrier or
any other meeting of the ranks comes before the wait on all of them, or after it on all of them.

Give buckets a transport of their own: another op's transfers would come between the ones that were
posted at the start and those of the wait, on one rank here and on the other there.  On a device,
start and wait on one stream, from one thread at a time.  Nor may the lanes share a communication
stream with a group whose collectives come before a bucket's transfers on one rank and after them on
another: each would wait behind the other, as on a lane.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch

from commfuse_npu.ops.bucket_exchange import BucketExchange, queue_of
from commfuse_npu.ops.call import check_transport, sum_ending
from commfuse_npu.ops.options import LinearOptions
from commfuse_npu.plan import Schedule
from commfuse_npu.plan.program import aligned
from commfuse_npu.plan.rules import bucket_gather, bucket_scatter
from commfuse_npu.runtime.transport import Transport

__all__ = [
    "BucketExchange",
    "BucketOptions",
    "Buckets",
]


@dataclass(frozen=True)
class BucketOptions:
    """How buckets are exchanged.  The same on every rank of the group.

    Args:
        schedule: who sends to whom when.  A shard of fewer elements than ``chunks`` is cut into as
            many as it has, and ``taper`` has no meaning.
        reduce_dtype: add partials in this dtype, divide there, and round once.  By default in the
            bucket's own, rounded at every addition: bitwise the collective's sum.  They travel in
            the bucket's dtype either way.
        scratch_bytes: the most memory that the reduction of one bucket takes beside it, for the sum
            of the own shard and for partials on their way.  The sum and one piece (a chunk of a
            shard) are always taken.  With less than a whole bucket needs, some transfers start only
            in the wait; with less than a chunk of all ranks, partials are added one by one.  A
            gather takes none.
        last_first: a gather sends the last chunk of each shard first.  Megatron lays parameters out
            in the reverse order of their use, so that those needed first are at the end.

    Raises:
        ValueError: for a value outside its range.
    """

    schedule: Schedule = Schedule()
    reduce_dtype: torch.dtype | None = None
    scratch_bytes: int = 256 << 20
    last_first: bool = False

    def __post_init__(self) -> None:
        LinearOptions(self.schedule, reduce_dtype=self.reduce_dtype)  # it checks them
        size = self.scratch_bytes
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(f"scratch_bytes is {size!r}; it must be a whole number from 0")


class Buckets:
    """Exchanges the buckets of one data-parallel group.

    Every rank starts the same buckets in the same order, with the same options.  It may wait for
    them in any order, at any time.

    Args:
        transport: lanes of the data-parallel group, for buckets only.  Several objects may share
            one transport; their buckets then have one common order.

    Raises:
        TypeError: a group for a transport.
        ValueError: the schedule does not fit the transport.
    """

    def __init__(
        self,
        transport: Transport,
        options: BucketOptions = BucketOptions(),
    ) -> None:
        check_transport("Buckets", transport)
        # Buckets hide behind layers, not behind their own pieces: nothing is gained by tapering.
        self._place = transport.place(replace(options.schedule, taper=1.0))
        # An error now if its nodes do not fill the group.
        options.schedule.hops(transport.rank, transport.size, "first")
        lanes = self._place.schedule.lanes or 1
        if lanes > transport.lanes:
            raise ValueError(
                f"the schedule of buckets uses {lanes} lanes, the transport has "
                f"{transport.lanes}; create it with lanes={lanes} or plan with fewer"
            )
        self._transport = transport
        self._options = options
        self._queue = queue_of(transport)

    def reduce_scatter(
        self, bucket: torch.Tensor, *, average: bool = False, scale: float = 1.0
    ) -> BucketExchange:
        """Begin to sum a bucket over the ranks, of which each keeps its shard.

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
                changed, nor the own shard read, until the wait returned.  The other shards keep the
                gradients of this rank, scaled.
            average: divide by the number of ranks.
            scale: multiplies the bucket in place before anything is sent, rounded to its dtype, as
                Megatron's ``gradient_scaling_factor`` does.

        Returns:
            A handle; :meth:`BucketExchange.wait` on it, or on one started later, writes the shard.

        Raises:
            TypeError: an average, a scale or a ``reduce_dtype`` for a dtype without fractions.
            ValueError: the shape or device does not fit, or the bucket is under way already.
            MismatchError: another rank exchanges another bucket.
            TransportError: a transfer failed.  Nothing was summed.
        """
        name, options, running = "reduce_scatter_bucket", self._options, None
        _check_bucket(name, bucket, self._transport.size)
        _check_fractions(name, bucket, average, scale, options.reduce_dtype)
        total, facts = options.reduce_dtype or bucket.dtype, (average, options.scratch_bytes)
        with torch.no_grad():
            if elements := self._to_transfer(name, bucket, facts):
                stacks = self._stacks(elements, bucket.dtype, total)
                program = bucket_scatter(self._place, elements, *stacks)
                running = self._transport.begin(program, name, bucket, facts, total)
            if scale != 1.0:
                bucket.mul_(scale)
            works = {"finish": sum_ending(self._transport.size if average else 1)}
            return BucketExchange(name, bucket, self._queue, running, works)

    def all_gather(self, bucket: torch.Tensor) -> BucketExchange:
        """Begin to fetch the other ranks' shards of a bucket.

        Equals, after the wait::

            bucket[:] = all_gather(bucket[r * s : (r + 1) * s])

        Timeline, rank r of 4::

            host   | post | caller's work                  | wait
            links  |      | recv r-1 | recv r-2 | recv r-3 |

        Args:
            bucket: ``[n * s]``, contiguous, the same size and dtype on every rank, any dtype.  The
                shards of the others arrive in place; until the wait returned, they must not be
                read (but see :meth:`BucketExchange.wait_rows`), nor the own one changed.

        Raises:
            ValueError, MismatchError, TransportError: as :meth:`reduce_scatter`.
        """
        name, last_first, running = "all_gather_bucket", self._options.last_first, None
        _check_bucket(name, bucket, self._transport.size)
        with torch.no_grad():
            if elements := self._to_transfer(name, bucket, last_first):
                program = bucket_gather(self._place, elements, last_first)
                running = self._transport.begin(program, name, bucket, last_first)
            return BucketExchange(name, bucket, self._queue, running, {})

    def _stacks(self, elements: int, dtype: torch.dtype, total: torch.dtype) -> tuple[int, int]:
        """How many partials are added at once, and how many such stacks have memory.

        One stack holds a chunk of all ranks if there is room for it, else one partial.
        """
        chunks = self._place.schedule.runs(elements, "last")
        piece = max(chunk.stop - chunk.start for chunk in chunks)
        room = self._options.scratch_bytes - aligned(elements) * total.itemsize

        def fit(stack: int) -> int:
            return room // (aligned(stack * piece) * dtype.itemsize)

        peers = self._place.size - 1
        return (peers, min(len(chunks), fit(peers))) if fit(peers) > 0 else (1, max(1, fit(1)))

    def _to_transfer(self, name: str, bucket: torch.Tensor, facts: Hashable) -> int:
        """The elements of a shard; 0 if nothing is to be transferred, on which the ranks agree."""
        transport = self._transport
        if transport.size == 1:
            return 0
        transport.expect_unbroken()
        if self._queue.same_memory(bucket):
            raise ValueError(
                f"{name}: elements of the bucket are on their way already; wait for that exchange "
                "first"
            )
        elements = bucket.numel() // transport.size
        if elements == 0:
            transport.agree(name, path="empty", dtype=bucket.dtype, options=facts)
        return elements


def _check_bucket(name: str, bucket: torch.Tensor, size: int) -> None:
    if bucket.dim() != 1 or not bucket.is_contiguous():
        raise ValueError(
            f"{name}: the bucket has shape {tuple(bucket.shape)} and strides {bucket.stride()}; it "
            "has to be one contiguous dimension; pass the flat buffer or a run of it"
        )
    elements = bucket.numel()
    if elements % size:
        raise ValueError(
            f"{name}: {elements} elements are not divisible by the group size {size}; pad the "
            f"bucket to {elements + -elements % size}"
        )


def _check_fractions(
    name: str,
    bucket: torch.Tensor,
    average: bool,
    scale: float,
    reduce_dtype: torch.dtype | None,
) -> None:
    asked = ["an average"] if average else []
    asked += [f"scale {scale}"] if scale != 1.0 else []
    asked += [f"reduce_dtype {reduce_dtype}"] if reduce_dtype is not None else []
    if asked and not bucket.dtype.is_floating_point:
        raise TypeError(
            f"{name}: the bucket is {bucket.dtype}, which cannot hold the result of "
            f"{' and '.join(asked)}; use a floating-point dtype, or a sum only"
        )
