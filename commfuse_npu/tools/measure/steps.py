"""The steps of a measurement, most useful first, because time may run out before the last.

Does not import torch, which the process that asks the ranks need not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from commfuse_npu.tools.model_config import ModelConfig

FORMS, LAUNCH = "forms", "launch"

Ask = Callable[..., list[Any]]
"""Calls a method of :class:`~commfuse_npu.tools.measure.worker.Worker`; returns results by rank."""

Times = list[dict[str, Any]]
"""Measurements: what was timed, with the ``seconds`` of single calls."""


class Scale(NamedTuple):
    """Sizes and repetitions of the measurements.

    Attributes:
        config: the model's, whose layers define the GEMMs.
        ranks: number of ranks.
        rows: tokens of a micro-batch.
        compared_rows: the same of the layers whose forms are compared.
        shrink: divisor of every width, for a CPU.
        message: bytes of a message.
        calls: repetitions of each measurement.
    """

    config: ModelConfig
    device: str
    ranks: int
    rows: int
    compared_rows: int
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
            return cls(config, device, ranks, 512, 2048, 8, 1 << 20, 7)
        tokens = config.seq_length
        return cls(config, device, ranks, tokens, tokens, 1, 1 << 26, 20)

    def halves(self, most: int) -> list[int]:
        """The rows, a half, a quarter, ..., at most ``most`` values of at least 16."""
        return [self.rows >> shift for shift in range(most) if self.rows >> shift >= 16]

    @property
    def sequence(self) -> int:
        """S of the layers whose forms are compared; blocks of whole cache lines, as all widths."""
        return max(1, self.compared_rows // (16 * self.ranks)) * 16 * self.ranks

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
        n, hidden = self.ranks, self.hidden
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


class WorkKind(NamedTuple):
    """A workload, forward and backward with weight gradients, in which forms are compared.

    Attributes:
        title: of the verdict.
        pairs: number of column-parallel layers, each followed by a row-parallel one.
        layers: number of layers, each with its own weights.
        micro_batches: number of forwards and backwards per run.
    """

    title: str
    pairs: int
    layers: int = 1
    micro_batches: int = 1

    def bytes_per_pair(self, scale: Scale) -> int:
        """Bytes that one rank sends to another in one run: fp32 on a CPU, otherwise bf16.

        A pair of layers has five collectives over blocks of ``[s, H]``: the backward of the first
        gathers its input again instead of keeping N times the memory (as Megatron does).
        """
        block = scale.sequence // scale.ranks * scale.hidden * (4 if scale.device == "cpu" else 2)
        return block * 5 * self.pairs * self.micro_batches


WORKS: Mapping[str, WorkKind] = {
    "mlp": WorkKind("An MLP", 1),
    "layers": WorkKind("Two layers", 4, 2),
    "micro-batches": WorkKind("Eight micro-batches of two layers", 4, 2, 8),
}

COMPUTE, REFERENCE = "compute", "p2p"
TUNED = "auto", "fb-overlap"
NAMES = (
    *(REFERENCE, "slices-2", "slices-4", "slices-8", "megatron", "ours-c1", "ours-c4", "ours-c8"),
    *TUNED,
)
"""The forms that can be compared (:mod:`.forms`), the reference first."""


STEPS: Mapping[str, str] = {
    "links": "how long does a message take, and one to each peer at once?",
    "collectives": "how long do the collectives take that CommFuse replaces?",
    "gemms": "how long do GEMMs of a layer take, by rows?",
    "host": "what does posting a step, or launching a GEMM, cost the host?",
    "beside": "do GEMMs and transfers slow each other down?",
    FORMS: "how long do layers take in each form?",
    "memory": "how fast is memory?",
    "attention": "how long does attention take, by queries?",
    LAUNCH: "how long do ten iterations of the launch take in each form?",
}
"""The question of each step, the most useful first."""
