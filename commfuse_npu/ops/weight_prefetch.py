"""Starts the gather of the next layer's weight while the current layer still computes.

In each layer, a rank waits for the first transfer of the gather if that takes longer than the GEMM
of its own block.  A :class:`WeightPrefetch`, shared by the layers of a model, learns the order in
which they gather.  When the last block of a layer has arrived, it posts the first transfer of the
next layer's gather; the others are posted when that layer runs.  Meanwhile both layers hold scratch
memory::

    compute  | ... | layer 1: W of r-2        | norm, activation | layer 2: own W | W of r-1 |
    links    | ... | layer 2: W of r-1 ------------------------- | W of r-2 ...   |          |

**Limits.**  A *pass* is a forward of the model, or a backward; recomputed forwards belong to the
backward.  A pass starts no gather for the next pass, so none is in flight during an optimizer step.
If the weight changed after its gather started, or another layer comes next, the program is drained
and the weight is gathered again.  A prediction that was wrong once is not made again.  All of this
depends only on what the model does, so ranks that run the same model post in the same order.

A change of a weight is detected by its version counter and its address.  Changes through ``.data``
do not change the version: make none between two layers of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch

from commfuse_npu.ops.call import version_of
from commfuse_npu.plan.program import Program
from commfuse_npu.runtime.executor import Running
from commfuse_npu.runtime.transport import Transport

__all__ = ["PrefetchedWeight", "WeightPrefetch", "in_backward", "stamp_of"]

Operation = tuple[Transport, Program, str, Hashable, torch.dtype | None]
"""The arguments of :meth:`Transport.begin`: transport, program, name, options, dtype of sums."""


def stamp_of(weight: torch.Tensor) -> tuple[int, int | None]:
    """The address and the version of a weight, which identify its state."""
    return weight.data_ptr(), version_of(weight)


def _begin(operation: Operation, shard: torch.Tensor) -> Running:
    """Begin a gather and post its first transfer."""
    transport, program, name, options, sum_dtype = operation
    running = transport.begin(program, name, shard, options, sum_dtype)
    running.run(ahead=True, shard=shard)
    return running


class PrefetchedWeight(NamedTuple):
    """The entry of one weight in a :class:`WeightPrefetch`."""

    prefetch: WeightPrefetch
    number: int


class _Use(NamedTuple):
    """A gather of a weight in a pass; ``phase`` is forward, recompute or backward."""

    phase: str
    weight: int


class _Pending(NamedTuple):
    """A gather that was started early.

    Attributes:
        what: the predicted use, the operation, and state and dtype of the weight.
    """

    what: tuple[_Use, Operation, tuple[int, int | None], torch.dtype]
    shard: torch.Tensor
    running: Running


class WeightPrefetch:
    """Learns the order in which a model gathers its weights, and gathers early; see the module.

    Only one thread at a time may use it, like the transport.
    """

    def __init__(self) -> None:
        self._weights: list[Callable[[], torch.Tensor]] = []
        self._gathers: dict[_Use, tuple[Operation, torch.dtype]] = {}
        # The use that followed each one; None if the pass ended there, or if it varied.
        self._after: dict[_Use, _Use | None] = {}
        self._seen: set[_Use] = set()
        self._task = -1
        self._last: _Use | None = None
        self._pending: _Pending | None = None

    def __deepcopy__(self, memo: object) -> WeightPrefetch:
        """An empty one, which the copies of the layers join."""
        return WeightPrefetch()

    def add(self, weight: Callable[[], torch.Tensor]) -> PrefetchedWeight:
        """Register a weight.

        Args:
            weight: returns this rank's current shard.
        """
        self._weights.append(weight)
        return PrefetchedWeight(self, len(self._weights) - 1)

    @property
    def under_way(self) -> bool:
        """Whether an early gather is in flight that no layer has taken."""
        return self._pending is not None

    def take(
        self,
        weight: int,
        shard: torch.Tensor,
        stamp: tuple[int, int | None],
        gather: Operation,
        *,
        backward: bool,
    ) -> Running:
        """The gather of ``shard``: the early one if it fits, else one begun here.

        Args:
            shard: the tensor to gather, in the dtype of the transfers.
            stamp: :func:`stamp_of` the weight when ``shard`` was made from it.
            backward: whether the layer runs its backward.
        """
        task = torch._C._current_graph_task_id()
        use = _Use("backward" if backward else "forward" if task == -1 else "recompute", weight)
        # Learn that this use follows the last one.
        if task != self._task or use in self._seen:
            self._pass_ends()
        elif self._last is not None and self._after.setdefault(self._last, use) != use:
            self._after[self._last] = None
        self._task, self._last = task, use
        self._seen.add(use)
        self._gathers[use] = gather, shard.dtype
        pending = self._pending
        if pending is not None and pending.what == (use, gather, stamp, shard.dtype):
            self._pending = None
            return pending.running
        self._drain()
        return _begin(gather, shard)

    def _pass_ends(self) -> None:
        if self._last is not None:
            self._after[self._last] = None
        self._last = None
        self._seen.clear()

    def _drain(self) -> None:
        """Complete the early gather without using it; all ranks do so."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.running.drain(out=pending.shard)

    def start_next(self) -> None:
        """Begin the predicted next gather, if any; called when a layer's last block has arrived."""
        use = None if self._last is None else self._after.get(self._last)
        if use is None or self._pending is not None:
            return
        weight = self._weights[use.weight]()
        gather, dtype = self._gathers[use]
        if not weight.is_inference():
            key = use, gather, stamp_of(weight), dtype
            shard = weight.detach().to(dtype).contiguous()
            self._pending = _Pending(key, shard, _begin(gather, shard))

    def end_pass(self) -> None:
        """End the pass: the next gather starts a new one.  Drains an early gather in flight.

        Raises:
            TransportError: draining failed.
        """
        self._pass_ends()
        self._drain()

    def interrupted(self, error: BaseException) -> None:
        """End the pass after an exception: an early gather in flight breaks the transport.

        It cannot be drained, as other ranks may have taken it and wait for its other transfers.
        """
        self._pass_ends()
        pending, self._pending = self._pending, None
        if pending is not None:
            transport, _, name, *_ = pending.what[1]
            transport.fail(
                f"{name}: the forward was left by {error!r} with the first block of the next "
                "layer's weight under way"
            )


def in_backward() -> bool:
    """Whether this thread runs a backward, in which a forward is a recomputation."""
    return torch._C._current_graph_task_id() != -1
