"""Runs the forward of one micro-batch beside the backward of another one."""

from __future__ import annotations

import os
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from commfuse_npu.overlap.recompute import recompute_torch_ahead
from commfuse_npu.overlap.states import PassState, RandomState
from commfuse_npu.overlap.transfers import take_turns_at_transfers
from commfuse_npu.overlap.turns import Turns
from commfuse_npu.overlap.weight_gradients import WeightGradients
from commfuse_npu.runtime.collectives import device_backend
from commfuse_npu.runtime.eager_only import eager_only
from commfuse_npu.runtime.order_log import OrderLog

__all__ = ["ForwardBackwardOverlap"]

F = TypeVar("F")
B = TypeVar("B")

_ABSENT = torch.iinfo(torch.int64).min


class ForwardBackwardOverlap:
    """Runs the forward of one micro-batch beside the backward of another one.

    Both use one compute stream and take turns: while one would wait for a collective of the named
    groups, the other computes.  No operation is split or added, so results are bitwise equal to
    running them one after the other.  In a training loop::

        overlap = ForwardBackwardOverlap([tensor_parallel_group])
        loss = forward(batches[0])
        for batch in batches[1:]:
            loss, _ = overlap.run(lambda: forward(batch), loss.backward)
        loss.backward()
        overlap.check()

    Any passes can take turns, as the forwards of two half batches in inference::

        with torch.no_grad():
            first, second = overlap.run_together(
                first=lambda: model(requests[:half]), second=lambda: model(requests[half:])
            )

    In a backward, reentrant activation checkpoints are recomputed ahead
    (:mod:`commfuse_npu.overlap.recompute`), also in a run of a backward alone::

        overlap.run_together(backward=loss.backward)

    With ``COMMFUSE_OVERLAP=0`` in the environment passes run one after the other, the last one
    first: the backward, then the forward.

    Args:
        groups: process groups whose collectives are hidden: those of tensor, expert and context
            parallelism, not of data or pipeline parallelism.  All ranks of a group must run the
            same passes.
        states: state outside the autograd graph that a pass writes, also if only recomputations
            read it (lengths of documents in a global, say); each pass has its own.  By default the
            random states.
        waits_in: beginnings of the names of modules in which the host's waits for streams and
            events hand over, too; all ranks must pass there.
        replicas: a group of all ranks that run the same passes, in which :meth:`check` compares
            them, too.
        order_log: records the collectives of all passes for ``commfuse-npu verify --log``.

    Attributes:
        enabled: whether passes take turns.
        runs: number of runs of several passes that took turns.
        hand_overs: how often passes handed over, by name.
        waits: how often they would have, had there been another pass.
        weight_gradients: weight gradients that run where all passes wait.
        recompute_ahead: checkpoints that are recomputed ahead.
        at_point: called at each point of a pass, with its name.
    """

    def __init__(
        self,
        groups: Iterable[dist.ProcessGroup],
        states: Sequence[PassState] | None = None,
        waits_in: Sequence[str] = (),
        replicas: dist.ProcessGroup | None = None,
        order_log: OrderLog | None = None,
    ) -> None:
        named = list(groups)
        if not named:
            raise ValueError("no group given: pass the process groups whose collectives to hide")
        self.device, _ = device_backend(named[0])
        self._named = named
        self._replicas = replicas
        self._log = order_log
        # The groups, with their numbers in the order log.
        self._groups: dict[dist.ProcessGroup | None, int] = {}
        for group in named:
            ranks = dist.get_process_group_ranks(group)
            self._groups[group] = order_log.transport(ranks) if order_log else 0
        # A collective without a group uses the default group.
        if dist.group.WORLD in named:
            self._groups[None] = self._groups[dist.group.WORLD]
        self.states = [RandomState(self.device)] if states is None else list(states)
        self._waits_in = tuple(waits_in)
        self.weight_gradients = WeightGradients(self.device)
        self.recompute_ahead = recompute_torch_ahead(self.device)
        self.enabled = enabled_by_environment()
        self.at_point: Callable[[str], object] | None = None
        self.runs = 0
        self.hand_overs: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self._sequence = 0
        # Checksums of the points of passes, by name.
        self._points: defaultdict[str, set[int]] = defaultdict(set)

    def run(self, forward: Callable[[], F], backward: Callable[[], B]) -> tuple[F, B]:
        """Run both side by side; return both results.

        The forward runs in the calling thread, the backward in a second one, with the caller's
        device, current stream, autocast, gradient mode and torch modes.  Raises as
        :meth:`run_together`.
        """
        result_f, result_b = self.run_together(forward=forward, backward=backward)
        return result_f, result_b

    @eager_only
    def run_together(self, **passes: Callable[[], Any]) -> tuple[Any, ...]:
        """Run passes that take turns; return their results.

        They equal the same passes one after the other, the last one first, if none reads what
        another one writes.  The first one runs in the calling thread.

        Args:
            passes: at least one function, by the names that errors and logs use.

        Raises:
            BaseException: the exception of the pass that failed first; the others were ended at
                their next transfers.
            RuntimeError: a pass other than the first drew random numbers,
                ``DistributedDataParallel`` outside of ``no_sync()``, a fully sharded module, or a
                run inside a run.
        """
        if not passes:
            raise ValueError("no pass given: pass at least one function by name")
        if not self.enabled:
            results = {name: passes[name]() for name in reversed(passes)}
            return tuple(results[name] for name in passes)
        turns = Turns(self.states, self.device, self.weight_gradients, self.at_point)
        try:
            with take_turns_at_transfers(turns, self._groups, self._waits_in, self._log):
                results_in_order = turns.run(passes)
        except BaseException:
            self.weight_gradients.discard()
            raise
        self.weight_gradients.compute_all()
        self._count(turns)
        return tuple(results_in_order)

    def _count(self, turns: Turns) -> None:
        for one in turns.passes:
            self.hand_overs[one.name] += one.hand_overs
            self.waits[one.name] += one.waits
            self._points[one.name].add(one.points)
            points = f"{one.name} {one.hand_overs} {one.points}"
            self._sequence = zlib.crc32(points.encode(), self._sequence)
        if len(turns.passes) == 1:
            return
        self.runs += 1
        if self.runs == 1 and not self.hand_overs.total():
            warnings.warn(
                "no pass handed over: no collective of the named groups ran in it; pass the groups "
                "of the model, and do not compile blocks that contain collectives",
                stacklevel=4,
            )

    def check(self) -> None:
        """Compare what passes did so far with all ranks of each group, and with replicas.

        If they differ, collectives of different ranks were matched wrongly.  Call it before the
        optimizer changes weights.  Weight gradients may differ.

        Raises:
            RuntimeError: the ranks differ.
        """
        counts = dict(self.hand_overs)
        for group in self._named:  # in one order on all ranks
            if self._log is not None:
                name = f"{counts} hand-overs, with the points {self._sequence:08x}"
                self._log.write("meet", self._groups[group], name)
            self._compare({"passes": self._sequence}, group)
        if self._replicas is not None:
            # Replicas may run other numbers of micro-batches.
            names = "forward", "backward", "recomputation"
            points = {name: sorted(self._points[name]) for name in names}
            checksums = {
                name: zlib.crc32(repr(some).encode()) if some else None
                for name, some in points.items()
            }
            self._compare(checksums, self._replicas)

    def _compare(self, values: Mapping[str, int | None], group: dist.ProcessGroup) -> None:
        most = [_ABSENT if value is None else value for value in values.values()]
        least = [_ABSENT if value is None else -value for value in values.values()]
        compared = torch.tensor([most, least], device=self.device)
        dist.all_reduce(compared, dist.ReduceOp.MAX, group=group)
        for name, highest, lowest in zip(values, *compared.tolist(), strict=True):
            if highest != _ABSENT and highest != -lowest:
                raise RuntimeError(
                    f"rank {dist.get_rank()} handed over {dict(self.hand_overs)} times in "
                    f"{self.runs} runs; the {name} of other ranks of its group did not do the "
                    "same: their collectives were matched wrongly; run the same passes, with the "
                    "same collectives, on all ranks"
                )


def enabled_by_environment() -> bool:
    """Whether ``COMMFUSE_OVERLAP`` is not 0; ``COMMFUSE_FB_OVERLAP`` is its old name."""
    if "COMMFUSE_FB_OVERLAP" in os.environ:
        warnings.warn("COMMFUSE_FB_OVERLAP is now COMMFUSE_OVERLAP", FutureWarning, stacklevel=3)
    old = os.environ.get("COMMFUSE_FB_OVERLAP", "1")
    return os.environ.get("COMMFUSE_OVERLAP", old) != "0"
