"""Finds results of GEMMs that no gradient reads.

A recomputation repeats a forward for the tensors that its backward reads.  Nothing reads what it
computes after the last of them: in a Transformer layer the GEMM of fc2 and its reduce-scatter::

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
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Readers", "saved_bytes"]

_SHAPE_ONLY = {
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
}
"""Operators of aten whose result depends on the shape of their argument alone."""
_TELL_WHAT_THEY_SAVE = {"aten", "c10d", "prim", "prims"}
"""Namespaces of operators whose nodes show their saved tensors to Python."""
_ATEN_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "matmul", "linear"}
"""GEMMs as aten and torch_npu call them."""


class Readers(TorchDispatchMode):
    """Follows the results of GEMMs, and tells which of them nothing but the outputs depends on.

    A reader is a node of the graph that saves a tensor which depends on such a result, a tensor
    that outlives the run elsewhere (an attribute, a statistic), or the host (``item()``).  A node
    that does not tell what it saves counts, too.  The mask of a dropout is no reader: it depends on
    the shape alone.  If the run enters hooks of saved tensors, which then save in its place
    (activations that are swapped out), everything counts as read.

    Saved tensors are found in the graph, not by hooks: with hooks a backward gets other objects
    than the parameters, without their attributes (``main_grad``).
    """

    def __init__(self) -> None:
        super().__init__()
        # The number of the first node of each block.
        self._first_nodes: list[int] = []
        # Blocks that something has read.
        self._blocks_read = 0
        self._in_block = False
        self._others_save = False
        # By address, with the number of blocks up to the last one that they depend on.  They are
        # held, so that no other tensor gets their address.
        self._storages: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self._tensors: list[weakref.ref[torch.Tensor]] = []

    def __enter__(self) -> Readers:
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

    @contextmanager
    def follow_products(self) -> Iterator[None]:
        """Follow the results of the GEMMs in the block, inside the mode."""
        self._first_nodes.append(torch._C._autograd._get_sequence_nr())
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
        read = [self._blocks_read]
        alive = tuple(filter(torch.is_tensor, (reference() for reference in self._tensors)))
        read += map(self._depends_on, _held_in_python(alive, tensors, outputs))
        for node in _nodes(outputs):
            saved = _saved_by(node)
            if saved is None:
                number = node._sequence_nr()
                read.append(sum(first <= number for first in self._first_nodes))
            else:
                read += map(self._depends_on, saved)
        return len(self._first_nodes) - max(read)

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        name = operator.overloadpacket.__name__
        starts = self._in_block and name in _ATEN_PRODUCTS
        if not (starts or self._storages) or name in _SHAPE_ONLY:
            return result
        given = [leaf for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)]
        blocks = max(map(self._depends_on, given), default=0)
        if starts:
            blocks = len(self._first_nodes)
        drops_out = "dropout" in name
        if not drops_out and operator.namespace not in _TELL_WHAT_THEY_SAVE:
            self._blocks_read = max(self._blocks_read, blocks)
        if blocks:
            results = tree_leaves(result)
            if drops_out:
                results = results[:1]  # then the mask
            for leaf in results:
                if torch.is_tensor(leaf):
                    self._follow(leaf, blocks)
                elif isinstance(leaf, (bool, int, float, complex)):
                    # The host reads it.
                    self._blocks_read = max(self._blocks_read, blocks)
        return result

    def _depends_on(self, tensor: torch.Tensor) -> int:
        """The number of blocks up to the last one that a tensor depends on."""
        _, blocks = self._storages.get(_address(tensor), (None, 0))
        return blocks

    def _follow(self, tensor: torch.Tensor, blocks: int) -> None:
        self._storages[_address(tensor)] = tensor.untyped_storage(), blocks
        self._tensors.append(weakref.ref(tensor))


def saved_bytes(outputs: Any) -> int:
    """Bytes that the graph of these outputs saves, without parameters."""
    sizes: dict[int, int] = {}
    for node in _nodes(outputs):
        for tensor in _saved_by(node) or ():
            base = tensor if tensor._base is None else tensor._base
            if not (base.is_leaf and base.requires_grad):
                sizes[_address(tensor)] = tensor.untyped_storage().nbytes()
    return sum(sizes.values())


def _nodes(outputs: Any) -> Iterator[Any]:
    """The nodes of a graph, each once, without those that accumulate gradients."""
    leaves = tree_leaves(outputs)
    waiting = [leaf.grad_fn for leaf in leaves if torch.is_tensor(leaf)]
    visited = set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in visited and not hasattr(node, "variable"):
            visited.add(node)
            yield node
            waiting.extend(following for following, _ in node.next_functions)


def _saved_by(node: Any) -> list[torch.Tensor] | None:
    """The tensors that a node saves; ``None`` if it does not tell, as functions in C++."""
    if isinstance(node, BackwardCFunction):
        return [tensor for tensor in node.saved_tensors if tensor is not None]
    if type(node).__name__ == "CppFunction":
        return None
    saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    return [leaf for leaf in tree_leaves(saved) if torch.is_tensor(leaf)]


def _held_in_python(tensors: tuple[torch.Tensor, ...], *ours: Any) -> list[torch.Tensor]:
    """Those that an object holds, other than frames that run, the tuple of them, and ``ours``.

    A transfer that has just ended may hold its tensors a moment longer, in C++.
    """
    excluded = set(map(id, (tensors, ours, *ours)))
    held = set[int]()
    # One pass over all objects of the process; there may be millions.
    for holder in gc.get_referrers(*tensors):
        if not isinstance(holder, FrameType) and id(holder) not in excluded:
            held.update(map(id, gc.get_referents(holder)))
    return [tensor for tensor in tensors if id(tensor) in held]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
