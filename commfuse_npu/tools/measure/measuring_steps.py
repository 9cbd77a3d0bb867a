"""The steps of a measurement, most useful first, because time may run out before the last.

Does not import torch, which the process that asks the ranks need not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commfuse_npu.tools.model_config import ModelConfig

LAUNCH = "launch"

Times = list[dict[str, Any]]
"""Measurements: what was timed, with the ``seconds`` of single calls."""


@dataclass(frozen=True)
class Scale:
    """Sizes and repetitions of the measurements.

    Attributes:
        config: the model's, whose layers define the GEMMs.
        ranks: number of ranks.
        rows: tokens of a micro-batch.
        shrink: divisor of every width, for a CPU.
        message: bytes of a message.
        calls: repetitions of each measurement.
    """

    config: ModelConfig
    ranks: int
    rows: int
    shrink: int
    message: int
    calls: int

    @classmethod
    def of(cls, path: Path, ranks: int, device: str) -> Scale:
        """The model's sizes on a device; on a CPU 1/8 of its widths and fewer tokens.

        Raises:
            ConfigError: the configuration cannot be read.
        """
        config = ModelConfig.load(path)
        if device == "cpu":
            return cls(config, ranks, 512, 8, 1 << 20, 7)
        return cls(config, ranks, config.seq_length, 1, 1 << 26, 20)

    def halves(self, most: int) -> list[int]:
        """The rows, a half, a quarter, ..., at most ``most`` values of at least 16."""
        return [self.rows >> shift for shift in range(most) if self.rows >> shift >= 16]

    @property
    def hidden(self) -> int:
        return self._divisible(self.config.hidden_size, 16 * self.ranks)

    @property
    def ffn(self) -> int:
        """Width of the MLP; gate and up have this width each."""
        return self._divisible(self.config.ffn_hidden_size, 16 * self.ranks)

    @property
    def groups(self) -> int:
        """Key heads; fewer, but as wide as the model's."""
        return self._divisible(self.config.num_query_groups, self.ranks)

    @property
    def heads(self) -> int:
        return self._divisible(self.config.num_attention_heads, self.groups)

    @property
    def head(self) -> int:
        return self.config.hidden_size // self.config.num_attention_heads

    def _divisible(self, width: int, divisor: int) -> int:
        return max(1, round(width / self.shrink / divisor)) * divisor

    def layers(self) -> dict[str, tuple[int, int]]:
        """Input and output width of each linear layer on one rank."""
        n = self.ranks
        hidden = self.hidden
        return {
            "qkv": (hidden, (self.heads + 2 * self.groups) * self.head // n),
            "proj": (self.heads * self.head // n, hidden),
            "fc1": (hidden, 2 * self.ffn // n),
            "fc2": (self.ffn // n, hidden),
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


STEPS: Mapping[str, str] = {
    "links": "how long does a message take, and one to each peer at once?",
    "collectives": "how long do the collectives take that CommFuse replaces?",
    "gemms": "how long do GEMMs of a layer take, by rows?",
    "host": "what does posting a step, or launching a GEMM, cost the host?",
    "beside": "do GEMMs and transfers slow each other down?",
    "memory": "how fast is memory?",
    "attention": "how long does attention take, by queries?",
    LAUNCH: "how long do ten iterations of the launch take in each form?",
}
"""The question of each step, the most useful first."""
