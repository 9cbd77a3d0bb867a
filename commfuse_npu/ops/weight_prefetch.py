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
from dataclasses import dataclass
from typing import NamedTuple

import torch

from commfuse_npu.plan.program import Program
from commfuse_npu.runtime.executor import Running
from commfuse_npu.runtime.transport import Transport

__all__ = ["PrefetchedWeight", "WeightPrefetch", "WeightProgram", "WeightStamp"]


class WeightStamp(NamedTuple):
    """What tells two states of a weight apart."""

    address: int
    version: int | None

    @classmethod
    def of(cls, weight: torch.Tensor) -> WeightStamp:
        # Inference tensors count no versions.
        return cls(weight.data_ptr(), None if weight.is_inference() else weight._version)


@dataclass(frozen=True)
class WeightProgram:
    """What is run with a weight: what the ranks have to agree on, and what a guess has to meet."""

    transport: Transport
    program: Program
    name: str
    options: Hashable
    sum_dtype: torch.dtype | None

    def begin(self, shard: torch.Tensor) -> Running:
        """With the first transfer of the weight under way."""
        running = self.transport.begin(self.program, self.name, shard, self.options, self.sum_dtype)
        running.run(ahead=True, shard=shard)
        return running


class _Use(NamedTuple):
    """One place in a pass where a weight is gathered."""

    phase: str
    weight: int


@dataclass(frozen=True)
class _Pending:
    """A program that was begun before anybody asked for it."""

    use: _Use
    call: WeightProgram
    stamp: WeightStamp
    shard: torch.Tensor
    running: Running

    def meets(self, use: _Use, call: WeightProgram, stamp: WeightStamp, dtype: torch.dtype) -> bool:
        return (self.use, self.call, self.stamp, self.shard.dtype) == (use, call, stamp, dtype)

    def drain(self) -> None:
        """Finish what nobody wants, as all ranks do."""
        self.running.drain(out=self.shard)


class WeightPrefetch:
    """Knows the order in which the weights of a model are gathered; see the module.

    One thread at a time, like the transport.
    """

    def __init__(self) -> None:
        self._weights: list[Callable[[], torch.Tensor]] = []
        self._calls: dict[_Use, tuple[WeightProgram, torch.dtype]] = {}
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
        stamp: WeightStamp,
        call: WeightProgram,
        *,
        backward: bool,
    ) -> Running:
        """What ``call`` began for ``shard``: what is under way if it is that, else begun here.

        Args:
            shard: what is to be gathered, in the dtype in which it travels.
            stamp: that of the weight from which ``shard`` was made, when it was made.
        """
        task = _backward_task()
        phase = "backward" if backward else "forward" if task == -1 else "recompute"
        use = _Use(phase, weight)
        self._follow(use, task)
        self._calls[use] = call, shard.dtype
        pending, self._pending = self._pending, None
        if pending is not None:
            if pending.meets(use, call, stamp, shard.dtype):
                return pending.running
            pending.drain()
        return call.begin(shard)

    def _follow(self, use: _Use, task: int) -> None:
        """Learn that ``use`` came next."""
        if task != self._task or use in self._seen:
            self._pass_ends()
        elif self._last is not None and self._after.setdefault(self._last, use) != use:
            self._after[self._last] = None
        self._task = task
        self._last = use
        self._seen.add(use)

    def _pass_ends(self) -> None:
        if self._last is not None:
            self._after[self._last] = None
        self._last = None
        self._seen.clear()

    def start_next(self) -> None:
        """Begin what is expected next, if there is something."""
        use = None if self._last is None else self._after.get(self._last)
        if use is None or self._pending is not None:
            return
        weight = self._weights[use.weight]()
        call, dtype = self._calls[use]
        stamp = WeightStamp.of(weight)
        if stamp.version is not None:
            shard = weight.detach().to(dtype).contiguous()
            self._pending = _Pending(use, call, stamp, shard, call.begin(shard))

    def end_pass(self) -> None:
        """Nothing that comes belongs to the pass so far; what is under way is drained.

        Raises:
            TransportError: it could not be finished.
        """
        self._pass_ends()
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.drain()

    def interrupted(self, error: BaseException) -> None:
        """The program left the pass by an exception: what is under way cannot be finished.

        The other ranks may have taken it over, and wait for its remaining transfers.
        """
        self._pass_ends()
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.call.transport.fail(
                f"{pending.call.name}: the forward was left by {error!r} with the first block of "
                "the next layer's weight under way"
            )


@dataclass(frozen=True)
class PrefetchedWeight:
    """The place of one weight in a :class:`WeightPrefetch`."""

    prefetch: WeightPrefetch
    index: int

    def take(
        self, shard: torch.Tensor, stamp: WeightStamp, call: WeightProgram, *, backward: bool
    ) -> Running:
        """See :meth:`WeightPrefetch.take`."""
        return self.prefetch.take(self.index, shard, stamp, call, backward=backward)

    def start_next(self) -> None:
        """To be called when the last block of this weight has arrived."""
        self.prefetch.start_next()


def in_backward() -> bool:
    """Whether this thread runs a backward: a forward is then a recomputed one."""
    return _backward_task() != -1


def _backward_task() -> int:
    """A number for the backward that this thread runs, -1 outside one."""
    return torch._C._current_graph_task_id()
