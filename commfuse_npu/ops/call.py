"""The base class of the ops, and what they share: checks of arguments, sums, weight gradients."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import NoneType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from commfuse_npu.kernels import kernels_for
from commfuse_npu.ops.linear_options import LinearOptions, check_type
from commfuse_npu.plan.rules import Rule
from commfuse_npu.runtime.collective_transport import CollectiveRun, CollectiveTransport
from commfuse_npu.runtime.executor import Running, Work
from commfuse_npu.runtime.transport import Transport

__all__ = [
    "AnyGroup",
    "AnyRun",
    "AnyTransport",
    "Call",
    "Tensors",
    "WeightGradient",
    "check_and_cast",
    "check_call",
    "check_sequence",
    "check_tensors",
    "sum_ending",
    "transport_of",
]

_logger = logging.getLogger(__name__)
_said: set[str] = set()

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

AnyTransport = Transport | CollectiveTransport
"""What an op runs on: lanes, or collectives of torch.distributed."""

AnyGroup = dist.ProcessGroup | AnyTransport | None
"""What an op takes as ``group``; ``None`` is the whole job."""

AnyRun = Running | CollectiveRun
"""An operation in execution on either."""

Tensors = Sequence[torch.Tensor | None]


class Call:
    """One call of an op: on its transport, or on collectives if there is nothing to split.

    The ranks agree on the choice, and the reason for collectives is logged once.  An op is a
    subclass with :meth:`forward` and :meth:`backward` on plain tensors; this class handles
    autograd, autocast and saved-tensor hooks.

    Args:
        name: of the op.
        options: has a ``schedule`` and a ``reduce_dtype``; the ranks agree on them.
        like: a tensor whose shape and dtype have to be equal on every rank.
        rows: number of rows to split; with none, the call runs on collectives.

    Attributes:
        schedule, backward_schedule: of forward and backward; ``None`` for torch's collectives and
            whole GEMMs.
        needs: for each tensor argument, whether it needs a gradient.
        weight: the weight, if there is one.  It does not go through saved-tensor hooks (activation
            swapping), which return another tensor without Megatron's ``main_grad``.
    """

    weight_at: ClassVar[int] = 1
    """Index of the weight among the tensor arguments."""

    needs: Sequence[bool] = ()
    weight: Any
    weight_version: int | None
    context: Callable[[], Any]
    """The autograd context; a weak reference, so that it is freed with the graph."""

    def __init__(
        self,
        name: str,
        transport: AnyTransport,
        options: Any,
        like: torch.Tensor,
        *,
        rows: int,
    ) -> None:
        if transport.size == 1 or rows == 0:
            transport = _by_collectives(name, like, transport)
        self.name = name
        self.transport = transport
        self.options = options
        self.schedule = self.backward_schedule = options.schedule

    def saved(self) -> Any:
        """The tensors that the forward saved.

        Call it once per backward: a second call is an error with activation checkpointing.
        """
        return self.context().saved_tensors

    def forward(self, *tensors: Any) -> tuple[torch.Tensor, Tensors]:
        """Return the result, and the tensors to save for the backward."""
        raise NotImplementedError

    def backward(self, grad: torch.Tensor) -> Tensors:
        """Return the gradients of the tensors; ``grad`` is contiguous."""
        raise NotImplementedError

    def __call__(self, *tensors: torch.Tensor | None) -> torch.Tensor:
        """Run the op, differentiably; under ``torch.no_grad`` no tensor needs a gradient."""
        if not torch.is_grad_enabled():
            self.needs = (False,) * len(tensors)
        with self.without_autocast():
            return _Differentiable.apply(self, *tensors)

    def without_autocast(self) -> AbstractContextManager[object]:
        """Turns autocast off for the forward or the backward, which torch runs with the caller's.

        The tensors are already cast, and fp32 sums have to stay fp32.
        """
        device = self.transport.device_type
        enabled = torch.is_autocast_enabled(device)
        return torch.autocast(device, enabled=False) if enabled else nullcontext()

    def check_weight(self) -> None:
        """The check that autograd makes for saved tensors.

        Raises:
            RuntimeError: the weight was modified after the forward.
        """
        version = _version_of(self.weight)
        if version != self.weight_version:
            raise RuntimeError(
                f"{self.name}: the weight was modified in place between forward and backward "
                f"(version {version}, expected {self.weight_version}); the gradient would be that "
                "of another layer. Run the backward before the optimizer step"
            )

    def begin(
        self,
        rule: Rule,
        *,
        like: torch.Tensor,
        backward: bool = False,
        sum_dtype: torch.dtype | None = None,
    ) -> AnyRun:
        """Begin the operation of a rule, on lanes or collectives.

        Args:
            like: a tensor with the dtype and device of the transferred tensors.
            backward: use the schedule of the backward.
            sum_dtype: dtype in which partials are added; by default their own.
        """
        schedule = self.schedule
        name = self.name
        if backward:
            schedule = self.backward_schedule
            name = f"{self.name} backward"
        transport = self.transport if schedule else self.transport.by_collectives
        schedule = schedule or self.options.schedule
        return transport.begin(rule, name, like, schedule, self.options, sum_dtype)

    def weight_gradient(self) -> WeightGradient:
        """The gradient of the weight, if it needs one."""
        needed = self.needs[self.weight_at]
        return WeightGradient(self.weight, main_grad=self.options.main_grad, needed=needed)


class _Differentiable(torch.autograd.Function):
    """The autograd function of a call."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Any) -> torch.Tensor:
        call.needs = call.needs or ctx.needs_input_grad[1:]
        y, saved = call.forward(*tensors)
        ctx.save_for_backward(*saved)
        ctx.call = call
        call.context = weakref.ref(ctx)
        call.weight = tensors[call.weight_at]
        call.weight_version = _version_of(call.weight)
        # Autograd refuses to modify a view that was made here, as ``y += residual`` does.
        assert not y._is_view()
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        call.check_weight()
        with call.without_autocast():
            return None, *call.backward(grad.contiguous())


def _version_of(weight: torch.Tensor | None) -> int | None:
    """The version counter of a tensor; ``None`` for inference tensors, which have none."""
    return None if weight is None or weight.is_inference() else weight._version


def _by_collectives(name: str, like: torch.Tensor, transport: AnyTransport) -> CollectiveTransport:
    """Agree with the other ranks to run on collectives, and log the reason once."""
    empty = "an empty input has nothing to transfer"
    reason = "a group of one has nothing to transfer" if transport.size == 1 else empty
    transport.agree(name, {"shape": tuple(like.shape)}, path="plain", dtype=like.dtype)
    line = f"{name} runs unfused: {reason}"
    if line not in _said:
        _said.add(line)
        _logger.warning(line)
    return transport.by_collectives


# ------------------------------------------------------------------ arguments


def check_and_cast(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transport: AnyTransport,
    options: LinearOptions,
    *,
    of_all_heads: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Check the arguments before any rank waits for another, and cast them under autocast.

    A program with tensors of two dtypes would fail with transfers in flight, which breaks the
    transport.  So every op with a weight calls this function first.

    Args:
        x: ``[S, ..., I]``.
        weight: ``[O, I]``, or with ``of_all_heads`` ``[O, I * N]``: ``I`` columns per rank.

    Returns:
        ``x``, ``weight`` and ``bias`` in one dtype; under autocast in its dtype, as the arguments
        of ``torch.nn.functional.linear``.

    Raises:
        TypeError: an argument has another type, or dtypes do not fit.
        ValueError: devices or shapes do not fit each other.
    """
    check_call(name, options)
    check_tensors(name, x=x, weight=weight)
    check_type(name, "bias", bias, torch.Tensor | NoneType, "a tensor, or None for no bias")
    if weight.dim() != 2 or x.dim() < 2:
        raise ValueError(
            f"{name}: x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}; they have to "
            "be [S, ..., I] and [O, I]"
        )
    outputs, inputs = weight.shape
    head_groups = transport.size if of_all_heads else 1
    features = x.shape[-1] * head_groups
    if inputs != features:
        ranks = f" on each of {head_groups} ranks" if head_groups > 1 else ""
        raise ValueError(
            f"{name}: x has {x.shape[-1]} features{ranks}, the weight takes {inputs}; its shape "
            f"{(outputs, inputs)} has to be [O, {features}]"
        )
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(
            f"{name}: the bias has shape {tuple(bias.shape)}; it has to be ({outputs},), one "
            "number per row of the weight"
        )
    given = x.dtype
    place = x.device
    if given not in _DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise TypeError(f"{name}: x is {given}; choose one of {names}")
    device = transport.device_type
    autocast = torch.is_autocast_enabled(device)
    for other, role in ((weight, "weight"), (bias, "bias")):
        if other is None:
            continue
        if other.device != place:
            raise ValueError(
                f"{name}: x is on {place}, the {role} on {other.device}; move one of them"
            )
        if other.dtype != given and not autocast:
            raise TypeError(f"{name}: x is {given}, the {role} {other.dtype}; cast one of them")
    if not autocast:
        return x, weight, bias
    if options.main_grad:
        raise ValueError(
            f"{name}: main_grad under autocast would accumulate for a copy of the weight; keep "
            "weights in the compute dtype, or turn one of the two off"
        )
    dtype = torch.get_autocast_dtype(device)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def transport_of(name: str, group: AnyGroup) -> AnyTransport:
    """The lanes of a group.

    Raises:
        TypeError: ``group`` is something else.
        ValueError: the group has no lanes.
    """
    if isinstance(group, AnyTransport):
        return group
    wanted = "a process group, or what Transport.create(group) returned"
    check_type(name, "group", group, dist.ProcessGroup | NoneType, wanted)
    found = Transport.of(group)
    if found is None:
        raise ValueError(
            f"{name}: the process group has no lanes; call Transport.create(group) once, on every "
            "process of the job, and keep what it returns"
        )
    return found


def check_call(name: str, options: object) -> None:
    """Raise a TypeError if ``options`` has another type."""
    of_options = "LinearOptions(...), as LinearOptions(chunks=2)"
    check_type(name, "options", options, LinearOptions, of_options)


def check_tensors(name: str, **tensors: object) -> None:
    """Raise a TypeError if an argument is not a tensor."""
    for role, tensor in tensors.items():
        check_type(name, role, tensor, torch.Tensor, "a tensor")


def check_sequence(name: str, rows: int, size: int, instead: str = "") -> None:
    """Raise a ValueError if a sequence is not divisible into one block per rank."""
    if rows % size:
        raise ValueError(
            f"{name}: sequence length {rows} is not divisible by the group size {size}; pad it to "
            f"{-(-rows // size) * size}{instead}"
        )


# ------------------------------------------------------------------------ sums


def sum_ending(divisor: int) -> Work:
    """The last step of a sum or average over the ranks: ``out = (total + own) / divisor``.

    Sum and quotient have the dtype of ``total``; if ``out`` has another dtype, the quotient is
    rounded to it once.  ``total`` is overwritten.  Nothing can fail after ``out`` is written.

    Returns:
        The work ``finish(out, total, own)``.
    """

    def finish(out: torch.Tensor, total: torch.Tensor, own: torch.Tensor) -> None:
        terms = [(total, 1), (own, 1)]
        if divisor == 1:
            kernels_for(out.device).sum_parts(out, terms)
        else:
            kernels_for(out.device).sum_parts(total, terms)
            torch.div(total, divisor, out=out)

    return finish


# ------------------------------------------------------------ weight gradients


class WeightGradient:
    """The gradient of one weight in one backward: ``grad_output^T @ input``, one GEMM.

    Args:
        weight: ``[O, I]``.  With ``main_grad`` it uses the attributes of Megatron's weights:
            ``main_grad`` (fp32, fp16 or bf16) receives the sum.  If ``grad_added_to_main_grad``
            exists it is set, and :meth:`result` returns a tensor of the right shape instead of the
            gradient: zeros if ``zero_out_wgrad`` is set, else with undefined contents.
        main_grad: accumulate into ``weight.main_grad`` (Megatron's gradient_accumulation_fusion).
        needed: whether a gradient is needed; else :meth:`result` returns ``None``.

    Raises:
        RuntimeError: ``main_grad`` is missing or has another dtype.
    """

    def __init__(self, weight: torch.Tensor, *, main_grad: bool, needed: bool = True) -> None:
        self._weight = weight
        self.needed = needed
        self._main_grad: torch.Tensor | None = None
        if needed and main_grad:
            target = getattr(weight, "main_grad", None)
            dtype = None if target is None else target.dtype
            if dtype not in _DTYPES:
                raise RuntimeError(
                    f"weight.main_grad is {dtype}; gradient accumulation fusion needs the float32, "
                    "float16 or bfloat16 one that Megatron's DistributedDataParallel sets; wrap "
                    "the model or turn the fusion off"
                )
            self._main_grad = target
        self._grad: torch.Tensor | None = None

    def add(self, grad_output: torch.Tensor, total_input: torch.Tensor) -> None:
        """Compute it, once, from ``[rows, O]`` and ``[rows, I]``."""
        if self._main_grad is None:
            self._grad = grad_output.t().matmul(total_input)
        else:
            accumulate = kernels_for(self._main_grad.device).accumulate_weight_gradient
            accumulate(self._main_grad, grad_output, total_input)

    def result(self) -> torch.Tensor | None:
        """The tensor, or ``None``, that the backward returns for the weight."""
        weight = self._weight
        target = self._main_grad
        if target is None:
            return self._grad
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        # Megatron's hooks need a gradient of this shape, and its contents only if zero_out_wgrad
        # asks for zeros.
        weight.grad_added_to_main_grad = True
        make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
        return make(target.shape, dtype=weight.dtype, device=weight.device)
