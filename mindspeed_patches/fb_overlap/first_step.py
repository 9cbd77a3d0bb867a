"""Watches a model's first step, which runs in Megatron's order, and decides about later ones."""

from __future__ import annotations

import logging
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.overlap import ForwardBackwardOverlap, PassState, RandomState
from commfuse_npu.overlap.transfers import active_turns, hook_collectives
from commfuse_npu.runtime.collectives import device_backend
from mindspeed_patches.fb_overlap.core_versions import StepLayout
from mindspeed_patches.fb_overlap.pass_states import Census
from mindspeed_patches.fb_overlap.recomputation import Recomputation
from mindspeed_patches.patching import replaced

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decision:
    """What all ranks decided after a first step; each reason is ``None`` if there is none.

    Attributes:
        off: why nothing takes turns.
        alone: why no forward runs beside a backward.
        in_place: why no recomputation runs ahead.
        states: what passes write, besides what is always swapped.
    """

    off: str | None
    alone: str | None
    in_place: str | None
    states: list[PassState]


class FirstStep:
    """Runs passes of a first step by themselves, with the census at their points.

    It watches a first pass of each kind through each model chunk.

    Args:
        overlap: runs the passes.
        recomputation: tells recomputations from the gradients around them.
    """

    def __init__(
        self,
        overlap: ForwardBackwardOverlap,
        layout: StepLayout,
        recomputation: Recomputation,
    ) -> None:
        self._overlap = overlap
        self._layout = layout
        self._draws = False
        self._peers = layout.joined_replicas() or layout.tensor
        self._recomputation = recomputation
        hook_collectives()  # before the census looks at the names that it wraps
        self._census = Census(layout.models, [layout.step["forward_step_func"]])
        # Megatron runs as many micro-batches as there are stages through a chunk, then the next.
        chunks = len(layout.models)
        stages = layout.stages
        self._watched = range(0, 1 + (chunks - 1) * stages, stages)
        self._seen: Counter[str] = Counter()
        # Names of the points of the first pass of each kind.
        self._points: defaultdict[str, list[str]] = defaultdict(list)

    def run_pass(self, kind: str, function: Callable[[], Any]) -> Any:
        """Run a ``forward`` or ``backward``; return its result."""
        number = self._seen[kind]
        self._seen[kind] += 1
        if number not in self._watched:
            return function()

        def at_point(name: str) -> None:
            if number == 0:
                self._points[kind].append(name)
            self._look()

        self._census.begin()
        random = _random_numbers(self._overlap.device)
        with (
            replaced(self._overlap, at_point=at_point),
            replaced(self._recomputation, at_boundary=self._look),
        ):
            result = self._overlap.run_together(**{kind: function})[0]
        self._census.look(kind, force=True)
        if kind == "backward":
            after = _random_numbers(self._overlap.device)
            self._draws |= not all(map(torch.equal, random, after))
        return result

    def _look(self) -> None:
        turns = active_turns()
        if turns is not None:
            recomputes = self._recomputation.recomputing
            self._census.look("recomputation" if recomputes else turns.running.name)

    def decide(self) -> Decision:
        """Decide; collective over all ranks that train the model."""
        census = self._census
        both = census.written_by_both(["forward"], ["backward", "recomputation"])
        beside_gradients = census.written_by_both(["recomputation"], ["backward"])
        if both:
            _logger.warning("CommFuse: forward and backward both write %s", ", ".join(both))
        if beside_gradients:
            _logger.warning(
                "CommFuse: recomputations and gradients both write %s", ", ".join(beside_gradients)
            )
        size = self._recomputation.most_bytes
        differ = self._different_points()
        not_beside, not_ahead, too_large, draws, off = self._layout.maximum(
            len(both),
            len(beside_gradients),
            size > _free_bytes(self._overlap.device),
            self._draws,
            differ is not None,
        )
        alone = in_place = None
        unknown = "state that is not known to belong to a micro-batch (ranks that found it name it)"
        if not_beside:
            alone = f"forward and backward both write {unknown}"
        elif draws:
            alone = "a backward draws random numbers, in order between those of two forwards"
        if not_ahead:
            in_place = f"recomputations and gradients both write {unknown}"
        elif too_large:
            in_place = f"one more checkpoint of {size / 2**20:.1f} MiB does not fit"
        if off:
            differ = differ or "ranks of another stage have different points"
        return Decision(differ, alone, in_place, census.states())

    def _different_points(self) -> str | None:
        """The first point of a pass at which ranks that have to agree differ, if any."""
        group = self._peers
        points = dict(self._points)
        checksum = zlib.crc32(repr(sorted(points.items())).encode())
        device, _ = device_backend(group)
        checksums = torch.tensor([checksum, -checksum], device=device)
        dist.all_reduce(checksums, dist.ReduceOp.MAX, group=group)
        if not int(checksums.sum()):
            return None
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, points, group)
        first, *others = gathered
        for kind in ("forward", "backward"):
            for other in others:
                pairs = zip_longest(first.get(kind, []), other.get(kind, []), fillvalue="its end")
                for number, (one, two) in enumerate(pairs):
                    if one != two:
                        return f"point {number} of the {kind} is {one} on a rank, {two} on another"
        return None


def _random_numbers(device: str) -> list[torch.Tensor]:
    """The states of all generators, those of Megatron's tracker included."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    states = RandomState(device).save()
    return [*states.values(), *get_cuda_rng_tracker().get_states().values()]


def _free_bytes(device: str) -> float:
    """What a device had left at the peak so far."""
    if device == "cpu":
        return math.inf
    module = torch.get_device_module(device)
    free, _ = module.mem_get_info()
    left: int = free + module.memory_reserved() - module.max_memory_allocated()
    return left
