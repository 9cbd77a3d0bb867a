"""Fully sharded linear layers as modules, and the conversion of a model with ``torch.nn.Linear``.

To train a model fully sharded, without Megatron, change its loop::

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

import copy
import logging
import sys
from collections.abc import Collection
from functools import partial
from typing import Any

import torch

from commfuse_npu.ops.call import check_transport
from commfuse_npu.ops.options import ShardedOptions
from commfuse_npu.ops.sharded_linear import sharded_linear
from commfuse_npu.ops.weight_prefetch import PrefetchedWeight, WeightPrefetch, in_backward
from commfuse_npu.runtime.collectives import all_gather_rows
from commfuse_npu.runtime.transport import Transport

__all__ = ["ShardedLinear", "shard_linears", "shards_of"]

_logger = logging.getLogger(__name__)


class ShardedLinear(torch.nn.Module):
    """``torch.nn.Linear`` whose weight is sharded over a data-parallel group, by output features.

    Made by :meth:`from_linear` or :func:`shard_linears`.

    The ``state_dict`` has the shard of this rank, ``weight`` ``[O/N, I]``, and the full ``bias``
    ``[O]``, so every rank has its own checkpoint, for the same N.  For a checkpoint for any N, save
    :meth:`full_weight` and load it with :meth:`load_full_weight`.

    Attributes:
        weight: ``[O/N, I]``, rows ``rank * O/N`` to ``(rank + 1) * O/N`` of the whole weight.
        bias: ``[O]`` or None; the same on every rank.
        in_features, out_features: I and O of the whole layer.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        weight: torch.nn.Parameter,
        bias: torch.nn.Parameter | None,
        *,
        transport: Transport,
        options: ShardedOptions = ShardedOptions(),
        prefetch: WeightPrefetch | None = None,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)
        self.in_features = weight.shape[1]
        self.out_features = weight.shape[0] * transport.size
        self.transport = transport
        self.options = options
        self.prefetch = prefetch
        self._place = self._join()

    def _join(self) -> PrefetchedWeight | None:
        if self.prefetch is None or self.transport.size == 1:
            return None
        return self.prefetch.add(lambda: self.weight)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedLinear:
        """Copy the weight; the copy uses the same transport.

        The layers of a copied model share a new prefetch.  Every rank has to make the same copy,
        between two passes.
        """
        layer = type(self).__new__(type(self))
        memo[id(self)] = layer
        layer.__dict__ = copy.deepcopy({**self.__dict__, "_place": None}, memo)
        layer._place = layer._join()
        return layer

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear,
        *,
        transport: Transport,
        options: ShardedOptions = ShardedOptions(),
        prefetch: WeightPrefetch | None = None,
    ) -> ShardedLinear:
        """Create this rank's shard of a layer that is equal on every rank.

        Args:
            linear: this rank's rows of its weight are copied; its bias is shared.
            prefetch: shared by the layers of a model.

        Raises:
            TypeError: ``transport`` is not a transport.
            ValueError: its output features are not divisible by the size of the group.
        """
        check_transport("ShardedLinear", transport)
        refusal = _not_divisible(linear, transport.size)
        if refusal is not None:
            raise ValueError(f"ShardedLinear: {refusal}")
        rows = linear.out_features // transport.size
        # A copy: a slice would keep the whole weight alive.
        shard = linear.weight.detach()[transport.rank * rows :][:rows].clone()
        weight = torch.nn.Parameter(shard, requires_grad=linear.weight.requires_grad)
        layer = cls(weight, linear.bias, transport=transport, options=options, prefetch=prefetch)
        return layer.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., I] -> [..., O]``; see :func:`~commfuse_npu.ops.sharded_linear.sharded_linear`."""
        return sharded_linear(
            x,
            self.weight,
            self.bias,
            transport=self.transport,
            options=self.options,
            prefetch=self._place,
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
    options: ShardedOptions = ShardedOptions(),
    skip: Collection[str] = (),
    prefetch: bool = True,
) -> torch.nn.Module:
    """Replace every ``torch.nn.Linear`` in ``module`` by a :class:`ShardedLinear`, in place.

    Every rank calls it with an equal module: the same seed, or the same checkpoint.  Call it before
    the optimizer is created, and once on the whole model: each call has its own prefetch.

    Some layers are not sharded, which is logged: layers named in ``skip``, layers whose output
    features are not divisible by N, layers whose weight another module uses too (tied embeddings),
    and subclasses of ``torch.nn.Linear``, whose owner may use the weight without calling the layer.

    Args:
        skip: names, in the module, of linear layers or of modules that contain some.
        prefetch: start the gather of the next layer's weight early, see
            :mod:`~commfuse_npu.ops.weight_prefetch`.

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
    reasons = {m: _stays_whole(module, names[m], m, transport.size, skip) for m in linears}
    transport.agree(
        "shard_linears",
        options=options,
        prefetch=prefetch,
        layers=tuple((names[m][0], tuple(m.weight.shape), reasons[m]) for m in linears),
        parameters=_fingerprint(module),
    )
    unsharded = [f"{names[m][0]} ({reason})" for m, reason in reasons.items() if reason is not None]
    if unsharded:
        _logger.warning("shard_linears keeps whole: %s", "; ".join(unsharded))
    order = WeightPrefetch() if prefetch else None
    replacements: dict[torch.nn.Module, torch.nn.Module] = {
        linear: ShardedLinear.from_linear(
            linear, transport=transport, options=options, prefetch=order
        )
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
    if order is not None and replacements:
        # No gather is in flight after the forward, however it ends.  Not a closure, so that a copy
        # of the module gets a hook with its own prefetch.
        module.register_forward_hook(partial(_forward_ended, order), always_call=True)
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
    module: torch.nn.Module,
    names: list[str],
    linear: torch.nn.Linear,
    size: int,
    skip: Collection[str],
) -> str | None:
    """Why a layer is not sharded; ``None`` if it is."""
    if any(f"{name}.".startswith(f"{other}.") for name in names for other in skip):
        return "named in skip"
    if type(linear) is not torch.nn.Linear:
        return f"it is a {type(linear).__name__}"
    users = [m for m in module.modules() if any(p is linear.weight for p in m._parameters.values())]
    if len(users) > 1:
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


def _forward_ended(
    prefetch: WeightPrefetch, _module: torch.nn.Module, _args: Any, output: Any
) -> None:
    """The forward hook of a converted model; ``output`` is ``None`` after an exception."""
    if in_backward():
        # A recomputed forward; torch ends it with an exception when it has all tensors it needs.
        return
    error = sys.exc_info()[1]
    if error is not None and output is None:
        prefetch.interrupted(error)
    else:
        prefetch.end_pass()
