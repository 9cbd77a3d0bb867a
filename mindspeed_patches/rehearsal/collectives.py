"""Counts the collectives and messages of a training, by their kind and by the group that runs them.

Every collective of ``torch.distributed`` is wrapped before Megatron is imported.  Layers that are
fused send messages in place of the collectives of the tensor-parallel group.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist

__all__ = ["CollectiveCounter", "Kind"]

_COLLECTIVES = (
    *("all_reduce", "all_reduce_coalesced", "reduce", "broadcast"),
    *("all_gather", "all_gather_into_tensor", "_all_gather_base", "all_gather_coalesced"),
    *("reduce_scatter", "reduce_scatter_tensor", "_reduce_scatter_base"),
    *("all_gather_single", "reduce_scatter_single"),
    *("all_to_all", "all_to_all_single", "gather", "scatter", "barrier"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
)
_SENDS = ("send", "isend")


class Kind(NamedTuple):
    """What is counted: a function of ``torch.distributed``, and who calls it together.

    ``group`` is Megatron's name of the group, ``world``, or ``other``.
    """

    group: str
    operation: str


class CollectiveCounter:
    """Counts while :attr:`active` is set.

    Attributes:
        active: whether calls count at present.
        counts: calls.
    """

    def __init__(self) -> None:
        self.active = False
        self.counts: Counter[Kind] = Counter()
        self._inside = False
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
            self.counts[Kind(self._name(group), name)] += 1
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
