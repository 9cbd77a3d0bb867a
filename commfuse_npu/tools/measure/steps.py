"""What is measured, the most useful first: the time may be over before the last step.

No torch here: the process that asks the ranks need not have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from commfuse_npu.tools.model_config import ModelConfig

__all__ = ["LAUNCH", "LAYER", "STEPS", "Ask", "Scale", "Step", "Times"]

LAYER, LAUNCH = "layer", "launch"
"""Steps that are not for the ranks: :mod:`.layer` and :mod:`.trainings`."""

Ask = Callable[..., list[Any]]
"""A method of :class:`~commfuse_npu.tools.measure.worker.Worker` and its arguments: by rank."""

Times = list[dict[str, Any]]
"""What was timed, by what it is of, with the ``seconds`` of single calls."""

_BUFFERS = 1, 20, 200
"""MB of each of a communicator's two: the last is HCCL's default."""


class Scale(NamedTuple):
    """How large and how often.

    Attributes:
        config: whose layers the GEMMs are of.
        ranks: how many there are.
        rows: tokens of a micro-batch.
        shrink: divides every width, for a CPU.
        message: bytes of the largest message.
        calls: how often each is measured.
    """

    config: ModelConfig
    ranks: int
    rows: int
    shrink: int
    message: int
    calls: int

    @classmethod
    def of(cls, config: ModelConfig, ranks: int, device: str) -> Scale:
        """The model's own on a device; on a CPU an eighth of its widths and 512 tokens."""
        if device == "cpu":
            return cls(config, ranks, 512, 8, 1 << 20, 7)
        return cls(config, ranks, config.seq_length, 1, 1 << 26, 20)

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


def _links(ask: Ask, scale: Scale) -> Times:
    pings = _slowest(ask("latency", scale.calls)[:1])
    found: Times = [{"bytes": 8, "lanes": 1, "half a ping-pong": True, "seconds": pings}]
    for size in _sizes(scale):
        for lanes in sorted({min(lanes, scale.ranks - 1) for lanes in (1, 2, 4, scale.ranks)}):
            times = ask("lanes", size, lanes, scale.calls)
            found.append({"bytes": size, "lanes": lanes, "seconds": _slowest(times)})
    return found


def _collectives(ask: Ask, scale: Scale) -> Times:
    return [
        {"what": name, "bytes": size, "seconds": _slowest(ask("collective", name, size, calls))}
        for calls in (scale.calls,)
        for name in ("all-gather", "reduce-scatter", "all-to-all")
        for size in _sizes(scale)
    ]


def _gemms(ask: Ask, scale: Scale) -> Times:
    found: Times = []
    for layer, (inputs, outputs) in scale.layers().items():
        for rows in _halves(scale.rows, 6):
            seconds = _slowest(ask("gemm", rows, inputs, outputs, scale.calls))
            of = {"layer": layer, "rows": rows, "inputs": inputs, "outputs": outputs}
            found.append({**of, "seconds": seconds})
    return found


def _host(ask: Ask, scale: Scale) -> Times:
    calls = 2 * scale.calls
    found = [{"what": "batch", "seconds": _slowest(ask("posting", calls, batched=True))}]
    if ask("machine")[0]["backend"] == "gloo":
        found.append({"what": "single", "seconds": _slowest(ask("posting", calls, batched=False))})
    else:
        # Single operations of HCCL open a communicator per pair, in an order that may hang.
        found.append({"what": "GEMM", "seconds": _slowest(ask("launching", calls))})
    return found


def _beside(ask: Ask, scale: Scale) -> Times:
    # A GEMM of a piece: shorter than what is sent beside it.
    by_rank = ask("beside", scale.rows // 4, *scale.layers()["fc1"], scale.message, scale.calls)
    return [
        {"what": what, "seconds": _slowest([one[what] for one in by_rank])} for what in by_rank[0]
    ]


def _memory(ask: Ask, scale: Scale) -> Times:
    seconds = _slowest(ask("copy", scale.message, scale.calls))
    return [{"what": "copy", "numbers": scale.message, "seconds": seconds}]


def _communicators(ask: Ask, scale: Scale) -> Times:
    hccl = "hccl" in ask("machine")[0]["backend"]
    found: Times = []
    for megabytes in (_BUFFERS if hccl else (None,)) * 3:
        by_rank = ask("communicator", megabytes)
        taken = [one for _, one in by_rank]
        bytes_taken = None if None in taken else max(taken)
        of = {"MB of a buffer": megabytes, "bytes taken": bytes_taken}
        found.append({**of, "seconds": [max(seconds for seconds, _ in by_rank)]})
    return found


def _attention(ask: Ask, scale: Scale) -> Times:
    config, keys = scale.config, scale.rows
    heads = max(1, config.num_attention_heads // scale.ranks // scale.shrink)
    head = config.hidden_size // config.num_attention_heads
    found: Times = []
    for queries in _halves(keys, 4):
        seconds = _slowest(ask("attention", queries, keys, heads, head, scale.calls))
        of = {"queries": queries, "keys": keys, "heads": heads, "of": head}
        found.append({**of, "seconds": seconds})
    return found


def _sizes(scale: Scale) -> list[int]:
    """Bytes of messages."""
    return [scale.message >> shift for shift in (8, 4, 2, 0)]


def _halves(rows: int, most: int) -> list[int]:
    """``rows``, a half, a quarter, ... down to 16."""
    return [rows >> shift for shift in range(most) if rows >> shift >= 16]


def _slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Of each call.

    Raises:
        ValueError: one took no time, of which no figure can be made.
    """
    found = [max(times) for times in zip(*by_rank, strict=True)]
    if not all(seconds > 0 for seconds in found):
        raise ValueError(f"calls took {found} seconds: device events returned zero durations")
    return found


class Step(NamedTuple):
    """A question.

    Attributes:
        question: what it answers.
        ask: the answer; of each call the time of the rank that took longest.  ``None``: it is not
            for the ranks.
        alone: whether one device answers it.
        seconds: limit of one of its questions, for a slow machine.
    """

    question: str
    ask: Callable[[Ask, Scale], Times] | None
    alone: bool = False
    seconds: float = 120


STEPS: Mapping[str, Step] = {
    "links": Step("how fast are lanes, one and several at once?", _links),
    "collectives": Step("how long do the collectives take that CommFuse replaces?", _collectives),
    "gemms": Step("how long do GEMMs of a layer take, by rows?", _gemms, alone=True),
    "host": Step("what does posting a step, or launching a GEMM, cost the host?", _host),
    "beside": Step("do GEMMs and transfers slow each other down?", _beside),
    LAYER: Step("how long do two layers take in each form?", None, seconds=600),
    "memory": Step("how fast is memory?", _memory, alone=True),
    "communicators": Step("how much memory does a lane take?", _communicators),
    "attention": Step("how long does attention take, by queries?", _attention, alone=True),
    LAUNCH: Step("how long do ten iterations of the launch take in each form?", None, seconds=900),
}
"""By name, the most useful first."""
