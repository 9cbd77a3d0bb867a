"""How the experts of a launch may be laid out: EP, expert TP, and what their transfers take."""

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
    """Experts over ``parallel`` ranks (EP), each split over ``tensor`` (expert TP).

    Attributes:
        seconds: of a step in Megatron's order.
        transfers: seconds of it in which rows are sent to experts and back.
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
    """The layouts of a training's experts, the fastest first; none without experts.

    EP divides the experts, expert TP is 1 or that of the other layers, and both together divide the
    ranks of a pipeline stage.  The dispatcher stays as it is; ``alltoall_seq`` takes expert TP as
    wide as TP only.
    """
    experts, layout = training.experts, training.layout
    found: list[ExpertLayout] = []
    if experts is None:
        return found
    ranks = layout.tp * layout.cp * layout.dp
    layers = max(training.of_stage(stage).get("experts", 0.0) for stage in range(layout.pp))
    for tensor in sorted({1, layout.tp, experts.tensor}):
        for parallel in range(1, min(experts.number, ranks) + 1):
            if experts.number % parallel or ranks % (parallel * tensor) or experts.width % tensor:
                continue
            laid_out = replace(experts, parallel=parallel, tensor=tensor)
            step = Step(machine, replace(training, experts=laid_out), rough=True)
            shape = training.shape
            try:
                seconds = step.time(MEGATRON).seconds
                each = laid_out.transfers(machine, shape.held, shape.hidden)
            except PlacementError:  # such a group does not lie evenly on the nodes
                continue
            transfers = _BOTH_WAYS_BOTH_PASSES * each * layers * training.micro_batches
            present = laid_out == experts
            found.append(ExpertLayout(parallel, tensor, seconds, transfers, present))
    return sorted(found, key=lambda one: one.seconds)
