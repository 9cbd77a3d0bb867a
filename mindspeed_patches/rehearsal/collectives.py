"""Counts collectives by the place in the model that issued them.

Every collective of ``torch.distributed`` is wrapped before Megatron is imported.  A call walks the
Python stack outwards to the innermost module of the model: that is the layer.  A backward has no
module on its stack; there the context of the autograd function says it, noted in the forward, or
the weight that the function works with.

What matters is whether collectives are left in the fused layers; a total over all calls would hide
that among those of the embedding, the loss and the gradient norm.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

__all__ = ["CollectiveCounter", "Site"]

_COLLECTIVES = (
    *("all_reduce", "all_reduce_coalesced", "reduce", "broadcast"),
    *("all_gather", "all_gather_into_tensor", "_all_gather_base", "all_gather_coalesced"),
    *("reduce_scatter", "reduce_scatter_tensor", "_reduce_scatter_base"),
    *("all_gather_single", "reduce_scatter_single"),
    *("all_to_all", "all_to_all_single", "gather", "scatter", "barrier"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
)
_SENDS = ("send", "isend")
# These issue collectives for somebody else, as do MindSpeed's wrappers of torch.distributed.
_PASSED_OVER = ("torch", "mindspeed_patches.rehearsal", "megatron.core.tensor_parallel.mappings")
_TAG = "_rehearsal_site"


class Site(NamedTuple):
    """Where a collective comes from, what it is, and which group runs it.

    Attributes:
        layer: the last part of the layer's name (``linear_qkv``), with what holds it if that is
            experts (``shared_experts.linear_fc1``); empty outside of linear layers.
        where: the function, with its class.
        operation: the function of ``torch.distributed``.
        group: Megatron's name of the group, ``world``, or ``other``.
    """

    layer: str
    where: str
    operation: str
    group: str


class CollectiveCounter:
    """Counts while :attr:`active` is set.

    Attributes:
        active: whether calls count at present.
        counts: calls per site.
    """

    def __init__(self) -> None:
        self.active = False
        self.counts: Counter[Site] = Counter()
        self._inside = False
        self._modules: dict[int, str] = {}
        self._parameters: dict[int, tuple[str, str]] = {}
        self._groups: dict[int, str] = {}

    def install(self) -> None:
        """Wrap the functions; what imported them before keeps the originals."""
        for name in (*_COLLECTIVES, *_SENDS):
            function = getattr(dist, name, None)
            if function is None:  # newer or older than this version of torch
                continue
            counted = self._counted(name, function)
            setattr(dist, name, counted)
            setattr(dist.distributed_c10d, name, counted)

    def know_model(self, chunks: Iterable[torch.nn.Module]) -> None:
        """Learn the names of linear layers and of their weights."""
        for chunk in chunks:
            for name, module in chunk.named_modules():
                if type(module).__name__.endswith("ParallelLinear"):
                    *outer, layer = name.split(".")
                    for held_by in {"shared_experts", "experts"} & set(outer):
                        layer = f"{held_by}.{layer}"
                    self._modules[id(module)] = layer
                    for parameter in module.parameters(recurse=False):
                        self._parameters[id(parameter)] = layer, type(module).__name__

    def know_group(self, name: str, group: Any) -> None:
        """Learn the name of a group; the first one counts."""
        self._groups.setdefault(id(group), name)

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(function).parameters)
        position = names.index("group") if "group" in names else None

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            # Collectives of objects are made of collectives of tensors: count the outer one.
            if not self.active or self._inside:
                return function(*args, **kwargs)
            group = kwargs.get("group")
            if group is None and position is not None and position < len(args):
                group = args[position]
            layer, where = self._origin(sys._getframe(1))
            self.counts[Site(layer, where, name, self._name(group))] += 1
            self._inside = True
            try:
                return function(*args, **kwargs)
            finally:
                self._inside = False

        return call

    def _name(self, group: Any) -> str:
        if group is None or group is dist.group.WORLD:
            return "world"
        return self._groups.get(id(group), "other")

    def _origin(self, frame: FrameType | None) -> tuple[str, str]:
        """The layer and the function for which the collective is issued."""
        where = ""
        contexts: list[Any] = []
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            name = _qualified_name(frame)
            first = _first_argument(frame)
            if module == "commfuse_npu.runtime.transport":
                return "", f"{module}: {name}"
            if name.endswith("backward") and (known := self._of_backward(frame, first)):
                return known
            if isinstance(first, torch.nn.Module) and id(first) in self._modules:
                return _noted(contexts, self._modules[id(first)], f"{type(first).__name__}.forward")
            if isinstance(first, torch.autograd.function.FunctionCtx):
                contexts.append(first)
                if name.endswith("backward"):
                    where = where or f"{module}: {name}"
            if not where and not module.startswith(_PASSED_OVER) and "wrapper" not in name:
                where = f"{module}: {name}"
            frame = frame.f_back
        return _noted(contexts, "", where)

    def _of_backward(self, frame: FrameType, context: Any) -> tuple[str, str] | None:
        tag: tuple[str, str] | None = getattr(context, _TAG, None)
        if tag is not None:
            layer, where = tag
            return layer, where.replace("forward", "backward")
        weight = self._parameters.get(id(frame.f_locals.get("weight")))
        return None if weight is None else (weight[0], f"{weight[1]}.backward")


def _noted(contexts: Iterable[Any], layer: str, where: str) -> tuple[str, str]:
    """Leave the origin of a forward with its autograd functions, for their backward."""
    for context in contexts:
        setattr(context, _TAG, (layer, where))
    return layer, where


def _first_argument(frame: FrameType) -> Any:
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def _qualified_name(frame: FrameType) -> str:
    code = frame.f_code
    # Python 3.11 has it; before, the class is not known.
    return str(getattr(code, "co_qualname", code.co_name)).replace(".<locals>", "")
