"""Buckets under way: what one of them sends, receives and adds, and in which order they go.

:class:`BucketExchange` is the handle that a caller waits for, :class:`Reduction` and
:class:`Gathering` do the work behind it, :class:`Line` keeps the buckets of one transport in the
order in which they were started.  Why that order cannot hang is said in
:mod:`commfuse_npu.ops.buckets`.

Legend: ``n`` ranks, ``r`` this rank, ``s`` elements of a shard, ``c`` chunks of a shard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch

from commfuse_npu.kernels import kernels_for
from commfuse_npu.plan import Piece, Plan
from commfuse_npu.runtime.transport import Exchange, Transport

__all__ = ["BucketExchange", "Gathering", "Line", "Reduction", "line_of"]


class BucketExchange:
    """A bucket under way, as :class:`~commfuse_npu.ops.buckets.Buckets` hands it out.

    It may be forgotten: waiting for a bucket that was started later on the same transport finishes
    this one too.  But the other ranks get what they need of this rank only in such a wait.
    """

    def __init__(
        self, name: str, elements: int, line: Line, running: Reduction | Gathering | None
    ) -> None:
        self._name = name
        self._elements = elements
        self._line = line
        # None: there is nothing to transfer, in a group of one or for an empty bucket.
        self._running = running
        self._sums = isinstance(running, Reduction)

    def wait(self) -> None:
        """Finish this bucket, and before it all that were started earlier on its transport.

        A second call returns at once.  On HCCL it holds the current stream, not the host.

        Raises:
            TransportError: a transfer failed, here or in an earlier wait.  The shard of this rank
                is as it was if a reduction fails; a gather may have filled some of the others.
        """
        if self._running is not None:
            self._line.finish(self._running)
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
        if isinstance(self._running, Gathering) and start < stop:
            self._line.wait_elements(self._running, start, stop)

    def is_completed(self) -> bool:
        """Whether the bucket is finished.

        It never becomes so without a wait, for this bucket or a later one: do not poll it.
        """
        return self._running is None or self._running.done


class Line:
    """The buckets of one transport, in the order in which they were started.

    Attributes:
        agreed: the combinations of operation, size, dtype and options that the ranks have compared.
    """

    def __init__(self) -> None:
        self.agreed: set[Hashable] = set()
        self._under_way: deque[_Running] = deque()
        self._broken = False

    def add(self, running: _Running) -> None:
        """Put a bucket at the end and post what may be posted."""
        self._under_way.append(running)
        with self._or_broken(running):
            running.begin()
            self._post()

    def finish(self, last: _Running) -> None:
        """Finish the buckets up to ``last``, the oldest first."""
        self._finish_before(last)
        if not last.done:
            self._finish_oldest()

    def finish_all(self) -> None:
        if self._under_way:
            self.finish(self._under_way[-1])

    def wait_elements(self, gathering: Gathering, start: int, stop: int) -> None:
        """Finish what is before ``gathering``, then wait for some of its elements."""
        self._finish_before(gathering)
        if not gathering.done:
            with self._or_broken(gathering):
                gathering.wait_elements(start, stop)

    def _finish_before(self, running: _Running) -> None:
        while not running.done:
            if self._broken:
                # What is left over must not be waited for again: a second wait for a failed
                # transfer returns at once, as if its data were there.
                raise running.transport.error()
            if self._under_way[0] is running:
                return
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        oldest = self._under_way[0]
        with self._or_broken(oldest), torch.no_grad():
            oldest.finish(self._post)
        self._under_way.popleft()

    def same_memory(self, bucket: torch.Tensor) -> bool:
        """Whether a bucket under way has elements in common with this one."""
        return any(
            bucket.data_ptr() < other.bucket.data_ptr() + other.bucket.nbytes
            and other.bucket.data_ptr() < bucket.data_ptr() + bucket.nbytes
            for other in self._under_way
        )

    def _post(self) -> None:
        for running in self._under_way:
            if not running.post() and running.transport.batched:
                # Batches match by order, so no bucket may overtake another.
                return

    @contextmanager
    def _or_broken(self, running: _Running) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # The other ranks wait for transfers that will not come any more.
            running.transport.fail(f"{running.name} was interrupted by {error!r}")
            self._broken = True
            self._under_way.clear()
            raise


_lines: WeakKeyDictionary[Transport, Line] = WeakKeyDictionary()


def line_of(transport: Transport) -> Line:
    """The line of a transport: one, however many users it has, because its lanes are theirs."""
    return _lines.setdefault(transport, Line())


class _Running:
    """What the two have in common: the transfers of a plan, between views of a bucket."""

    def __init__(
        self, bucket: torch.Tensor, transport: Transport, plan: Plan, exchange: Exchange
    ) -> None:
        self.bucket = bucket
        self.transport = transport
        self.done = False
        self._plan = plan
        self._exchange = exchange
        self._shard_elements = bucket.numel() // plan.size
        self._received = self._sent = 0

    @property
    def name(self) -> str:
        return self._exchange.name

    def _place(self, piece: Piece) -> slice:
        """Where a piece is in the bucket."""
        return self._plan.rows(piece, self._shard_elements)

    def _incoming(self, position: int, piece: Piece) -> torch.Tensor | None:
        """Where a message arrives; ``None`` if there is no room for it now."""
        raise NotImplementedError

    def begin(self) -> None:
        """What has to be done to the bucket before anything of it is sent."""

    def post(self) -> bool:
        """Post as many transfers as there is room for; whether that was the last of them."""
        transfers = self._plan.transfers
        # All receives before the sends: see the transport.  A batch is posted by its send.
        while self._received < len(transfers):
            receive = transfers[self._received].receive
            assert receive is not None
            buffer = self._incoming(self._received, receive.piece)
            if buffer is None:
                break
            self._exchange.receive(self._received, buffer)
            self._received += 1
        while self._sent < self._received:
            send = transfers[self._sent].send
            assert send is not None
            self._exchange.send(self._sent, self.bucket[self._place(send.piece)])
            self._sent += 1
        return self._sent == len(transfers)

    def finish(self, post: Callable[[], None]) -> None:
        """Wait for everything.  ``post`` is called when there is room for more transfers."""
        self._exchange.finish()
        self.done = True


class Reduction(_Running):
    """A reduce-scatter: the partials of the own shard arrive in scratch and are added there.

    The sum has memory of its own until everything has arrived and everything is sent, so that an
    error leaves the shard as it was.

    Args:
        scale: multiplies the whole bucket before anything is sent.
        average: divide the sum by ``n``.
        dtype: in which to add; with that of the bucket every addition is rounded to it.
        scratch_bytes: for the sum and the partials; the sum and one piece are always taken.
    """

    def __init__(
        self,
        bucket: torch.Tensor,
        transport: Transport,
        plan: Plan,
        exchange: Exchange,
        *,
        scale: float,
        average: bool,
        dtype: torch.dtype,
        scratch_bytes: int,
    ) -> None:
        super().__init__(bucket, transport, plan, exchange)
        self._scale = scale
        self._average = average
        self._dtype = dtype
        self._kernels = kernels_for(bucket.device)
        self._piece_elements = -(-self._shard_elements // plan.chunks)
        left = scratch_bytes - self._shard_elements * dtype.itemsize
        self._slots_left = max(1, left // (self._piece_elements * bucket.dtype.itemsize))
        self._lent: list[torch.Tensor] = []
        self._free: deque[torch.Tensor] = deque()
        self._arriving: deque[torch.Tensor] = deque()
        self._total: torch.Tensor | None = None

    def begin(self) -> None:
        if self._scale != 1.0:
            self.bucket.mul_(self._scale)

    def _take(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = self.transport.buffers.take((elements,), dtype, self.bucket.device)
        self._lent.append(buffer)
        return buffer

    def _sum_of(self, piece: Piece) -> torch.Tensor:
        if self._total is None:
            self._total = self._take(self._shard_elements, self._dtype)
        return self._total[self._plan.inside(piece, self._shard_elements)]

    def _starts_sum(self, position: int, piece: Piece) -> bool:
        return self._plan.arrival[piece] == position

    def _incoming(self, position: int, piece: Piece) -> torch.Tensor | None:
        total = self._sum_of(piece)
        if total.dtype == self.bucket.dtype and self._starts_sum(position, piece):
            return total
        if self._free:
            slot = self._free.popleft()
        elif self._slots_left:
            self._slots_left -= 1
            slot = self._take(self._piece_elements, self.bucket.dtype)
        else:
            return None
        self._arriving.append(slot)
        return slot[: total.numel()]

    def _add(self, position: int, piece: Piece) -> None:
        total = self._sum_of(piece)
        starts = self._starts_sum(position, piece)
        if starts and total.dtype == self.bucket.dtype:
            return
        slot = self._arriving.popleft()
        partial = slot[: total.numel()]
        if starts:
            total.copy_(partial)
        else:
            self._kernels.add_partials(total, (partial,))
        self._free.append(slot)

    def finish(self, post: Callable[[], None]) -> None:
        for position, step in enumerate(self._plan.transfers):
            assert step.receive is not None
            self._exchange.wait_receive(position)
            self._add(position, step.receive.piece)
            post()
        # Nothing can fail any more after this, so the shard changes from one state to the other.
        self._exchange.finish()
        own = Piece(None, self._plan.rank, None)
        shard, total = self.bucket[self._place(own)], self._sum_of(own)
        self._kernels.add_partials(total, (shard,), out=None if self._average else shard)
        if self._average:
            shard.copy_(total.div_(self._plan.size))
        self.transport.buffers.give_back(self._lent)
        self.done = True


class Gathering(_Running):
    """An all-gather: every piece has its place in the bucket.

    Args:
        last_first: the chunks of a shard travel from its end to its start.
    """

    def __init__(
        self,
        bucket: torch.Tensor,
        transport: Transport,
        plan: Plan,
        exchange: Exchange,
        *,
        last_first: bool,
    ) -> None:
        super().__init__(bucket, transport, plan, exchange)
        self._last_first = last_first

    def _place(self, piece: Piece) -> slice:
        if self._last_first and piece.chunk is not None:
            piece = piece._replace(chunk=self._plan.chunks - 1 - piece.chunk)
        return super()._place(piece)

    def _incoming(self, position: int, piece: Piece) -> torch.Tensor:
        return self.bucket[self._place(piece)]

    def wait_elements(self, start: int, stop: int) -> None:
        for position, step in enumerate(self._plan.transfers):
            assert step.receive is not None
            place = self._place(step.receive.piece)
            if place.start < stop and start < place.stop:
                self._exchange.wait_receive(position)
