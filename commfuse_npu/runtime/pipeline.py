"""Collectives taken apart, with the work that feeds them or that they feed in between.

Four functions, two by two mirror images of each other::

    gather_and_consume     blocks arrive and are used      own block first
    produce_and_reduce     blocks are made, sent, summed   own block last
    exchange_and_consume   blocks arrive and are used      own block first
    produce_and_exchange   blocks are made and sent        own block last

and a fifth, :func:`produce_exchange_and_consume`, the last two in one exchange.

Each docstring gives the unfused lines it equals and draws the timeline.  The classes behind them
(:class:`Gather`, :class:`ReduceScatter`) are for operations that have two of them under way at
once, like the backward of a column-parallel linear.

Rows are the first dimension.  A *block* is the part of one rank, ``s`` rows; the whole tensor has
``n * s``.  Callbacks get the rows that a piece has in the whole tensor as a ``slice``; which pieces
there are, and in which order, is written in the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from typing_extensions import Self

from commfuse_npu.kernels import kernels_for
from commfuse_npu.plan import Piece, Plan, Step
from commfuse_npu.runtime.transport import Transport

__all__ = [
    "Consume",
    "Gather",
    "Produce",
    "ReduceScatter",
    "consumed_rows",
    "exchange_and_consume",
    "gather_and_consume",
    "produce_and_exchange",
    "produce_and_reduce",
    "produce_exchange_and_consume",
]

Consume = Callable[[torch.Tensor, slice], None]
"""``consume(piece, rows)``: use ``piece``, which is ``whole[rows]``; it is not yours afterwards."""

Produce = Callable[[slice, torch.Tensor], None]
"""``produce(rows, out)``: write ``whole[rows]`` into ``out``."""


def gather_and_consume(
    shard: torch.Tensor,
    consume: Consume,
    *,
    transport: Transport,
    plan: Plan,
    gathered: torch.Tensor | None = None,
    name: str = "gather_and_consume",
) -> None:
    """All-gather ``shard`` and use each block as soon as it is there.

    Equals, with ``plan.computed_rows(s)`` for the pieces::

        whole = all_gather(shard)
        for rows in pieces:
            consume(whole[rows], rows)

    Timeline, rank r of 4::

        compute  | consume own r | consume r-1 | consume r-2 | consume r-3 |
        links    | recv r-1      | recv r-2    | recv r-3    |             |

    Args:
        shard: ``[s, ...]``, contiguous, the same shape and dtype on every rank.
        consume: called once per piece, own block first.
        gathered: ``[n * s, ...]``, filled with the whole tensor if given.  Blocks then arrive in
            place; without it they pass through scratch memory of two blocks, or of one piece more
            than there are lanes (the ring needs all of it).
        name: the operation's name in errors.

    Raises:
        ValueError, MismatchError, TransportError: see :meth:`Transport.start`.
    """
    with Gather(shard, transport=transport, plan=plan, gathered=gathered, name=name) as gather:
        for piece, rows in gather.pieces():
            consume(piece, rows)
        gather.finish()


def produce_and_reduce(
    produce: Produce,
    out: torch.Tensor,
    *,
    transport: Transport,
    plan: Plan,
    reduce_dtype: torch.dtype | None = None,
    name: str = "produce_and_reduce",
) -> torch.Tensor:
    """Make the partial of each rank's block, send it off, and sum what arrives for the own block.

    Equals, with ``plan.computed_rows(s)`` for the pieces::

        for rows in pieces:
            produce(rows, whole[rows])
        out = reduce_scatter(whole)

    Timeline, rank r of 4::

        compute  | make r+1 | make r+2 | make r+3 | make own r | sum
        links    |          | -> r+1   | -> r+2   | -> r+3     |

    The partials are added in the order of the plan's steps (``r-1, r-2, ..., r+1`` unless the
    schedule is ``two_level``), the own one last, each sum rounded to the dtype of ``out``: gloo's
    reduce-scatter, bit for bit.

    Args:
        produce: called once per piece, own block last.
        out: ``[s, ...]``, contiguous; receives the sum.
        reduce_dtype: add in this dtype instead and round once at the end.  Partials travel in the
            dtype of ``out``.  Not with ``ring``, which rounds at every hop.

    Returns:
        ``out``.

    Raises:
        ValueError, MismatchError, TransportError: see :meth:`Transport.start`.
    """
    with ReduceScatter(
        out, transport=transport, plan=plan, reduce_dtype=reduce_dtype, name=name
    ) as scatter:
        scatter.produce(produce)
        return scatter.finish()


def exchange_and_consume(
    blocks: torch.Tensor,
    consume: Consume,
    *,
    transport: Transport,
    plan: Plan,
    received: torch.Tensor | None = None,
    name: str = "exchange_and_consume",
) -> None:
    """All-to-all of ``blocks``, using each incoming block as soon as it is there.

    Equals, with ``plan.computed_rows(s)`` for the pieces::

        whole = all_to_all(blocks)
        for rows in pieces:
            consume(whole[rows], rows)

    Timeline: as :func:`gather_and_consume`; block r of ``blocks`` is for rank r, block r of the
    result comes from rank r.

    Args:
        blocks: ``[n * s, ...]``, contiguous.
        plan: an ``all_to_all`` with ``own="first"``.
        received: ``[n * s, ...]``, filled with the result if given.
    """
    with _ExchangeIn(
        blocks, transport=transport, plan=plan, received=received, name=name
    ) as exchange:
        for piece, rows in exchange.pieces():
            consume(piece, rows)
        exchange.finish()


def produce_and_exchange(
    produce: Produce,
    out: torch.Tensor,
    *,
    transport: Transport,
    plan: Plan,
    name: str = "produce_and_exchange",
) -> torch.Tensor:
    """Make the block of each rank and send it off; all-to-all.

    Equals, with ``plan.computed_rows(s)`` for the pieces::

        for rows in pieces:
            produce(rows, whole[rows])
        out = all_to_all(whole)

    Timeline: as :func:`produce_and_reduce`, without the sum.

    Args:
        out: ``[n * s, ...]``, contiguous; block r of it comes from rank r.
        plan: an ``all_to_all`` with ``own="last"``.
    """
    with _ExchangeOut(out, transport=transport, plan=plan, name=name) as exchange:
        exchange.produce(produce)
        return exchange.finish()


def produce_exchange_and_consume(
    produce: Produce,
    consume: Consume,
    received: torch.Tensor,
    *,
    transport: Transport,
    plan: Plan,
    name: str = "produce_exchange_and_consume",
) -> torch.Tensor:
    """Make the block of each rank and send it off, and use what comes in return; all-to-all.

    Equals, with ``plan.computed_rows(s)`` for the pieces and :func:`consumed_rows` for what comes::

        for rows in pieces:
            produce(rows, whole[rows])
        received = all_to_all(whole)
        for rows in consumed_rows(plan, s):
            consume(received[rows], rows)

    Timeline, rank r of 3; the own block is the last to be made and the first to be used, so that
    the transfers have all the work to hide behind but the first block made and the last one used::

        compute  | make r+1 | make r+2 | make own r | consume own r | consume r-1 | consume r-2 |
        links    |          | -> r+1   | -> r+2     |               |             |             |

    Args:
        produce: called once per piece, own block last.
        consume: called when everything is made, own block first, then in the order of arrival.
        received: ``[n * s, ...]``, contiguous; block r of it comes from rank r.
        plan: an ``all_to_all`` with ``own="last"``.

    Returns:
        ``received``.

    Raises:
        ValueError, MismatchError, TransportError: see :meth:`Transport.start`.
    """
    with _ExchangeThrough(received, transport=transport, plan=plan, name=name) as exchange:
        exchange.produce(produce)
        for piece, rows in exchange.pieces():
            consume(piece, rows)
        return exchange.finish()


def consumed_rows(plan: Plan, block_rows: int) -> list[slice]:
    """The rows that :func:`produce_exchange_and_consume` consumes one by one, in order."""
    incoming = [step.receive.piece for step in plan.transfers if step.receive is not None]
    mine = [piece for piece in incoming if piece.target == plan.rank]
    return [_received_rows(plan, p, block_rows) for p in (Piece(plan.rank, plan.rank, None), *mine)]


_NO_TRACE = nullcontext()


class _Running:
    """What the four have in common: an exchange, its scratch buffers, and how far it is.

    ``_received`` counts the receives that were registered, ``_used`` those that were waited for;
    without a place of their own for all, they stay within a window of each other, so that the
    scratch memory is bounded.
    """

    def __init__(
        self,
        like: torch.Tensor,
        block: tuple[int, ...],
        *,
        transport: Transport,
        plan: Plan,
        name: str,
        options: Hashable = (),
    ) -> None:
        if not like.is_contiguous():
            raise ValueError(f"{name}: a tensor of shape {tuple(like.shape)} is not contiguous")
        if plan.size > 1 and block[0] < plan.chunks:
            raise ValueError(
                f"{name}: a block of {block[0]} rows cannot be cut into {plan.chunks} chunks; plan "
                f"with {max(block[0], 1)} at most"
            )
        self.plan = plan
        self._window = plan.window
        self._block = block
        self._like = like
        self._transport = transport
        self._exchange = transport.start(plan, name, block, like, options)
        self._lent: list[torch.Tensor] = []
        self._slots: dict[tuple[str, int], torch.Tensor] = {}
        self._received = self._sent = self._used = 0
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if error is not None:
            self._interrupted(error)
        elif not self._closed:
            left = RuntimeError(f"{self._exchange.name} was left before finish()")
            self._interrupted(left)
            raise left

    def _interrupted(self, error: BaseException) -> None:
        # The other ranks wait for transfers that will not come any more.
        self._transport.fail(f"{self._exchange.name} was interrupted by {error!r}")

    def _begin(self, post: Callable[[], None]) -> None:
        """Post what can be; outside the `with` block yet, so that a failure is handled here."""
        try:
            post()
        except BaseException as error:
            self._interrupted(error)
            raise

    def _computing(self, piece: Piece | None) -> AbstractContextManager[None]:
        """Around the work of the caller on a piece, for a trace."""
        trace = self._transport.trace
        if trace is None:
            return _NO_TRACE
        return trace.span("compute", str(piece), self._exchange.name)

    @property
    def _steps(self) -> int:
        return len(self.plan.transfers)

    def _take(self, rows: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        buffer = self._transport.buffers.take(
            (rows, *self._block[1:]), dtype or self._like.dtype, self._like.device
        )
        self._lent.append(buffer)
        return buffer

    def _slot(self, purpose: str, position: int) -> torch.Tensor:
        """Scratch for one piece, shared by the positions that are a window apart."""
        key = purpose, position % self._window
        if key not in self._slots:
            rows = self.plan.slot_rows(key[1], self._block[0], self._window)
            self._slots[key] = self._take(rows)
        return self._slots[key]

    def _part(
        self, whole: torch.Tensor, block: int | None, piece: Piece | None = None
    ) -> torch.Tensor:
        """The rows of ``piece`` in a block of a tensor of all blocks; the whole block for none."""
        assert block is not None
        rows = self._block[0]
        inside = slice(0, rows) if piece is None else self.plan.inside(piece, rows)
        return whole[block * rows + inside.start : block * rows + inside.stop]

    def _rows(self, piece: Piece) -> int:
        inside = self.plan.inside(piece, self._block[0])
        return int(inside.stop - inside.start)

    def _close(self) -> None:
        self._exchange.finish()
        self._closed = True
        self._transport.buffers.give_back(self._lent)
        self._lent.clear()
        self._slots.clear()


class _Inbound(_Running):
    """Own block first: what is sent is there at the start, or arrives and is passed on."""

    def _outgoing(self, piece: Piece) -> torch.Tensor:
        raise NotImplementedError

    def _incoming(self, position: int, piece: Piece) -> torch.Tensor:
        raise NotImplementedError

    def _own(self) -> torch.Tensor:
        raise NotImplementedError

    _in_place = False
    """Whether every message has a place of its own, so that all receives can be posted at once."""
    _ahead: int | None = None
    """How many transfers may be posted so far; ``None`` for all."""

    def _open(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._consumed = 0
        self._post()

    def _post(self) -> None:
        transfers = self.plan.transfers
        limit = self._steps if self._in_place else self._consumed + self._window
        if self._ahead is not None:
            limit = min(limit, self._ahead)
        while self._received < min(limit, self._steps):
            receive = transfers[self._received].receive
            assert receive is not None
            buffer = self._incoming(self._received, receive.piece)
            self._buffers.append(buffer)
            self._exchange.receive(self._received, buffer)
            self._received += 1
        while self._sent < self._received:
            send = transfers[self._sent].send
            assert send is not None
            origin = self.plan.arrival.get(send.piece, -1)
            if origin >= self._used:
                break
            self._exchange.send(self._sent, self._outgoing(send.piece))
            self._sent += 1

    def _arrive(self) -> None:
        """Wait for the next message, and pass on what waited for it."""
        self._exchange.wait_receive(self._used)
        self._used += 1
        self._post()

    def pieces(self) -> Iterator[tuple[torch.Tensor, slice]]:
        """``(piece, rows)`` in the order of the plan.  A piece is valid until the next one."""
        for step in self.plan.steps:
            if step.index == 0:
                with self._computing(step.compute):
                    yield self._own(), self.plan.rows(_computed(step), self._block[0])
                continue
            # Step k uses what the transfer k-1 brought.
            while self._used < step.index:
                self._release(step.index)
                self._arrive()
            if step.compute is not None:
                with self._computing(step.compute):
                    rows = self.plan.rows(step.compute, self._block[0])
                    yield self._buffers[step.index - 1], rows
            self._consumed = step.index
            self._post()

    def advance(self) -> None:
        """Go on by a transfer; for use between pieces of other work.

        Waits for a message only if a send depends on it: one to be passed on, or one that a lane
        holds back.
        """
        if self._ahead is not None:
            self._ahead += 1
            self._post()
        held_back = self._sent < self._received or self._exchange.sends_held_back
        if held_back and self._used < self._received:
            self._arrive()

    def allow(self, ahead: int | None) -> None:
        """Let so many transfers be posted from now on, all for ``None``; never fewer than before.

        For a gather that was made with few ``ahead``, before there was work to hide it behind.
        """
        if self._ahead is not None:
            self._ahead = None if ahead is None else max(ahead, self._ahead)
            self._post()

    def finish(self) -> None:
        """Wait for what has not arrived, and for the sends.  Pieces not taken are passed over."""
        self._release(self._steps)
        while self._used < self._steps:
            self._consumed = self._used
            self._post()
            self._arrive()
        self._close()

    def _release(self, transfers: int) -> None:
        """Allow so many transfers; they are waited for now."""
        if self._ahead is not None and self._ahead < transfers:
            self._ahead = transfers
            self._post()


class Gather(_Inbound):
    """An all-gather under way; see :func:`gather_and_consume`.

    Made with everything posted that can be, or with ``ahead`` transfers, to which each
    :meth:`advance` adds one.  Iterate over :meth:`pieces`, or do other work with :meth:`advance`
    now and then, and call :meth:`finish`, after which ``gathered`` is whole.
    """

    def __init__(
        self,
        shard: torch.Tensor,
        *,
        transport: Transport,
        plan: Plan,
        gathered: torch.Tensor | None = None,
        ahead: int | None = None,
        name: str = "gather",
        options: Hashable = (),
    ) -> None:
        _expect_kind(plan, "gather", "first", name)
        whole = (plan.size * shard.shape[0], *shard.shape[1:])
        _expect_like(gathered, whole, shard, name)
        super().__init__(
            shard,
            tuple(shard.shape),
            transport=transport,
            plan=plan,
            name=name,
            # They decide when transfers are posted, and on HCCL messages match by order.
            options=(gathered is not None, ahead, options),
        )
        self._ahead = ahead
        if gathered is None and plan.forwards and plan.size > 1:
            gathered = self._take(whole[0])
        self._shard = shard
        self._gathered = gathered
        self._in_place = gathered is not None
        self._begin(self._open)
        if gathered is not None:
            self._part(gathered, plan.rank).copy_(shard)

    def _own(self) -> torch.Tensor:
        return self._shard

    def _outgoing(self, piece: Piece) -> torch.Tensor:
        if piece.source == self.plan.rank:
            return self._shard[self.plan.inside(piece, self._block[0])]
        assert self._gathered is not None
        return self._gathered[self.plan.rows(piece, self._block[0])]

    def _incoming(self, position: int, piece: Piece) -> torch.Tensor:
        if self._gathered is not None:
            return self._gathered[self.plan.rows(piece, self._block[0])]
        return self._slot("in", position)[: self._rows(piece)]


class _ExchangeIn(_Inbound):
    """An all-to-all under way whose blocks are consumed; see :func:`exchange_and_consume`."""

    def __init__(
        self,
        blocks: torch.Tensor,
        *,
        transport: Transport,
        plan: Plan,
        received: torch.Tensor | None,
        name: str,
    ) -> None:
        _expect_kind(plan, "all_to_all", "first", name)
        block = _block_of(blocks, plan.size, name)
        _expect_like(received, blocks.shape, blocks, name)
        super().__init__(
            blocks,
            block,
            transport=transport,
            plan=plan,
            name=name,
            options=received is not None,  # it decides when transfers are posted, as in Gather
        )
        self._blocks = blocks
        if received is None and plan.forwards and plan.size > 1:
            received = self._take(blocks.shape[0])
        self._result = received
        self._in_place = received is not None
        self._transit: dict[Piece, torch.Tensor] = {}
        self._begin(self._open)
        if received is not None:
            self._part(received, plan.rank).copy_(self._own())

    def _own(self) -> torch.Tensor:
        return self._part(self._blocks, self.plan.rank)

    def _outgoing(self, piece: Piece) -> torch.Tensor:
        if piece.source != self.plan.rank:
            return self._transit.pop(piece)
        return self._part(self._blocks, piece.target, piece)

    def _incoming(self, position: int, piece: Piece) -> torch.Tensor:
        if piece.target != self.plan.rank:
            self._transit[piece] = self._take(self._rows(piece))
            return self._transit[piece]
        if self._result is not None:
            return self._result[self.plan.rows(piece, self._block[0])]
        return self._slot("in", position)[: self._rows(piece)]


class _Outbound(_Running):
    """Own block last: pieces are made in the order in which they are sent."""

    def _incoming(self, position: int, piece: Piece) -> torch.Tensor:
        raise NotImplementedError

    def _fold(self, position: int, piece: Piece, buffer: torch.Tensor) -> None:
        raise NotImplementedError

    def _own(self) -> torch.Tensor:
        raise NotImplementedError

    def _complete(self, piece: Piece, made: torch.Tensor) -> None:
        """Add to a piece what has to travel with it."""

    _in_place = False

    def _open(self) -> None:
        self._arriving: list[torch.Tensor] = []
        self._post_receives()

    def _post_receives(self) -> None:
        limit = self._steps if self._in_place else self._used + self._window
        while self._received < min(limit, self._steps):
            receive = self.plan.transfers[self._received].receive
            assert receive is not None
            buffer = self._incoming(self._received, receive.piece)
            self._arriving.append(buffer)
            self._exchange.receive(self._received, buffer)
            self._received += 1

    def _use(self) -> None:
        """Take in the oldest message."""
        position = self._used
        receive = self.plan.transfers[position].receive
        assert receive is not None
        self._exchange.wait_receive(position)
        self._fold(position, receive.piece, self._arriving[position])
        self._used += 1

    def _send_next(self, tensor: torch.Tensor) -> None:
        while self._received <= self._sent:
            self._use()
            self._post_receives()
        self._exchange.send(self._sent, tensor)
        self._sent += 1

    def produce(self, produce: Produce) -> None:
        """Make all pieces, the own block last, and send each as soon as it is made."""
        for step in self.plan.steps:
            if step.compute is None:
                continue
            rows = self.plan.rows(step.compute, self._block[0])
            if step.compute.chunk is None:
                with self._computing(step.compute):
                    produce(rows, self._own())
                continue
            if self._sent >= self._window:
                self._exchange.wait_send(self._sent - self._window)
            made = self._slot("out", self._sent)[: self._rows(step.compute)]
            with self._computing(step.compute):
                produce(rows, made)
            self._complete(step.compute, made)
            self._send_next(made)

    def _drain(self) -> None:
        while self._used < self._steps:
            self._post_receives()
            self._use()


class ReduceScatter(_Outbound):
    """A reduce-scatter under way; see :func:`produce_and_reduce`.

    Args:
        queued: the transfers come after others on the same links, while pieces are made: give each
            a buffer of its own, so that making them does not wait for the links.  ``n - 1`` blocks
            for what leaves and up to as many for what arrives, where the collective has ``n``.

    Made with its receives posted.  Call :meth:`produce`, do other work while the last transfers are
    under way, and call :meth:`finish` for the sum, divided by ``divisor`` in the dtype of the sum.
    """

    def __init__(
        self,
        out: torch.Tensor,
        *,
        transport: Transport,
        plan: Plan,
        reduce_dtype: torch.dtype | None = None,
        divisor: int = 1,
        queued: bool = False,
        name: str = "reduce_scatter",
        options: Hashable = (),
    ) -> None:
        _expect_kind(plan, "reduce_scatter", "last", name)
        if reduce_dtype == out.dtype:
            reduce_dtype = None
        if reduce_dtype is not None and plan.forwards:
            raise ValueError(
                f"{name}: reduce_dtype {reduce_dtype} with the ring schedule: partial sums would "
                "be rounded at every hop all the same; use shifted"
            )
        super().__init__(
            out,
            tuple(out.shape),
            transport=transport,
            plan=plan,
            name=name,
            options=(reduce_dtype, queued, options),
        )
        if queued:
            self._window = max(1, self._steps)
        self._divisor = divisor
        self._out = out
        self._kernels = kernels_for(out.device)
        self._sum = out
        self._own_partial = out
        if plan.size > 1:
            self._own_partial = self._take(out.shape[0])
            if reduce_dtype is not None:
                self._sum = self._take(out.shape[0], reduce_dtype)
        self._carried: dict[Piece, torch.Tensor] = {}
        self._begin(self._open)

    def _first(self, position: int, piece: Piece) -> bool:
        return self.plan.arrival[piece] == position

    def _incoming(self, position: int, piece: Piece) -> torch.Tensor:
        mine = piece.target == self.plan.rank
        if mine and self._sum is self._out and self._first(position, piece):
            return self._out[self.plan.inside(piece, self._block[0])]
        return self._slot("in", position)[: self._rows(piece)]

    def _fold(self, position: int, piece: Piece, buffer: torch.Tensor) -> None:
        if piece.target != self.plan.rank:
            self._carried[piece] = buffer
            return
        total = self._sum[self.plan.inside(piece, self._block[0])]
        if not self._first(position, piece):
            self._kernels.add_partials(total, (buffer,))
        elif self._sum is not self._out:
            total.copy_(buffer)

    def _complete(self, piece: Piece, made: torch.Tensor) -> None:
        if piece in self.plan.arrival:
            while piece not in self._carried:
                self._use()
            self._kernels.add_partials(made, (self._carried.pop(piece),))
            self._post_receives()

    def _own(self) -> torch.Tensor:
        return self._own_partial

    def finish(self) -> torch.Tensor:
        """Wait for what has not arrived, add it and the own partial, and return the sum."""
        self._drain()
        if self._own_partial is not self._out:
            if self._divisor == 1:
                self._kernels.add_partials(self._sum, (self._own_partial,), out=self._out)
            else:
                self._kernels.add_partials(self._sum, (self._own_partial,))
                torch.div(self._sum, self._divisor, out=self._out)
        self._close()
        return self._out


class _ExchangeOut(_Outbound):
    """An all-to-all under way whose blocks are produced; see :func:`produce_and_exchange`."""

    def __init__(self, out: torch.Tensor, *, transport: Transport, plan: Plan, name: str) -> None:
        _expect_kind(plan, "all_to_all", "last", name)
        super().__init__(
            out, _block_of(out, plan.size, name), transport=transport, plan=plan, name=name
        )
        self._out = out
        self._in_place = True
        self._transit: dict[Piece, torch.Tensor] = {}
        self._begin(self._open)

    def _incoming(self, position: int, piece: Piece) -> torch.Tensor:
        if piece.target != self.plan.rank:
            return self._take(self._rows(piece))
        return self._part(self._out, piece.source, piece)

    def _fold(self, position: int, piece: Piece, buffer: torch.Tensor) -> None:
        if piece.target != self.plan.rank:
            self._transit[piece] = buffer

    def _own(self) -> torch.Tensor:
        return self._part(self._out, self.plan.rank)

    def finish(self) -> torch.Tensor:
        """Pass on what is for other ranks and wait for the rest."""
        while self._sent < self._steps:
            send = self.plan.transfers[self._sent].send
            assert send is not None
            while send.piece not in self._transit:
                self._use()
            self._send_next(self._transit.pop(send.piece))
        self._drain()
        self._close()
        return self._out


class _ExchangeThrough(_ExchangeOut):
    """An all-to-all under way, both ends used; see :func:`produce_exchange_and_consume`."""

    def pieces(self) -> Iterator[tuple[torch.Tensor, slice]]:
        """``(piece, rows)`` of the result, own block first; everything has to be made before."""
        rows = self._block[0]
        own = Piece(self.plan.rank, self.plan.rank, None)
        with self._computing(own):
            yield self._own(), _received_rows(self.plan, own, rows)
        for step in self.plan.transfers:
            self._pass_on()
            self._use()
            assert step.receive is not None
            piece = step.receive.piece
            if piece.target == self.plan.rank:
                with self._computing(piece):
                    yield (
                        self._part(self._out, piece.source, piece),
                        _received_rows(self.plan, piece, rows),
                    )

    def _pass_on(self) -> None:
        """Send what has arrived for other ranks: they wait for it, and do not see our work."""
        while self._sent < self._steps:
            send = self.plan.transfers[self._sent].send
            assert send is not None
            if send.piece not in self._transit:
                return
            self._send_next(self._transit.pop(send.piece))


def _received_rows(plan: Plan, piece: Piece, block_rows: int) -> slice:
    """Rows of ``piece`` in the result of an all-to-all."""
    assert piece.source is not None
    start = piece.source * block_rows
    inside = plan.inside(piece, block_rows)
    return slice(start + inside.start, start + inside.stop)


def _computed(step: Step) -> Piece:
    assert step.compute is not None
    return step.compute


def _expect_kind(plan: Plan, kind: str, own: str, name: str) -> None:
    if (plan.kind, plan.own) != (kind, own):
        raise ValueError(
            f"{name}: needs a {kind} plan with the own block {own}, not a {plan.kind} plan with "
            f"the own block {plan.own}"
        )


def _expect_like(
    tensor: torch.Tensor | None, shape: Sequence[int], like: torch.Tensor, name: str
) -> None:
    if tensor is None:
        return
    if tuple(tensor.shape) != tuple(shape) or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: the result has shape {tuple(tensor.shape)}; it has to be {tuple(shape)}, "
            "contiguous"
        )
    if (tensor.dtype, tensor.device) != (like.dtype, like.device):
        raise ValueError(
            f"{name}: the result is {tensor.dtype} on {tensor.device}; it has to be {like.dtype} "
            f"on {like.device}, like what is transferred"
        )


def _block_of(whole: torch.Tensor, size: int, name: str) -> tuple[int, ...]:
    if whole.shape[0] % size:
        raise ValueError(
            f"{name}: {whole.shape[0]} rows are not divisible by the group size {size}; pad them"
        )
    return (whole.shape[0] // size, *whole.shape[1:])
