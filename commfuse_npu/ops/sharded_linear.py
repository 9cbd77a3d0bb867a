"""A linear layer with its weight sharded over the data-parallel group, gathered during the GEMMs.

Legend: ``M`` rows of ``x`` on this rank (its own part of the batch), ``I`` input and ``O`` output
features, ``o`` a rank's share of the output features (O/N), ``N`` ranks, ``W_OI`` the whole weight.

The layer is not tensor-parallel: every rank computes all features of its own rows.  Only memory is
split: a rank keeps ``o`` rows of the weight, of its gradient and of the optimizer state.  Blocks of
the weight are gathered while others are used (ZeRO-3, fully sharded data parallel).

========== ============================================================================
forward    weight arrives -> columns of y
backward   wgrad blocks -> sum; weight arrives -> dgrad, both at once
========== ============================================================================

No rank holds the whole weight or its whole gradient.  There is memory for two blocks at a time of
the arriving weight, and of the gradient being sent; or for one piece more than there are lanes.

**Exactness.**  The op on lanes and on ``CollectiveTransport(group, same_pieces=True)`` gives the
same bits, if rows are a multiple of 64 bytes long.  An unfused layer differs where the GEMM library
rounds a run of columns differently from all columns together, and in the sum over ``O`` in the
dgrad, which is computed block by block here (in fp32, rounded once).

To train a model with ``torch.nn.Linear`` fully sharded, without Megatron, change its loop::

    model = shard_linears(model, transport=transport)      # before the optimizer is made
    optimizer = torch.optim.AdamW(model.parameters())
    ...
    loss.backward()                                        # mean over the rank's own rows
    average_gradients(model, transport)                    # replicated parameters
    clip_gradient_norm(model, 1.0, transport)              # if gradients are clipped
    optimizer.step()

The gradient of a shard is complete after the backward; the optimizer has the state of the shard.
``torch.nn.utils.clip_grad_norm_`` would see only one rank's shards and scale the ranks differently.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection

import torch

from commfuse_npu.kernels import gemm_into, kernels_for
from commfuse_npu.ops.call import (
    AnyTransport,
    Call,
    Tensors,
    check_and_cast,
    check_transport,
    sum_ending,
)
from commfuse_npu.ops.options import LinearOptions
from commfuse_npu.plan.rules import sharded_backward, sharded_forward
from commfuse_npu.runtime.collectives import all_gather_rows
from commfuse_npu.runtime.executor import Work
from commfuse_npu.runtime.transport import Transport

__all__ = ["ShardedLinear", "shard_linears", "sharded_linear", "shards_of"]

_logger = logging.getLogger(__name__)


# ------------------------------------------------------------------------- op


def sharded_linear(
    x: torch.Tensor,
    weight_shard: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transport: AnyTransport,
    options: LinearOptions = LinearOptions(),
) -> torch.Tensor:
    """``linear(x, all_gather(weight_shard), bias)``: the fully sharded layer.

    Equals::

        W_OI = all_gather(W_oI)
        y_MO = x_MI @ W_OI^T + bias
        # backward
        dx_MI = dy_MO @ W_OI
        dW_oI = reduce_scatter(dy_MO^T @ x_MI) / N        # for a loss that is a mean over x_MI

    Timeline of the forward, rank r of 3; a column of it is a block of columns of ``y``::

        compute  | y of own W | y of W r-1 | y of W r-2 |
        links    | W of r-1   | W of r-2   |            |

    Timeline of the backward.  The weight gradients do not need the gathered weight, so they come
    first: each block is sent when it is computed, while the weight arrives.  The blocks of the
    dgrad, own weight first, overlap with the last transfers of both::

        compute  | wgrad for r+1 | wgrad for r+2      | wgrad own | dgrad own | dgrad W r-1 | ...
        links    | W of r-1      | W of r-2, -> r+1   | -> r+2    |           |             | sum

    Args:
        x: ``[..., I]``, any number of rows, which may differ per rank.  Need not be contiguous.
        weight_shard: ``[o, I]``, rows ``r * o`` to ``(r + 1) * o`` of the whole weight, the dtype
            of ``x``; the same shape on every rank.
        bias: ``[O]``, full and equal on every rank.  Its gradient is that of the rank's own rows;
            average it with those of the other replicated parameters, see
            :func:`~commfuse_npu.ops.sharded_gradients.average_gradients`.
        transport: lanes of the data-parallel group.
        options: ``schedule`` of the weight and of its gradient, and ``reduce_dtype`` of the sum of
            the ranks' gradients, which are sent in their own dtype; the others do not apply.

    Returns:
        ``[..., O]``.

    If the weight needs no gradient, none is computed or sent.  If ``x`` needs none, the backward
    does not gather the weight.  Both have to be the same on every rank.
    """
    name, size = "sharded_linear", transport.size
    x, shard, bias = check_and_cast(name, x, weight_shard, bias, transport, options, shards=size)
    flat = x.flatten(0, -2)
    call = _ShardedLinear(name, transport, options, shard, rows=shard.shape[0])
    y = call(flat, shard, bias)
    return y.view(*x.shape[:-1], y.shape[1])


class _ShardedLinear(Call):
    def forward(
        self, x: torch.Tensor, shard: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, Tensors]:
        x, shard = x.contiguous(), shard.detach().contiguous()
        y = x.new_empty((x.shape[0], shard.shape[0] * self.transport.size))

        # BLAS writes a run of columns in the same time and with the same bits as a contiguous
        # matrix (measured on CPU in fp32 and bf16; not tried on an NPU).  A separate result, or
        # ``y^T``, would cost a copy of y.
        def use(block: torch.Tensor, run: slice) -> None:
            gemm_into(y[:, run], x, block.t())
            if bias is not None:
                y[:, run].add_(bias[run])

        self.begin(sharded_forward, *shard.shape, like=shard).run({"use": use}, shard=shard)
        return y, (x if self.needs[1] else None,)

    def backward(self, grad: torch.Tensor) -> Tensors:
        (x,), shard = self.saved(), self.weight.detach().contiguous()
        needs_x, needs_weight, needs_bias = self.needs
        out = torch.empty_like(shard) if needs_weight else None
        # Summed over the blocks in fp32, rounded once.
        columns = shard.shape[1] if needs_x else 0
        total = grad.new_zeros((grad.shape[0], columns), dtype=torch.float32)
        accumulate = kernels_for(grad.device).accumulate_weight_gradient
        works: dict[str, Work] = {
            "make": lambda out, run: gemm_into(out, grad[:, run].t(), x),
            "finish": sum_ending(self.transport.size),
            # total += grad[:, run] @ block, with the kernel of the weight gradient.
            "use": lambda block, run: accumulate(total, grad[:, run].t(), block),
        }
        if needs_x or needs_weight:
            arguments, sums = (*shard.shape, needs_x, needs_weight), self.options.reduce_dtype
            running = self.begin(
                sharded_backward, *arguments, like=shard, backward=True, sum_dtype=sums
            )
            running.run(works, shard=shard, out=out)
        grad_x = total.to(grad.dtype) if needs_x else None
        return grad_x, out, grad.sum(dim=0) if needs_bias else None


# --------------------------------------------------------------------- modules


class ShardedLinear(torch.nn.Module):
    """``torch.nn.Linear`` whose weight is sharded over a data-parallel group, by output features.

    The ``state_dict`` has the shard of this rank, ``weight`` ``[O/N, I]``, and the full ``bias``
    ``[O]``, so every rank has its own checkpoint, for the same N.  For a checkpoint for any N, save
    :meth:`full_weight` and load it with :meth:`load_full_weight`.

    Args:
        linear: equal on every rank; this rank's rows of its weight are copied, its bias is shared.

    Attributes:
        weight: ``[O/N, I]``, rows ``rank * O/N`` to ``(rank + 1) * O/N`` of the whole weight.
        bias: ``[O]`` or None; the same on every rank.
        in_features, out_features: I and O of the whole layer.

    Raises:
        TypeError: ``transport`` is not a transport.
        ValueError: the output features are not divisible by the size of the group.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        linear: torch.nn.Linear,
        *,
        transport: Transport,
        options: LinearOptions = LinearOptions(),
    ) -> None:
        check_transport("ShardedLinear", transport)
        if refusal := _not_divisible(linear, transport.size):
            raise ValueError(f"ShardedLinear: {refusal}")
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.transport, self.options = transport, options
        # A copy: a slice would keep the whole weight alive.
        shard = linear.weight.detach().chunk(transport.size)[transport.rank].clone()
        self.weight = torch.nn.Parameter(shard, requires_grad=linear.weight.requires_grad)
        self.register_parameter("bias", linear.bias)
        self.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., I] -> [..., O]``; see :func:`sharded_linear`."""
        return sharded_linear(
            x, self.weight, self.bias, transport=self.transport, options=self.options
        )

    @torch.no_grad()
    def full_weight(self) -> torch.Tensor:
        """Gather the weight ``[O, I]``, without gradient.  Every rank of the group calls it."""
        return all_gather_rows(self.weight.detach(), self.transport.group)

    @torch.no_grad()
    def load_full_weight(self, weight: torch.Tensor) -> None:
        """Copy this rank's rows of a full weight ``[O, I]``.

        Raises:
            ValueError: ``weight`` has another shape.
        """
        if tuple(weight.shape) != (self.out_features, self.in_features):
            raise ValueError(
                f"ShardedLinear: a weight of shape {tuple(weight.shape)} for a layer of "
                f"({self.out_features}, {self.in_features}); give the whole one, not a shard"
            )
        rows = self.weight.shape[0]
        self.weight.copy_(weight[self.transport.rank * rows :][:rows])

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, shard {self.transport.rank} of {self.transport.size}"
        )


def shard_linears(
    module: torch.nn.Module,
    *,
    transport: Transport,
    options: LinearOptions = LinearOptions(),
    skip: Collection[str] = (),
) -> torch.nn.Module:
    """Replace every ``torch.nn.Linear`` in ``module`` by a :class:`ShardedLinear`, in place.

    Every rank calls it with an equal module: the same seed, or the same checkpoint.  Call it before
    the optimizer is created.

    Some layers are not sharded, which is logged: layers named in ``skip``, layers whose output
    features are not divisible by N, layers whose weight another module uses too (tied embeddings),
    and subclasses of ``torch.nn.Linear``, whose owner may use the weight without calling the layer.

    Args:
        skip: names, in the module, of linear layers or of modules that contain some.

    Returns:
        ``module``, or the new layer if it is a ``torch.nn.Linear`` itself.

    Raises:
        TypeError: ``transport`` is not a transport.
        ValueError: ``skip`` names a module that does not exist.
        MismatchError: the ranks do not have the same layers with the same parameters.
    """
    check_transport("shard_linears", transport)
    names: dict[torch.nn.Module, list[str]] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        names.setdefault(part, []).append(name)
    unknown = sorted(set(skip).difference(*names.values()))
    if unknown:
        raise ValueError(
            f"shard_linears: skip names {', '.join(unknown)}, which the module does not have; take "
            "names of module.named_modules()"
        )
    linears = [part for part in names if isinstance(part, torch.nn.Linear)]
    uses = Counter(id(p) for part in names for p in part._parameters.values())
    reasons = {
        m: _stays_whole(m, names[m], uses[id(m.weight)] > 1, transport.size, skip) for m in linears
    }
    transport.agree(
        "shard_linears",
        options=options,
        layers=tuple((names[m][0], tuple(m.weight.shape), reasons[m]) for m in linears),
        parameters=_fingerprint(module),
    )
    unsharded = [f"{names[m][0]} ({reason})" for m, reason in reasons.items() if reason is not None]
    if unsharded:
        _logger.warning("shard_linears keeps whole: %s", "; ".join(unsharded))
    replacements: dict[torch.nn.Module, torch.nn.Module] = {
        linear: ShardedLinear(linear, transport=transport, options=options)
        for linear in linears
        if reasons[linear] is None
    }
    if module in replacements:
        return replacements[module]
    for parent in list(module.modules()):
        # A layer used in several places is replaced by one new layer in all of them.
        for name, child in parent._modules.items():
            if child in replacements:
                setattr(parent, name, replacements[child])
    return module


def shards_of(module: torch.nn.Module) -> set[int]:
    """The ids of the sharded parameters."""
    return {id(layer.weight) for layer in module.modules() if isinstance(layer, ShardedLinear)}


def _not_divisible(linear: torch.nn.Linear, size: int) -> str | None:
    features = linear.out_features
    if features % size == 0:
        return None
    return (
        f"{features} output features are not divisible by the group size {size}; pad them to "
        f"{-(-features // size) * size}, or keep the layer whole"
    )


def _stays_whole(
    linear: torch.nn.Linear, names: list[str], shared: bool, size: int, skip: Collection[str]
) -> str | None:
    """Why a layer is not sharded; ``None`` if it is."""
    if any(f"{name}.".startswith(f"{other}.") for name in names for other in skip):
        return "named in skip"
    if type(linear) is not torch.nn.Linear:
        return f"it is a {type(linear).__name__}"
    if shared:
        return "its weight is used by another module too"
    return _not_divisible(linear, size)


def _fingerprint(module: torch.nn.Module) -> tuple[int, ...]:
    """A checksum per replicated parameter: the sum of its elements' bits as integers."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    shards = shards_of(module)
    return tuple(
        int(parameter.detach().view(integers[parameter.itemsize]).sum(dtype=torch.int64))
        for parameter in module.parameters()
        if not parameter.is_meta and parameter.itemsize in integers and id(parameter) not in shards
    )
