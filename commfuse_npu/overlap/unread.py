"""Finds results of GEMMs that no gradient reads.

A recomputation repeats a forward for the tensors that its backward reads.  What is computed after
the last of them is read by nothing: in a Transformer layer the GEMM of fc2 and its reduce-scatter::

    recomputed  | norm, qkv, attention, proj, norm, fc1, activation | fc2 | reduce-scatter | add
    read by     | the gradients                                     |         nothing

:mod:`commfuse_npu.runtime.undefined_results` leaves them out.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Readers"]

_SHAPE_ONLY = {
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
}
"""Operators of aten whose result depends on the shape of their argument alone."""
_ATEN_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "matmul", "linear"}
"""GEMMs as aten and torch_npu call them."""


class Readers(TorchDispatchMode):
    """Follows the results of GEMMs, and tells which of them nothing but the outputs depends on.

    A reader is a tensor that autograd saves and that depends on such a result, a tensor that
    outlives the run elsewhere (an attribute, a statistic), or the host (``item()``).  What autograd
    functions and hooks keep is saved or alive, so it counts, too.  The mask of a dropout is no
    reader: it depends on the shape alone.  If the run enters hooks of saved tensors, which then
    save in its place (activations that are swapped out), everything counts as read.
    """

    def __init__(self) -> None:
        super().__init__()
        # Sizes of storages that autograd saved, other than those of parameters.
        self._saved: dict[int, int] = {}
        self._blocks = 0
        self._in_block = False
        self._others_save = False
        # Held, so that no other tensor gets their address.
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._tensors: list[weakref.ref[torch.Tensor]] = []

    def __enter__(self) -> Readers:
        self._hooks = saved_tensors_hooks(self._save, lambda tensor: tensor)
        self._hooks.__enter__()
        enter = saved_tensors_hooks.__enter__

        def enter_others(hooks: saved_tensors_hooks) -> None:
            self._others_save = True
            enter(hooks)

        self._unpatch = partial(setattr, saved_tensors_hooks, "__enter__", enter)
        saved_tensors_hooks.__enter__ = enter_others  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._unpatch()
        self._hooks.__exit__(*error)

    @contextmanager
    def follow_products(self) -> Iterator[None]:
        """Follow the results of the GEMMs in the block, inside the mode."""
        self._blocks += 1
        self._in_block = True
        try:
            yield
        finally:
            self._in_block = False

    def unread(self, outputs: Any) -> int:
        """How many blocks, counted from the last one, have results that only the outputs read."""
        if self._others_save:
            return 0
        tensors = [leaf for leaf in tree_leaves(outputs) if torch.is_tensor(leaf)]
        # A view keeps its base alive.
        own = {id(tensor) for tensor in tensors} | {id(tensor._base) for tensor in tensors}
        for reference in tuple(self._tensors):
            tensor = reference()
            if tensor is not None and id(tensor) not in own and _held_in_python(tensor):
                self._read()
        return self._blocks

    def _read(self) -> None:
        """A result was read, perhaps of the first block: follow none of them any longer."""
        self._blocks = 0
        self._storages.clear()
        self._tensors.clear()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        name = operator.overloadpacket.__name__
        starts = self._in_block and name in _ATEN_PRODUCTS
        if not (starts or self._storages) or name in _SHAPE_ONLY:
            return result
        given = tree_leaves((args, kwargs))
        if starts or any(torch.is_tensor(leaf) and self._follows(leaf) for leaf in given):
            results = tree_leaves(result)
            if "dropout" in name:
                results = results[:1]  # then the mask
            for leaf in results:
                if torch.is_tensor(leaf):
                    self._follow(leaf)
                elif isinstance(leaf, (bool, int, float, complex)):
                    self._read()
        return result

    @property
    def saved_bytes(self) -> int:
        """What autograd saved in the run, without parameters."""
        return sum(self._saved.values())

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        base = tensor if tensor._base is None else tensor._base
        if not isinstance(base, torch.nn.Parameter):
            self._saved[_address(tensor)] = tensor.untyped_storage().nbytes()
        if self._follows(tensor):
            self._read()
        return tensor

    def _follows(self, tensor: torch.Tensor) -> bool:
        return _address(tensor) in self._storages

    def _follow(self, tensor: torch.Tensor) -> None:
        self._storages[_address(tensor)] = tensor.untyped_storage()
        self._tensors.append(weakref.ref(tensor))


def _held_in_python(tensor: torch.Tensor) -> bool:
    """Whether an object holds it, other than a frame that runs.

    A transfer that has just ended may hold its tensors a moment longer, in C++.
    """
    return any(not isinstance(holder, FrameType) for holder in gc.get_referrers(tensor))


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
