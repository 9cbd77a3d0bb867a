"""What is measured, in order of worth: an hour may end before all of it is.

No torch here: the process that asks the ranks need not have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from commfuse_npu.tools.bench.processes import RanksError
from commfuse_npu.tools.model_config import ModelConfig

__all__ = ["LAUNCH", "STEPS", "Ask", "Scale", "Step"]

LAUNCH = "launch"
"""The step that trains: :mod:`commfuse_npu.tools.measure.trainings`."""

Ask = Callable[..., list[Any]]
"""A method of :class:`~commfuse_npu.tools.measure.worker.Worker` and its arguments: by rank."""

Times = list[dict[str, Any]]
"""What was timed, by what it is of, with the ``seconds`` of single calls."""


_PIECES = 8
"""Of rows, as blocks of a gather on so many ranks are."""
_BUFFERS = 1, 20, 200
"""MB of each of a communicator's two: the last is HCCL's own size."""
_COMMUNICATORS = 3
"""How many of each size."""


@dataclass(frozen=True)
class Scale:
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
    def of(cls, config: ModelConfig, ranks: int, device: Literal["cpu", "npu", "cuda"]) -> Scale:
        """The model's own on a device; on a CPU an eighth of its widths and 512 tokens."""
        if device == "cpu":
            return cls(config, ranks, 512, 8, 1 << 20, 7)
        return cls(config, ranks, config.seq_length, 1, 1 << 26, 20)

    def layers(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of each linear layer on one rank."""
        config, n, part = self.config, self.ranks, self.shrink
        hidden, ffn = config.hidden_size // part, config.ffn_hidden_size // part
        heads, groups = config.num_attention_heads, config.num_query_groups
        qkv = hidden * (heads + 2 * groups) // heads
        return {
            "qkv": (hidden, -(-qkv // n)),
            "proj": (-(-hidden // n), hidden),
            "fc1": (hidden, -(-2 * ffn // n)),
            "fc2": (-(-ffn // n), hidden),
        }


@dataclass(frozen=True)
class Step:
    """A question.

    Attributes:
        name: of its file.
        question: what it answers.
        seconds: after which one of its questions is given up, on a machine as slow as it may be.
        ask: the answer; of each call the time of the rank that took longest.  ``None``: it is not
            for the ranks (:mod:`commfuse_npu.tools.measure.layer`, :data:`LAUNCH`).
        alone: whether one device answers it.
    """

    name: str
    question: str
    seconds: float
    ask: Callable[[Ask, Scale], Times] | None
    alone: bool = False


def _links(ask: Ask, scale: Scale) -> Times:
    pings = _slowest(ask("latency", scale.calls)[:1])
    found: Times = [{"bytes": 8, "lanes": 1, "half a ping-pong": True, "seconds": pings}]
    for size in _sizes(scale):
        for lanes in _lanes(scale):
            times = ask("lanes", size, lanes, scale.calls)
            found.append({"bytes": size, "lanes": lanes, "seconds": _slowest(times)})
    return found


def _collectives(ask: Ask, scale: Scale) -> Times:
    found: Times = []
    for name in ("all-gather", "reduce-scatter", "all-to-all"):
        for size in _sizes(scale):
            times = ask("collective", name, size, scale.calls)
            found.append({"what": name, "bytes": size, "seconds": _slowest(times)})
    return found


def _batches(ask: Ask, scale: Scale) -> Times:
    peers = scale.ranks - 1
    found: Times = []
    for size in _sizes(scale):
        for posted, lanes, grouped in (
            ("a lane per peer", peers, False),
            ("one lane, a batch per peer", 1, False),
            ("one lane, one batch", 1, True),
        ):
            by_rank = ask("batches", size, lanes, scale.calls, grouped=grouped)
            of = {"bytes": size, "peers": peers, "posted": posted}
            found += [{**of, **one} for one in _each(by_rank)]
    return found


def _gemms(ask: Ask, scale: Scale) -> Times:
    found: Times = []
    for layer, (inputs, outputs) in scale.layers().items():
        for rows in _halves(scale.rows, 6):
            times = ask("gemm", rows, inputs, outputs, scale.calls)
            found.append(_gemm(layer, rows, inputs, outputs, times))
    return found


def _groups(ask: Ask, scale: Scale) -> Times:
    found: Times = []
    for layer, (inputs, outputs) in scale.layers().items():
        for groups in (1, 2, 4):
            if not outputs % groups:
                times = ask("column_gemm", scale.rows, inputs, outputs, groups, scale.calls)
                one = _gemm(layer, scale.rows, inputs, outputs, times)
                found.append({"groups of columns": groups, **one})
    return found


def _shapes(ask: Ask, scale: Scale) -> Times:
    rows, (inputs, outputs) = scale.rows // _PIECES * _PIECES, scale.layers()["fc1"]
    found: Times = []
    for depth in (inputs // 4, inputs // 2, inputs, 2 * inputs):
        times = ask("gemm", rows, depth, outputs, scale.calls)
        found.append({"what": "whole", **_gemm("fc1", rows, depth, outputs, times)})
    for view in ("input", "weight"):
        times = ask("gemm", rows, inputs, outputs, scale.calls, view=view)
        what = f"{view} a view of columns"
        found.append({"what": what, **_gemm("fc1", rows, inputs, outputs, times)})
    by_rank = ask("row_gemms", rows, inputs, outputs, _PIECES, scale.calls)
    for how in ("one by one", "one call"):
        times = [one[how] for one in by_rank]
        if None not in times:
            one = _gemm("fc1", rows, inputs, outputs, times)
            found.append({"what": f"{_PIECES} GEMMs of rows, {how}", **one})
    found[-1]["one call by"] = by_rank[0]["by"]
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


def _communicators(ask: Ask, scale: Scale) -> Times:
    hccl = "hccl" in ask("machine")[0]["backend"]
    found: Times = []
    for megabytes in _BUFFERS if hccl else (None,):
        for _ in range(_COMMUNICATORS):
            by_rank = ask("communicator", megabytes)
            taken = [one for _, one in by_rank]
            bytes_taken = None if None in taken else max(taken)
            of = {"MB of a buffer": megabytes, "bytes taken": bytes_taken}
            found.append({**of, "seconds": [max(seconds for seconds, _ in by_rank)]})
    return found


def _memory(ask: Ask, scale: Scale) -> Times:
    numbers, parts = scale.message, scale.ranks
    copies = ask("copy", numbers, scale.calls)
    found: Times = [{"what": "copy", "numbers": numbers, "seconds": _slowest(copies)}]
    for once in (False, True):
        times = ask("sums", numbers, parts, scale.calls, once=once)
        what = f"sum of {parts} parts, {'in one pass' if once else 'in order'}"
        found.append({"what": what, "numbers": numbers, "seconds": _slowest(times)})
    return found


def _attention(ask: Ask, scale: Scale) -> Times:
    config, keys = scale.config, scale.rows
    heads = max(1, config.num_attention_heads // scale.ranks // scale.shrink)
    head = config.hidden_size // config.num_attention_heads
    found: Times = []
    for queries in _halves(keys, 4):
        times = ask("attention", queries, keys, heads, head, scale.calls)
        of = {"queries": queries, "keys": keys, "heads": heads, "of": head}
        found.append({**of, "seconds": _slowest(times)})
    return found


def _beside(ask: Ask, scale: Scale) -> Times:
    inputs, outputs = scale.layers()["fc1"]
    # A piece: shorter than what is sent beside it.
    gemm = scale.rows // 4, inputs, outputs
    found = _each(ask("beside", *gemm, scale.message, scale.calls))
    return found + _each(ask("sums_beside", *gemm, scale.ranks, scale.calls))


def _pipelines(ask: Ask, scale: Scale) -> Times:
    found: Times = []
    for lanes in _lanes(scale):
        try:
            by_rank = ask("pipelines", scale.message, lanes, scale.calls)
        except RanksError as error:
            worked = ", ".join(str(one) for one in _lanes(scale) if one < lanes) or "none"
            said = f"beside a pipeline's batch, {lanes} at once; worked: {worked}"
            raise RanksError(f"{str(error).strip()} ({said})") from error
        found += [{"lanes at once": lanes, "bytes": scale.message, **one} for one in _each(by_rank)]
    return found


def _sizes(scale: Scale) -> list[int]:
    """Of messages, in bytes."""
    return [scale.message >> shift for shift in (8, 4, 2, 0)]


def _lanes(scale: Scale) -> list[int]:
    """How many at once."""
    most = scale.ranks - 1
    return sorted({min(lanes, most) for lanes in (1, 2, 4, most)})


def _halves(rows: int, most: int) -> list[int]:
    """``rows``, a half, a quarter, ... down to 16."""
    return [rows >> shift for shift in range(most) if rows >> shift >= 16]


def _gemm(layer: str, rows: int, inputs: int, outputs: int, times: list[list[float]]) -> Any:
    of = {"layer": layer, "rows": rows, "inputs": inputs, "outputs": outputs}
    return {**of, "seconds": _slowest(times)}


def _each(by_rank: Sequence[Mapping[str, list[float]]]) -> Times:
    """Of answers with several things timed."""
    return [
        {"what": what, "seconds": _slowest([one[what] for one in by_rank])} for what in by_rank[0]
    ]


def _slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Of each call.

    Raises:
        ValueError: one took no time, of which no figure can be made.
    """
    found = [max(times) for times in zip(*by_rank, strict=True)]
    if not all(seconds > 0 for seconds in found):
        raise ValueError(f"calls took {found} seconds; the events of this device do not tell")
    return found


STEPS = (
    Step("links", "how fast are lanes, one and several at once?", 120, _links),
    Step("collectives", "how long do the collectives take that the others use?", 120, _collectives),
    Step("gemms", "what do GEMMs of a layer take, whole and cut by rows?", 120, _gemms, alone=True),
    Step("host", "what does posting a step, or a GEMM, cost the host?", 120, _host),
    Step("batches", "is one batch to all peers faster than one to each?", 120, _batches),
    Step("beside", "do GEMMs, transfers and sums slow each other down?", 120, _beside),
    Step("layer", "how long do two layers take, in Megatron's order, CoC's, and ours?", 600, None,
         alone=True),
    Step("groups", "what do GEMMs take, cut by columns?", 120, _groups, alone=True),
    Step("shapes", "what do GEMMs take by depth, of views of columns, several in one call?", 120,
         _shapes, alone=True),
    Step("memory", "what do copies take, and sums in order and in one pass?", 120, _memory,
         alone=True),
    Step("communicators", "how much memory does a lane take, by its buffers?", 120, _communicators),
    Step("attention", "what does attention take, run of queries by run of queries?", 120,
         _attention, alone=True),
    Step(LAUNCH, "what do ten iterations of the launch take, in each of its forms?", 900, None),
    Step("pipelines", "do batches on lanes work beside those of a virtual pipeline, how many?", 120,
         _pipelines),
)  # fmt: skip
"""The most useful first; last what may hang."""
