"""Transfers with two ends, each a node of autograd: begun in one, waited for in the other.

==========  =================================  =====================================
node        forward                            backward
==========  =================================  =====================================
gather      begins the all-gather              waits for the sum
column      waits, multiplies                  dgrad, begins its reduce-scatter; wgrad
row         multiplies, begins the             waits for the gradient; dgrad
            reduce-scatter
end         waits for the sum                  begins the all-gather of the gradient
==========  =================================  =====================================

Between the two nodes of a transfer stands a *token*: a tensor without contents, whose gradient has
none either.  The engine of autograd takes the ready node that was created last, so that the
backward has the order of the forward in reverse, transfers included: whoever writes the forward
well has written the backward.

A token has one consumer, and crosses no checkpoint and no stage of a pipeline: the data arrives
after the node before it has run.  What comes back through a token is checked, and what was begun
and never ended is an error at the next forward.

Transfers are collectives of the group, one per chunk: the work that hides them is that of other
chunks, so that nothing is gained by taking them apart.  All ranks begin them in the same order, for
it is that of the model.
"""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from commfuse_npu.layers.linear_arguments import compute_dtype
from commfuse_npu.layers.saved_weight import SavedWeight
from commfuse_npu.layers.weight_gradient import WeightGradient
from commfuse_npu.runtime.collectives import Begun, begin_all_gather, begin_reduce_scatter
from commfuse_npu.runtime.order_log import CollectiveLog
from commfuse_npu.runtime.trace import Event, clock
from commfuse_npu.runtime.transport import Transport

__all__ = ["Arriving", "Flow", "Leaving", "Weight", "in_backward", "token"]


_CHUNK = re.compile(r"chunk \d+")

Collective = Callable[[torch.Tensor], Begun]
"""Begins the transfer of a tensor."""


class Weight:
    """A weight in one pass, and the gradient that all chunks add to.

    It enters the graph once, before the first chunk: its gradient is complete, and handed on, when
    the backward of all chunks is done.

    Args:
        weight: ``[O, I]``.
        main_grad: see :class:`~commfuse_npu.layers.weight_gradient.WeightGradient`.
    """

    def __init__(self, weight: torch.Tensor, main_grad: bool) -> None:
        self._saved = SavedWeight(weight)
        self._main_grad = main_grad
        self._gradient: WeightGradient | None = None
        self._later: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.alias: torch.Tensor = _Weight.apply(weight, self)

    def get(self) -> torch.Tensor:
        """The weight, for the backward."""
        return self._saved.get("flow")

    def add(self, grad: torch.Tensor, x: torch.Tensor) -> None:
        """``+= grad^T @ x``, of the rows of a chunk."""
        if self._gradient is None:
            # Blocks are summed in fp32.
            self._gradient = WeightGradient(self.get(), main_grad=self._main_grad, blocks=True)
        self._gradient.add(grad.flatten(0, -2), x.flatten(0, -2))

    def add_later(self, grad: torch.Tensor, x: torch.Tensor) -> None:
        """The same, when :meth:`flush` is called."""
        self._later.append((grad, x))

    def flush(self) -> None:
        """Add what was left for later."""
        later, self._later = self._later, []
        for grad, x in later:
            self.add(grad, x)

    def take(self) -> torch.Tensor | None:
        """What the backward returns for the weight."""
        self.flush()
        gradient, self._gradient = self._gradient, None
        return None if gradient is None else gradient.result()


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, state: Weight) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.state = state
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return ctx.state.take(), None


class Transfer:
    """One transfer of a chunk, forward and then backward.

    Args:
        name: for errors, order logs and traces.

    Attributes:
        log: where its end is to be written down.
        since: when it was begun, for a trace.
    """

    def __init__(self, flow: Flow, name: str) -> None:
        self.flow, self.name = flow, name
        self.log: CollectiveLog | None = None
        self.since = 0
        self._begun: Begun | None = None
        self._kept: torch.Tensor | None = None

    @property
    def begun(self) -> bool:
        return self._begun is not None

    @property
    def ranks(self) -> int:
        """Of the group."""
        return self.flow.transport.size

    def begin(self, collective: Collective, tensor: torch.Tensor, *, forward: bool = False) -> None:
        """Begin it; what it reads is held until its end."""
        self._kept = tensor.contiguous()
        self._begun = self.flow.begin(self, collective, self._kept, forward)

    def end(self) -> torch.Tensor:
        """Wait for the result.

        Raises:
            TransportError: it failed, or was never begun.
        """
        begun, self._begun = self._begun, None
        result = self.flow.end(self, begun)
        self._kept = None
        return result


class Arriving(NamedTuple):
    """A chunk that is gathered.

    Attributes:
        token: ``[s / c, B, H]``, without contents: for :meth:`Flow.column`.
        shard: what is sent of it, this rank's rows.
    """

    token: torch.Tensor
    shard: torch.Tensor
    transfer: Transfer
    again: _Again


class Leaving(NamedTuple):
    """A chunk that is scattered.

    Attributes:
        token: ``[S / c, B, H]``, without contents: for :meth:`Flow.end_scatter`.
    """

    token: torch.Tensor
    transfer: Transfer


class _Again:
    """The input of a column-parallel layer, gathered again for its weight gradient."""

    def __init__(self, flow: Flow, name: str) -> None:
        self._transfer = Transfer(flow, f"{name}, again")
        self._column: Callable[[], Any] = lambda: None
        self.after: Weight | None = None

    def of(self, ctx: Any) -> None:
        self._column = weakref.ref(ctx)

    def begin(self) -> None:
        """Begin it, once, unless nothing needs it."""
        ctx = self._column()
        if ctx is not None and ctx.gathers_again and not self._transfer.begun:
            # Unpacked here and nowhere else: twice is an error under checkpointing.
            (shard,) = ctx.saved_tensors
            self._transfer.begin(self._transfer.flow.all_gather, shard)

    def end(self) -> torch.Tensor:
        self.begin()
        return self._transfer.end()


class Flow:
    """The transfers of a group for layers in chunks.

    Args:
        transport: of the tensor-parallel group; its collectives are used, not its lanes.
        chunks: how many runs the sequence is cut into, at least 2; with less than 3 there is no
            chunk to hide the last gather behind.

    Raises:
        ValueError: fewer than 2 chunks.
    """

    def __init__(self, transport: Transport, chunks: int) -> None:
        if chunks < 2:
            raise ValueError(
                f"a flow of {chunks} chunks has nothing to hide transfers behind; choose at least 2"
            )
        self.transport, self.chunks = transport, chunks
        # By whether a forward began it that ran again, inside a backward.
        self._open: dict[Transfer, bool] = transport.remembered.setdefault(__name__, {})

    # ------------------------------------------------------------- what a layer is made of

    def weights(self, given: Iterable[tuple[torch.Tensor, bool]]) -> list[Weight]:
        """Bring weights into the graph, before the first chunk that uses them.

        The gradients of later ones are finished first.

        Args:
            given: each with whether it accumulates into its ``main_grad``.

        Raises:
            TypeError: autocast would compute in another dtype than that of a weight.
        """
        given = list(given)
        for weight, _ in given:
            dtype = compute_dtype(weight)
            if weight.dtype != dtype:
                raise TypeError(
                    f"flow: a weight is {weight.dtype}, autocast computes in {dtype}, and a flow "
                    "does not cast; keep weights in the compute dtype, or turn autocast off"
                )
        return [Weight(weight, main_grad) for weight, main_grad in given]

    def gather(self, shard: torch.Tensor, name: str) -> Arriving:
        """Begin to gather a chunk.

        Args:
            shard: ``[s / c, B, H]``, this rank's rows.
            name: for errors.
        """
        transfer, again = Transfer(self, f"gather of {name}"), _Again(self, f"gather of {name}")
        token = _Gather.apply(shard, transfer)
        return Arriving(token, shard.detach(), transfer, again)

    def column(
        self, arriving: Arriving, weight: Weight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``all_gather(shard) @ weight^T + bias`` of the chunk.

        Equals, with ``x_SBH`` the chunk of all ranks::

            y_SBO = x_SBH @ weight^T + bias
            # backward
            dx_sBH = reduce_scatter(dy_SBO @ weight)
            dweight += dy_SBO^T @ x_SBH

        Args:
            weight: ``[O, H]``, this rank's rows of the whole weight.
            bias: ``[O]``.

        Returns:
            ``[S / c, B, O]``.
        """
        token, shard, transfer, again = arriving
        return _Column.apply(token, shard, weight.alias, bias, transfer, again, weight)

    def row(
        self, x: torch.Tensor, weight: Weight, name: str, after: Arriving | None = None
    ) -> Leaving:
        """``x @ weight^T`` of a chunk, and begin to scatter its sum over the ranks.

        Args:
            x: ``[S / c, B, I]``.
            weight: ``[H, I]``, this rank's columns of the whole weight.
            name: for errors.
            after: what the column-parallel layer before it gathered: in the backward it is gathered
                again behind the work between the two.
        """
        transfer = Transfer(self, f"scatter of {name}")
        again = None if after is None else after.again
        return Leaving(_Row.apply(x, weight.alias, transfer, again, weight), transfer)

    def end_scatter(self, leaving: Leaving) -> torch.Tensor:
        """The sum of this rank's rows of a chunk, ``[s / c, B, H]``.

        Equals, with :meth:`row`::

            y_sBH = reduce_scatter(x_SBI @ weight^T)
            # backward
            dy_SBH = all_gather(dy_sBH)
            dx_SBI = dy_SBH @ weight
            dweight += dy_SBH^T @ x_SBI
        """
        return _EndScatter.apply(leaving.token, leaving.transfer)

    # ------------------------------------------------------------- transfers

    def check_none_open(self) -> None:
        """Nothing may be under way where a forward begins.

        A checkpoint that runs a forward again stops where the backward has what it needs; what that
        left under way is finished here.

        Raises:
            TransportError: a backward was pruned, or failed, between the two ends of a transfer.
        """
        if not self._open or in_backward():
            return
        for transfer in [transfer for transfer, again in self._open.items() if again]:
            transfer.end()
        if self._open:
            names = ", ".join(transfer.name for transfer in self._open)
            left = list(self._open)
            self._open.clear()
            self.transport.fail(
                f"flow: begun and never ended: {names}. An error came in between, or a backward "
                "was asked for part of the gradients; run whole backwards, or leave the flow off",
                *left,
            )
            raise self.transport.error()

    def begin(
        self, transfer: Transfer, collective: Collective, tensor: torch.Tensor, forward: bool
    ) -> Begun:
        """Begin a collective."""
        if self.transport.broken:
            raise self.transport.error()
        self._open[transfer] = forward and in_backward()
        if self.transport.order_log is not None:
            kind = collective.__name__
            transfer.log = self.transport.order_log.collective(
                kind, transfer.name, tensor.nbytes, tensor.dtype
            )
        if self.transport.trace is not None:
            transfer.since = clock()
        return collective(tensor)

    def all_gather(self, shard: torch.Tensor) -> Begun:
        """Begin it: the collective of the group, which whoever has another one overrides."""
        return begin_all_gather(shard, self.transport.group)

    def reduce_scatter(self, full: torch.Tensor) -> Begun:
        """Begin it, as :meth:`all_gather`; ``full`` is held until its end."""
        return begin_reduce_scatter(full, self.transport.group)

    def end(self, transfer: Transfer, begun: Begun | None) -> torch.Tensor:
        """Wait for a collective."""
        if begun is None:
            self.transport.fail(f"flow: {transfer.name} was waited for before it was begun")
            raise self.transport.error()
        result, work = begun
        if transfer.log is not None:
            transfer.log.wait()
            transfer.log = None
        trace, start = self.transport.trace, time.perf_counter()
        came = 0 if trace is None else clock()
        try:
            self.transport.wait_for(work)
        except RuntimeError as error:
            self.transport.fail(f"flow: {transfer.name}: {error}", begun)
            raise self.transport.error() from error
        finally:
            self.transport.blocked_seconds += time.perf_counter() - start
            self._open.pop(transfer, None)
        if trace is not None:
            now, about = clock(), (transfer.name, "flow")
            trace.add(Event("waiting", *about, came, now))
            if transfer.since:
                # Their links carry one after the other.
                trace.add_in_order(Event("collectives", *about, transfer.since, now, result.nbytes))
                transfer.since = 0
        return result

    def working(
        self, what: str, weight: Weight, transfer: Transfer
    ) -> AbstractContextManager[object]:
        """Around work on a chunk, for a trace."""
        trace = self.transport.trace
        if trace is None:
            return nullcontext()
        chunk, linear = _CHUNK.search(transfer.name), trace.linears.get(weight.alias.data_ptr())
        return trace.span(
            "compute",
            f"{what if linear is None else f'{linear.name} {what}'}, "
            f"{transfer.name if chunk is None else chunk[0]}",
            "flow",
            linear,
        )


def in_backward() -> bool:
    """Whether a backward is running: what runs forward in it runs again."""
    return torch._C._current_graph_task_id() != -1


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.full((), torch.nan, dtype=dtype, device=device)


def token(like: torch.Tensor, shape: Iterable[int]) -> torch.Tensor:
    """A tensor without contents: not a number, everywhere, in the memory of one."""
    return _nothing(like.dtype, like.device).expand(*shape).data


def _check_token(grad: torch.Tensor, transfer: Transfer) -> None:
    if grad.data_ptr() != _nothing(grad.dtype, grad.device).data_ptr():
        raise RuntimeError(
            f"flow: the token of the {transfer.name} got a gradient from elsewhere: it has one "
            "consumer, and crosses no checkpoint and no hook that makes a tensor of its own"
        )


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, transfer: Transfer) -> torch.Tensor:
        ctx.transfer = transfer
        transfer.begin(transfer.flow.all_gather, shard, forward=True)
        return token(shard, shard.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        _check_token(grad, ctx.transfer)
        return ctx.transfer.end(), None


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        _: torch.Tensor,
        shard: torch.Tensor,
        alias: torch.Tensor,
        bias: torch.Tensor | None,
        transfer: Transfer,
        again: _Again,
        weight: Weight,
    ) -> torch.Tensor:
        ctx.gathers_again = ctx.needs_input_grad[2]
        ctx.save_for_backward(shard if ctx.gathers_again else None)
        ctx.call = transfer, again, weight
        again.of(ctx)
        whole = transfer.end()
        with transfer.flow.working("GEMM", weight, transfer):
            y = torch.matmul(whole, alias.t())
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        transfer, again, weight = ctx.call
        needs_x, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad = grad.contiguous()
        back = None
        if needs_x:
            with transfer.flow.working("dgrad", weight, transfer):
                full = torch.matmul(grad, weight.get())
            transfer.begin(transfer.flow.reduce_scatter, full)
            back = token(full, (full.shape[0] // transfer.ranks, *full.shape[1:]))
        # Behind what was just begun: the weight gradient of the layer after this one, and its own.
        if again.after is not None:
            with transfer.flow.working("wgrad", again.after, transfer):
                again.after.flush()
        if needs_weight:
            x = again.end()
            with transfer.flow.working("wgrad", weight, transfer):
                weight.add(grad, x)
        grad_bias = grad.flatten(0, -2).sum(dim=0) if needs_bias else None
        return back, None, None, grad_bias, None, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        alias: torch.Tensor,
        transfer: Transfer,
        again: _Again | None,
        weight: Weight,
    ) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.call = transfer, again, weight
        if again is not None:
            again.after = weight
        with transfer.flow.working("GEMM", weight, transfer):
            full = torch.matmul(x, alias.t())
        transfer.begin(transfer.flow.reduce_scatter, full, forward=True)
        return token(full, full.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        transfer, again, weight = ctx.call
        _check_token(grad, transfer)
        whole = transfer.end()
        if again is not None:
            again.begin()
        grad_x = None
        if ctx.needs_input_grad[0]:
            with transfer.flow.working("dgrad", weight, transfer):
                grad_x = torch.matmul(whole, weight.get())
        if ctx.needs_input_grad[1]:
            (x,) = ctx.saved_tensors
            weight.add_later(whole, x)
            if again is None:
                weight.flush()
        return grad_x, None, None, None, None


class _EndScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, transfer: Transfer) -> torch.Tensor:
        ctx.transfer = transfer
        return transfer.end()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        transfer = ctx.transfer
        transfer.begin(transfer.flow.all_gather, grad)
        return token(grad, (grad.shape[0] * transfer.ranks, *grad.shape[1:])), None
