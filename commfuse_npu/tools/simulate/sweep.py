"""The trainings and the machines that are simulated.

Five machines are simulated for a description: one with all typical figures, and the four
combinations of favorable and unfavorable figures for computation and communication.  A range spans
the results of these five; it is wide where the figures are uncertain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from commfuse_npu.config_file import ConfigError
from commfuse_npu.hardware.description import Choice
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate.pipeline import interleaves
from commfuse_npu.tools.simulate.training import Layout, Recompute, Training

__all__ = ["CORNERS", "Range", "training"]

CORNERS: tuple[tuple[Choice, Choice], ...] = (
    ("typical", "typical"),
    ("favourable", "favourable"),
    ("favourable", "unfavourable"),
    ("unfavourable", "favourable"),
    ("unfavourable", "unfavourable"),
)
"""The choice of figures of each machine: for computation, and for links."""


class Range(NamedTuple):
    """The result at typical figures, and the lowest and highest result of the five machines."""

    low: float
    typical: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        """The range of one value per machine, the typical one first."""
        return cls(min(values), values[0], max(values))

    def text(self, show: Callable[[float], str]) -> str:
        """``typical (low .. high)``."""
        if self.low == self.high:
            return show(self.typical)
        return f"{show(self.typical)} ({show(self.low)} .. {show(self.high)})"


def training(
    model: ModelConfig,
    layout: Layout,
    sequence: int | None = None,
    *,
    micro_batch: int | None = None,
    micro_batches: int | None = None,
    recompute: Recompute = "none",
) -> Training:
    """The simulator's description of a training: a model in a layout.

    Args:
        sequence, micro_batch: tokens and sequences; the model's by default.
        micro_batches: per step and replica; by default what the model's global batch gives.

    Raises:
        ConfigError: they do not fit each other; one line per problem, with value and limit.
    """
    sequence = sequence or model.seq_length
    micro_batch = micro_batch or model.micro_batch_size
    global_batch = model.global_batch_size
    if micro_batches is not None:
        global_batch = micro_batch * micro_batches * layout.dp
    stages = model.num_layer_list if layout.pp == model.pipeline_model_parallel_size else None
    fitted = replace(
        model,
        seq_length=sequence,
        max_position_embeddings=max(sequence, model.max_position_embeddings),
        micro_batch_size=micro_batch,
        global_batch_size=global_batch,
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        pipeline_model_parallel_size=layout.pp,
        sequence_parallel=model.sequence_parallel or layout.tp > 1,
        num_layer_list=stages,
        npus_per_node=layout.npus,
        nnodes=1,
    )
    fitted.validate()
    setup = Training(fitted, recompute, layout.vpp)
    if layout.vpp > 1 and (layout.pp == 1 or any(count % layout.vpp for count in setup.layers)):
        raise ConfigError(
            f"{layout.vpp} chunks do not divide the layers of {layout.pp} pipeline stages, "
            f"{', '.join(map(str, sorted(set(setup.layers))))}; choose another number of chunks"
        )
    if not interleaves(layout.pp, layout.vpp, setup.micro_batches):
        raise ConfigError(
            f"{setup.micro_batches} micro-batches are not divisible by {layout.pp} pipeline "
            "stages, as the interleaved schedule wants; choose another global batch or 1 chunk"
        )
    return setup
