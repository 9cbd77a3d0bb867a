"""The steps of a measurement, most useful first, because time may run out before the last.

Does not import torch, which the process that asks the ranks need not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from commfuse_npu.tools.bench.sweep import Bench, Conditions, Sweep
from commfuse_npu.tools.model_config import ModelConfig

__all__ = ["LAUNCH", "LAYER", "STEPS", "Ask", "Scale", "Step", "Times", "slowest"]

LAYER, LAUNCH = "layer", "launch"

Ask = Callable[..., list[Any]]
"""Calls a method of :class:`~commfuse_npu.tools.measure.worker.Worker`; returns results by rank."""

Times = list[dict[str, Any]]
"""Measurements: what was timed, with the ``seconds`` of single calls."""

_LAUNCHABLE = ("collective", "megatron", "coc-*", "auto")
"""Forms that can be launched, and ``collective``, which overlaps nothing."""


class Scale(NamedTuple):
    """Sizes and repetitions of the measurements.

    Attributes:
        path: of the model's configuration, whose layers define the GEMMs.
        ranks: number of ranks.
        rows: tokens of a micro-batch.
        shrink: divisor of every width, for a CPU.
        message: bytes of a message.
        calls: repetitions of each measurement.
    """

    path: Path
    config: ModelConfig
    device: str
    ranks: int
    rows: int
    shrink: int
    message: int
    calls: int

    @classmethod
    def of(cls, path: Path, ranks: int, device: str) -> Scale:
        """The model's sizes on a device; on a CPU 1/8 of its widths and 512 tokens.

        Raises:
            ConfigError: the configuration cannot be read.
        """
        config = ModelConfig.load(path)
        if device == "cpu":
            return cls(path, config, device, ranks, 512, 8, 1 << 20, 7)
        return cls(path, config, device, ranks, config.seq_length, 1, 1 << 26, 20)

    def halves(self, most: int) -> list[int]:
        """The rows, a half, a quarter, ..., at most ``most`` values of at least 16."""
        return [self.rows >> shift for shift in range(most) if self.rows >> shift >= 16]

    def layers(self) -> dict[str, tuple[int, int]]:
        """Input and output width of each linear layer on one rank."""
        config, n = self.config, self.ranks
        hidden, ffn = config.hidden_size // self.shrink, config.ffn_hidden_size // self.shrink
        heads, groups = config.num_attention_heads, config.num_query_groups
        qkv = hidden * (heads + 2 * groups) // heads
        return {
            "qkv": (hidden, -(-qkv // n)),
            "proj": (-(-hidden // n), hidden),
            "fc1": (hidden, -(-2 * ffn // n)),
            "fc2": (-(-ffn // n), hidden),
        }


def slowest(by_rank: Sequence[Times]) -> Times:
    """The time of the slowest rank for each call; a rank without times has ``[]``.

    Raises:
        ValueError: a call took no time, from which no figure can be computed.
    """
    result = []
    for rows in zip(*by_rank, strict=True):
        timed = [entry["seconds"] for entry in rows if entry["seconds"]]
        seconds = [max(times) for times in zip(*timed, strict=True)]
        if not all(value > 0 for value in seconds):
            raise ValueError(f"calls took {seconds} seconds: device events returned zero durations")
        result.append({**rows[0], "seconds": seconds})
    return result


def _layers(ask: Ask, scale: Scale) -> Times:
    """Run the bench on the real links: quartiles of each form's seconds, and its result."""
    conditions = Conditions(scale.path, scale.device, scale.shrink, scale.rows)
    rounds = 3 if scale.device == "cpu" else 10
    sweep = Sweep(scale.ranks, ("layers",), (0.0,), rounds, _LAUNCHABLE, dtype="bf16")
    times = []
    for result in Bench(ask, scale.ranks, conditions).run(sweep):
        low, high = result.quartiles_ms
        seconds = [ms / 1e3 for ms in (low, result.median_ms, high)]
        times.append({"form": result.variant, "seconds": seconds, "result": asdict(result)})
    return times


class Step(NamedTuple):
    """A step of the measurement.

    Attributes:
        question: the question that it answers.
        seconds: time limit of one call to the ranks, for a slow machine.
        ask: computes the answer; by default it is the result of the rank method of that name.
    """

    question: str
    seconds: float = 600
    ask: Callable[[Ask, Scale], Times] | None = None


STEPS: Mapping[str, Step] = {
    "links": Step("how fast are lanes, one and several at once?"),
    "collectives": Step("how long do the collectives take that CommFuse replaces?"),
    "gemms": Step("how long do GEMMs of a layer take, by rows?"),
    "host": Step("what does posting a step, or launching a GEMM, cost the host?"),
    "beside": Step("do GEMMs and transfers slow each other down?"),
    LAYER: Step("how long do two layers take in each form?", ask=_layers),
    "memory": Step("how fast is memory?"),
    "attention": Step("how long does attention take, by queries?"),
    LAUNCH: Step("how long do ten iterations of the launch take in each form?", seconds=900),
}
"""Steps by name, the most useful first."""
