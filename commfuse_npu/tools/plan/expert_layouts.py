"""Possible layouts of a launch's experts, EP and expert TP, with the time of their transfers."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from commfuse_npu.hardware.machine import Machine
from commfuse_npu.tools.simulate.links import PlacementError
from commfuse_npu.tools.simulate.step import Step
from commfuse_npu.tools.simulate.training import Training
from commfuse_npu.tools.simulate.variants import MEGATRON

__all__ = ["ExpertLayout", "expert_layouts"]

_BOTH_WAYS_BOTH_PASSES = 4


class ExpertLayout(NamedTuple):
    """Experts over ``parallel`` ranks (EP), each split over ``tensor`` ranks (expert TP).

    Attributes:
        seconds: of a step in Megatron's order.
        transfers: seconds of the step that send rows to experts and back.
        present: whether the launch has this layout.
    """

    parallel: int
    tensor: int
    seconds: float
    transfers: float
    present: bool

    @property
    def share(self) -> float:
        return self.transfers / self.seconds


def expert_layouts(training: Training, machine: Machine) -> list[ExpertLayout]:
    """The layouts of a training's experts, fastest first; an empty list without experts.

    EP divides the experts, expert TP is 1, that of the launch, or that of the other layers, and
    their product divides the ranks of a pipeline stage.  The dispatcher does not change;
    ``alltoall_seq`` requires expert TP equal to TP.
    """
    experts, layout = training.experts, training.layout
    layouts: list[ExpertLayout] = []
    if experts is None:
        return layouts
    ranks = layout.tp * layout.cp * layout.dp
    layers = max(training.of_stage(stage).get("experts", 0.0) for stage in range(layout.pp))
    for tensor in sorted({1, layout.tp, experts.tensor}):
        for parallel in range(1, min(experts.number, ranks) + 1):
            if experts.number % parallel or ranks % (parallel * tensor) or experts.width % tensor:
                continue
            laid_out = replace(experts, parallel=parallel, tensor=tensor)
            step = Step(machine, replace(training, experts=laid_out))
            shape = training.shape
            try:
                seconds = step.time(MEGATRON).seconds
                transfer = laid_out.transfers(machine, shape.held, shape.hidden)
            except PlacementError:  # the group is not spread evenly over the nodes
                continue
            transfers = _BOTH_WAYS_BOTH_PASSES * transfer * layers * training.micro_batches
            present = laid_out == experts
            layouts.append(ExpertLayout(parallel, tensor, seconds, transfers, present))
    return sorted(layouts, key=lambda layout: layout.seconds)
