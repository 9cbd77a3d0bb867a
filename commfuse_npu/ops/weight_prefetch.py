"""The first block of the next layer's weight, sent for while this layer is still at work.

A gather has no work in front of it: whatever its first transfer takes longer than the own block's
GEMM is waited for, in every layer.  A :class:`WeightPrefetch`, shared by the layers of a model,
learns in which order they gather, and starts the gather of the next one when that of this one has
brought its last block, with one transfer posted (the rest follows when the layer runs).  Both
layers have their scratch memory meanwhile::

    compute  | ... | layer 1: W of r-2        | norm, activation | layer 2: own W | W of r-1 |
    links    | ... | layer 2: W of r-1 ------------------------- | W of r-2 ...   |          |

**Where it does not reach.**  A *pass* is a forward of the model, or a backward; recomputed forwards
belong to the backward.  Nothing is started at the end of a pass for the next one, so nothing is
under way during an optimizer step.  A weight that changed since its transfer was started, or
another layer than expected: the program that was begun is drained, and the weight is
gathered anew.  An expectation that was wrong once is given up.  All of it is decided by what the
model does, so that ranks that run the same model decide the same, and post in the same order.

A change of a weight is noticed by its version counter and its address.  Changes through ``.data``
count no versions: make none between two layers of a pass.
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
"""A transport and what it begins: a program with its name, options and the dtype of its sums."""


def stamp_of(weight: torch.Tensor) -> tuple[int, int | None]:
    """What tells two states of a weight apart: its address and its version."""
    return weight.data_ptr(), version_of(weight)


def _begin(operation: Operation, shard: torch.Tensor) -> Running:
    """With the first transfer of the weight under way."""
    transport, program, name, options, sum_dtype = operation
    running = transport.begin(program, name, shard, options, sum_dtype)
    running.run(ahead=True, shard=shard)
    return running


class PrefetchedWeight(NamedTuple):
    """The place of one weight in a :class:`WeightPrefetch`."""

    prefetch: WeightPrefetch
    number: int


class _Use(NamedTuple):
    """One place in a pass where a weight is gathered."""

    phase: str
    weight: int


class _Pending(NamedTuple):
    """A program that was begun before anybody asked for it.

    Attributes:
        what: its place, what was begun, and with which state of the weight in which dtype.
    """

    what: tuple[_Use, Operation, tuple[int, int | None], torch.dtype]
    shard: torch.Tensor
    running: Running


class WeightPrefetch:
    """Knows the order in which the weights of a model are gathered; see the module.

    One thread at a time, like the transport.
    """

    def __init__(self) -> None:
        self._weights: list[Callable[[], torch.Tensor]] = []
        self._gathers: dict[_Use, tuple[Operation, torch.dtype]] = {}
        # What followed a use, once seen; None where nothing did, or not always the same.
        self._after: dict[_Use, _Use | None] = {}
        self._seen: set[_Use] = set()
        self._task = -1
        self._last: _Use | None = None
        self._pending: _Pending | None = None

    def __deepcopy__(self, memo: object) -> WeightPrefetch:
        """Knows nothing yet: the copies of the layers join it."""
        return WeightPrefetch()

    def add(self, weight: Callable[[], torch.Tensor]) -> PrefetchedWeight:
        """Take in a weight.

        Args:
            weight: returns this rank's shard as it is at that time.
        """
        self._weights.append(weight)
        return PrefetchedWeight(self, len(self._weights) - 1)

    @property
    def under_way(self) -> bool:
        """Whether a program was begun that no layer has taken over yet."""
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
        """What was begun for ``shard``: what is under way if it is that, else begun here.

        Args:
            shard: what is to be gathered, in the dtype in which it travels.
            stamp: that of the weight from which ``shard`` was made, when it was made.
        """
        task = torch._C._current_graph_task_id()
        use = _Use("backward" if backward else "forward" if task == -1 else "recompute", weight)
        # Learn that it came next.
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
        """Finish what nobody wants, as all ranks do."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.running.drain(out=pending.shard)

    def start_next(self) -> None:
        """Begin what is expected next, if there is something: the last block has arrived."""
        use = None if self._last is None else self._after.get(self._last)
        if use is None or self._pending is not None:
            return
        weight = self._weights[use.weight]()
        gather, dtype = self._gathers[use]
        if not weight.is_inference():
            what = use, gather, stamp_of(weight), dtype
            shard = weight.detach().to(dtype).contiguous()
            self._pending = _Pending(what, shard, _begin(gather, shard))

    def end_pass(self) -> None:
        """Nothing that comes belongs to the pass so far; what is under way is drained.

        Raises:
            TransportError: it could not be finished.
        """
        self._pass_ends()
        self._drain()

    def interrupted(self, error: BaseException) -> None:
        """The program left the pass by an exception: what is under way cannot be finished.

        The other ranks may have taken it over, and wait for its remaining transfers.
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
    """Whether this thread runs a backward: a forward is then a recomputed one."""
    return torch._C._current_graph_task_id() != -1
