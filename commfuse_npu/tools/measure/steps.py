"""What is measured, the most useful first: the time may be over before the last step.

No torch here: the process that asks the ranks need not have it.
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
"""A method of :class:`~commfuse_npu.tools.measure.worker.Worker` and its arguments: by rank."""

Times = list[dict[str, Any]]
"""What was timed, by what it is of, with the ``seconds`` of single calls."""

_LAUNCHABLE = ("collective", "megatron", "coc-*", "auto")
"""What can be launched, and ``collective``: nothing overlapped."""


class Scale(NamedTuple):
    """How large and how often.

    Attributes:
        path: of the model's configuration, whose layers the GEMMs are of.
        ranks: how many there are.
        rows: tokens of a micro-batch.
        shrink: divides every width, for a CPU.
        message: bytes of the largest message.
        calls: how often each is measured.
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
        """The model's own on a device; on a CPU an eighth of its widths and 512 tokens.

        Raises:
            ConfigError: the configuration cannot be read.
        """
        config = ModelConfig.load(path)
        if device == "cpu":
            return cls(path, config, device, ranks, 512, 8, 1 << 20, 7)
        return cls(path, config, device, ranks, config.seq_length, 1, 1 << 26, 20)

    @property
    def messages(self) -> list[int]:
        return [self.message >> shift for shift in (8, 4, 2, 0)]

    def halves(self, most: int) -> list[int]:
        """The rows, a half, a quarter, ... down to 16."""
        return [self.rows >> shift for shift in range(most) if self.rows >> shift >= 16]

    def layers(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of each linear layer on one rank."""
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
    """Of each call the time of the rank that took longest, and the most memory.

    A rank without times, or a rank that does not know its memory, says ``[]`` and ``None``.

    Raises:
        ValueError: a call took no time, of which no figure can be made.
    """
    found = []
    for rows in zip(*by_rank, strict=True):
        known = [one["seconds"] for one in rows if one["seconds"]]
        seconds = [max(times) for times in zip(*known, strict=True)]
        if not all(one > 0 for one in seconds):
            raise ValueError(f"calls took {seconds} seconds: device events returned zero durations")
        row = {**rows[0], "seconds": seconds}
        if "bytes taken" in row:
            taken = [one["bytes taken"] for one in rows]
            row["bytes taken"] = None if None in taken else max(taken)
        found.append(row)
    return found


def _layers(ask: Ask, scale: Scale) -> Times:
    """The bench over the links as they are: quartiles of each form's seconds, and its result."""
    conditions = Conditions(scale.path, scale.device, scale.shrink, scale.rows)
    rounds = 3 if scale.device == "cpu" else 10
    sweep = Sweep(scale.ranks, ("layers",), (0.0,), rounds, _LAUNCHABLE, dtype="bf16")
    times = []
    for one in Bench(ask, scale.ranks, conditions).run(sweep):
        low, high = one.quartiles_ms
        seconds = [ms / 1e3 for ms in (low, one.median_ms, high)]
        times.append({"form": one.variant, "seconds": seconds, "result": asdict(one)})
    return times


class Step(NamedTuple):
    """A question.

    Attributes:
        question: what it answers.
        alone: whether one device answers it.
        seconds: limit of one of its questions, for a slow machine.
        ask: the answer; by default what the ranks' method of the step's name returns.
    """

    question: str
    alone: bool = False
    seconds: float = 600
    ask: Callable[[Ask, Scale], Times] | None = None


STEPS: Mapping[str, Step] = {
    "links": Step("how fast are lanes, one and several at once?"),
    "collectives": Step("how long do the collectives take that CommFuse replaces?"),
    "gemms": Step("how long do GEMMs of a layer take, by rows?", alone=True),
    "host": Step("what does posting a step, or launching a GEMM, cost the host?"),
    "beside": Step("do GEMMs and transfers slow each other down?"),
    LAYER: Step("how long do two layers take in each form?", ask=_layers),
    "memory": Step("how fast is memory?", alone=True),
    "communicators": Step("how much memory does a lane take?"),
    "attention": Step("how long does attention take, by queries?", alone=True),
    LAUNCH: Step("how long do ten iterations of the launch take in each form?", seconds=900),
}
"""By name, the most useful first."""
