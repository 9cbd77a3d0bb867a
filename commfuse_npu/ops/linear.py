"""Tensor-parallel linear layers that overlap their collective with their GEMMs.

Legend: ``S`` sequence, ``s`` its shard (S/N), ``B`` batch, ``I`` input and ``O`` output features of
this rank's weight, ``N`` ranks, ``x_SBI`` a tensor of that shape.  Without a batch dimension
everything holds for ``[S, I]``.  Weights are ``[O, I]``, as in ``torch.nn.Linear``.

====================== ============================= ============================================
op                     forward                       backward
====================== ============================= ============================================
all_gather_linear      x arrives -> GEMM             dgrad -> sum; x gathered again -> wgrad
linear_reduce_scatter  GEMM -> sum                   gradient arrives -> dgrad, wgrad
linear_all_reduce      GEMM -> sum, all-gather       no transfers
====================== ============================= ============================================

Lanes are the process groups of a :class:`~commfuse_npu.runtime.transport.Transport`; a program is
the list of transfers, waits and GEMMs that ``begin`` compiles and ``run`` executes.

On a :class:`~commfuse_npu.runtime.collective_transport.CollectiveTransport` an op is the unfused
layer over the collectives of torch.distributed.  So it is for a group of one, for an empty input,
and for backwards of layers with at least ``collectives_from`` outputs.

**Exactness.**  An op on lanes and on ``CollectiveTransport(group, same_pieces=True)`` gives the
same bits, if rows of x and y are a multiple of 64 bytes long (MKL rounds small products differently
when blocks begin elsewhere).  Compared with one GEMM over all rows, results differ only where the
GEMM library rounds a run of rows differently.  Weight gradients are one GEMM over all rows.
There is no double backward.

**Early gather.**  In a backward the row-parallel layer comes first.  During its weight gradient the
links are free, and the column-parallel layer before it needs its input again::

    compute  | dgrad of proj | wgrad of proj | attention | dgrad of qkv | wgrad of qkv
    links    | its gradients | input of qkv              |              | sums of dgrad

``linear_reduce_scatter`` is paired with the last ``all_gather_linear`` before it on the same
transport whose weight needs a gradient: ``qkv`` and ``proj``, ``fc1`` and ``fc2``.  The input is
gathered early if autograd is going to run the backward of both layers in one pass.  So what is
posted depends on the calls alone, never on timing or on when an object is freed, and ranks that run
the same model post in the same order.  If an exception ends a backward between the two, the next
forward of such a layer drains the gather, on all ranks alike.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from math import prod
from weakref import WeakKeyDictionary

import torch

from commfuse_npu.ops.call import (
    AnyGroup,
    AnyRun,
    AnyTransport,
    Call,
    Tensors,
    check_and_cast,
    check_sequence,
    transport_of,
)
from commfuse_npu.ops.linear_options import LinearOptions
from commfuse_npu.ops.linear_trials import choose_schedules
from commfuse_npu.plan.rules import ColumnBackward, GatherGemm, GemmScatter
from commfuse_npu.runtime.collectives import begin_all_gather
from commfuse_npu.runtime.eager_only import eager_only
from commfuse_npu.runtime.executor import Running
from commfuse_npu.runtime.transport import Transport

__all__ = ["all_gather_linear", "linear_all_reduce", "linear_reduce_scatter"]


# ------------------------------------------------------------------- all-gather


@eager_only
def all_gather_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: AnyGroup = None,
    options: LinearOptions = LinearOptions(),
) -> torch.Tensor:
    """``linear(all_gather(x), weight, bias)``: the column-parallel layer.

    Equals::

        x_SBI = all_gather(x_sBI)
        y_SBO = x_SBI @ weight^T + bias
        # backward
        dx_sBI = reduce_scatter(dy_SBO @ weight)
        dweight = dy_SBO^T @ all_gather(x_sBI)

    Timeline of the backward with 2 chunks, groups of dx's columns; x may have been gathered early::

        compute  | dgrad, columns 0 | dgrad, columns 1 | wgrad     | sums of dx |
        links    | x arrives        | columns 0        | columns 1 |            |

    Args:
        x: ``[s, B, I]`` or ``[s, I]``, the same shape on every rank.  Need not be contiguous.
        weight: ``[O, I]``, this rank's rows of the whole weight, the dtype of ``x``.
        bias: ``[O]``.
        group: the tensor-parallel process group, by default the whole job, with lanes
            (``Transport.create(group)``); or what that returned, or a
            :class:`~commfuse_npu.runtime.collective_transport.CollectiveTransport`, to run unfused.
        options: how it is split and summed, and where gradients go; equal on every rank.

    Returns:
        ``[S, B, O]`` or ``[S, O]``.
    """
    name = "all_gather_linear"
    transport = transport_of(name, group)
    x, weight, bias = check_and_cast(name, x, weight, bias, transport, options)
    rows = prod(x.shape[:-1])
    call = _AllGatherLinear(name, transport, options, x, rows=rows)
    if options.tuning is not None and isinstance(call.transport, Transport):
        choose_schedules(call, x.flatten(0, -2), weight, bias, rows * transport.size)
    elif options.collectives_from is not None and weight.shape[0] >= options.collectives_from:
        call.backward_schedule = None
    return call(x, weight, bias)


class _AllGatherLinear(Call):
    x: torch.Tensor | None = None
    """The saved input ``[s * B, I]``, if the row-parallel layer's backward has unpacked it."""

    early: Running | None = None
    """The backward in execution, if the row-parallel layer's backward began it."""

    over = False
    """Whether the backward has started, or was drained because it never ran."""

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Tensors]:
        x = x.contiguous()
        outputs, inputs = weight.shape
        shard = x.flatten(0, -2)
        y = x.new_empty((x.shape[0] * self.transport.size, *x.shape[1:-1], outputs))
        running = self.begin(GatherGemm(shard.shape[0], inputs, outputs), like=x)
        running.run(shard=shard, weight=weight.t(), out=y.flatten(0, -2))
        if bias is not None:
            y.add_(bias)
        on_lanes = self.backward_schedule is not None and isinstance(self.transport, Transport)
        if self.needs[1] and on_lanes:
            pairs = _pairs.setdefault(self.transport, _Pairs())
            pairs.drain()
            pairs.last = weakref.ref(self)
        return y, (x if self.needs[1] else None,)

    def _begin_backward(self, like: torch.Tensor, rows: int) -> AnyRun:
        outputs, inputs = self.weight.shape
        needs_x, needs_weight, _ = self.needs
        rule = ColumnBackward(rows, inputs, outputs, needs_x, needs_weight)
        sums = self.options.reduce_dtype
        return self.begin(rule, like=like, backward=True, sum_dtype=sums)

    def prepare_early(self) -> bool:
        """Whether to gather the input early: the backward follows in the one that is running.

        What may fail without a transfer does so here, before the caller begins its program.
        """
        if self.over or self.early is not None:
            return False
        node = self.context()
        # A node that was freed is in no graph, whenever that happened.
        if node is None or not torch._C._will_engine_execute_node(node):
            return False
        self.check_weight()
        self.weight_gradient()
        # Kept, because saved() may be called only once.
        self.x = self.unpacked()
        return True

    def unpacked(self) -> torch.Tensor | None:
        """The saved input ``[s * B, I]``, if the weight needs a gradient."""
        (x,) = self.saved()
        return None if x is None else x.flatten(0, -2)

    def gather_early(self) -> None:
        """Begin the backward and post the gather of the input."""
        assert self.x is not None
        running = self._begin_backward(self.x, self.x.shape[0])
        assert isinstance(running, Running)  # as that of the row-parallel layer, its caller
        self.early = running
        _pairs[self.transport].early.append(self)
        running.run(ahead=True, x=self.x)

    def backward(self, grad: torch.Tensor) -> Tensors:
        self.over = True
        rows = grad.shape[0] // self.transport.size
        shape = rows, *grad.shape[1:-1], self.weight.shape[1]
        grad = grad.flatten(0, -2)
        grad_x = grad.new_empty(shape) if self.needs[0] else None
        out = None if grad_x is None else grad_x.flatten(0, -2)
        wgrad = self.weight_gradient()
        x = self.unpacked() if self.x is None else self.x
        if self.early is None:
            running = self._begin_backward(grad, grad.shape[0] // self.transport.size)
        else:
            running = self.early
            _pairs[self.transport].early.remove(self)
        self.early = self.x = None
        running.run(wgrad=wgrad.add, grad=grad, weight=self.weight, x=x, grad_x=out)
        grad_bias = grad.sum(dim=0) if self.needs[2] else None
        return grad_x, wgrad.result(), grad_bias


@dataclass
class _Pairs:
    """The column-parallel layers of a transport whose backward gathers the input.

    Attributes:
        last: the last one that is not paired yet; a weak reference, which keeps no weight alive
            that autocast copied.
        early: those whose early gather is in flight.
    """

    last: weakref.ref[_AllGatherLinear] | None = None
    early: list[_AllGatherLinear] = field(default_factory=list)

    def drain(self) -> None:
        """Finish early gathers that an interrupted backward left over; called by every forward."""
        # -1: not in a backward.  A forward recomputed in a backward must not drain them.
        while self.early and torch._C._current_graph_task_id() == -1:
            layer = self.early.pop()
            assert layer.early is not None
            assert layer.x is not None
            layer.over = True
            layer.early.drain(grad_x=torch.empty_like(layer.x))
            layer.early = layer.x = None


_pairs: WeakKeyDictionary[AnyTransport, _Pairs] = WeakKeyDictionary()


# --------------------------------------------------------------- reduce-scatter


@eager_only
def linear_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: AnyGroup = None,
    options: LinearOptions = LinearOptions(),
) -> torch.Tensor:
    """``reduce_scatter(linear(x, weight)) + bias``: the row-parallel layer.

    Equals::

        y_sBO = reduce_scatter(x_SBI @ weight^T) + bias
        # backward
        dy_SBO = all_gather(dy_sBO)
        dx_SBI = dy_SBO @ weight
        dweight = dy_SBO^T @ x_SBI

    Timeline of the backward, rank r of 3::

        compute  | dgrad own r | dgrad r-1 | dgrad r-2 | wgrad                         |
        links    | dy of r-1   | dy of r-2 |           | x of the layer before (above) |

    Args:
        x: ``[S, B, I]`` or ``[S, I]``; S a multiple of the group size.
        weight: ``[O, I]``, this rank's columns of the whole weight, the dtype of ``x``.
        bias: ``[O]``, full and equal on every rank; added after the sum.  Its gradient is that of
            this rank's rows: sum it over the group, as Megatron does with sequence parallelism.
        group, options: see :func:`all_gather_linear`.

    Returns:
        ``[s, B, O]`` or ``[s, O]``.
    """
    name = "linear_reduce_scatter"
    transport = transport_of(name, group)
    x, weight, bias = check_and_cast(name, x, weight, bias, transport, options)
    check_sequence(name, x.shape[0], transport.size, ", or use linear_all_reduce")
    rows = prod(x.shape[:-1])
    call = _LinearReduceScatter(name, transport, options, x, rows=rows)
    if options.tuning is not None and isinstance(call.transport, Transport):
        choose_schedules(call, x.flatten(0, -2), weight, bias, rows // transport.size)
    y = call(x, weight)
    return y if bias is None else y + bias


class _LinearReduceScatter(Call):
    column: weakref.ref[_AllGatherLinear] | None = None
    """The paired layer, whose input is gathered early: after all blocks of this layer have arrived,
    before its weight gradient."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        x = x.contiguous()
        outputs, inputs = weight.shape
        y = x.new_empty((x.shape[0] // self.transport.size, *x.shape[1:-1], outputs))
        out = y.flatten(0, -2)
        rule = GemmScatter(out.shape[0], inputs, outputs)
        running = self.begin(rule, like=x, sum_dtype=self.options.reduce_dtype)
        running.run(a=x.flatten(0, -2), weight=weight.t(), out=out)
        pairs = _pairs.get(self.transport)
        if pairs is not None and any(self.needs):
            pairs.drain()
            self.column = pairs.last
            pairs.last = None
        return y, (x if self.needs[1] else None,)

    def backward(self, grad: torch.Tensor) -> Tensors:
        (x,) = self.saved()
        inputs = self.weight.shape[1]
        shard = grad.flatten(0, -2)
        grad_x = out = None
        if self.needs[0]:
            shape = grad.shape[0] * self.transport.size, *grad.shape[1:-1], inputs
            grad_x = grad.new_empty(shape)
            out = grad_x.flatten(0, -2)
        wgrad = self.weight_gradient()
        on_lanes = self.backward_schedule is not None
        column = self.column() if self.column is not None and on_lanes else None
        if column is not None and not (wgrad.needed and column.prepare_early()):
            column = None
        columns = (inputs if needed else 0 for needed in (self.needs[0], wgrad.needed))
        rule = GatherGemm(shard.shape[0], shard.shape[1], *columns)
        running = self.begin(rule, like=grad, backward=True)
        other = None if x is None else x.flatten(0, -2)

        def add_wgrad(whole: torch.Tensor, other: torch.Tensor) -> None:
            if column is not None:
                column.gather_early()
            wgrad.add(whole, other)

        running.run(wgrad=add_wgrad, shard=shard, weight=self.weight, out=out, other=other)
        if wgrad.needed and not inputs:  # the program has no product without columns
            wgrad.add(shard, shard.new_empty(shard.shape[0], 0))
        return grad_x, wgrad.result()


# ------------------------------------------------------------------- all-reduce


@eager_only
def linear_all_reduce(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: AnyGroup = None,
    options: LinearOptions = LinearOptions(),
) -> torch.Tensor:
    """``all_reduce(linear(x, weight)) + bias``: row-parallel without sequence parallelism.

    Equals :func:`linear_reduce_scatter` and a gather of its sums::

        y_sO = reduce_scatter(x_SI @ weight^T)     # S rows with those of the batch, padded to N s
        y_SO = all_gather(y_sO)[:S] + bias
        # backward, no transfers: dy is the same on every rank
        dx_SI = dy_SO @ weight
        dweight = dy_SO^T @ x_SI

    The gather is a collective that is not hidden.  In a launch such layers stay Megatron's.

    **Exactness.**  Block r of the rows is the sum of the partials of ranks ``r-1, ..., r+1, r`` in
    this order (``two_level`` has another), rounded at every addition.  So all ranks have the same
    bits; on two ranks they are those of ``torch.distributed.all_reduce``.  From three ranks on
    gloo's all-reduce has this order if N divides the rows and a block has an even number of
    elements, and another one otherwise (run with 3 and 4 ranks); HCCL's is unknown.

    Args:
        x: ``[S, B, I]`` or ``[S, I]``, any S.
        weight: ``[O, I]``, this rank's columns of the whole weight, the dtype of ``x``.
        bias: ``[O]``, full and equal on every rank; added after the sum.
        group, options: see :func:`all_gather_linear`; ``tuning`` is ignored.

    Returns:
        ``[S, B, O]`` or ``[S, O]``, the same on every rank.
    """
    name = "linear_all_reduce"
    transport = transport_of(name, group)
    x, weight, bias = check_and_cast(name, x, weight, bias, transport, options)
    flat = x.flatten(0, -2)
    rows = flat.shape[0]
    if missing := -rows % transport.size:
        # Other numbers of rows may be padded to the same length.
        transport.agree(name, {"rows": rows}, path="padded")
        flat = torch.nn.functional.pad(flat, (0, 0, 0, missing))
    call = _LinearAllReduce(name, transport, options, x, rows=flat.shape[0])
    y = call(flat, weight)[:rows].view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


class _LinearAllReduce(Call):
    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        x = x.contiguous()
        transport = self.transport
        outputs, inputs = weight.shape
        rows = x.shape[0] // transport.size
        y = x.new_empty((rows, outputs))
        rule = GemmScatter(rows, inputs, outputs)
        running = self.begin(rule, like=x, sum_dtype=self.options.reduce_dtype)
        running.run(a=x, weight=weight.t(), out=y)
        if transport.size > 1:
            with transport.collectives(self.name):
                y, gather = begin_all_gather(y, transport.group)
                transport.wait_for(gather)
        return y, (x if self.needs[1] else None,)

    def backward(self, grad: torch.Tensor) -> Tensors:
        (x,) = self.saved()
        wgrad = self.weight_gradient()
        grad_x = grad.matmul(self.weight) if self.needs[0] else None
        if wgrad.needed:
            wgrad.add(grad, x)
        return grad_x, wgrad.result()
