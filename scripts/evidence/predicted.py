"""How far the simulator is off the benchmark, on the benchmark's own machine.

    commfuse-npu bench --works micro-batches --ranks 8 --sleep-gemm 2.5 --scale 16 --sequence 512 \\
        --ratios .25,.5,1 --variants p2p,megatron-p2p,fb-overlap --json FILE
    python -m scripts.evidence predicted FILE

Nothing is fitted.  GEMMs take as long as they sleep, links have the rate that they were given.
What the measured computation takes besides its GEMMs is element-wise work, spread by its traffic;
what the measured transfers, blocking and without computation, take besides bytes over rate, is
each one's latency.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from commfuse_npu.hardware import machine
from commfuse_npu.tools.bench.results import Result, load
from commfuse_npu.tools.bench.shapes import ITEM_BYTES, WORKS
from commfuse_npu.tools.bench.sleeping import modelled_seconds
from commfuse_npu.tools.markdown import table_row
from commfuse_npu.tools.simulate import llama, turns
from commfuse_npu.tools.simulate.group import Group
from commfuse_npu.tools.simulate.llama import Attended, LayerShape
from commfuse_npu.tools.simulate.rank import Rank
from commfuse_npu.tools.simulate.variants import COMPUTE_ONLY, REFERENCE, TURNS, Variant

__all__ = ["main", "predicted"]

_WORK = "micro-batches"
_FORMS = {"p2p": REFERENCE, "megatron-p2p": Variant("megatron", "megatron"), "fb-overlap": TURNS}
_RUNS = 8
"""Of queries, an attention kernel each, as in the benchmark's baselines."""


@dataclass(frozen=True)
class _Asleep(machine.Machine):
    """A machine whose GEMMs take as long as the benchmark's sleep."""

    gflops: float = 1.0
    scale: float = 1.0

    def gemm(
        self,
        rows: float,
        inner: float,
        outer: float,
        *,
        result_bytes: float = machine.ITEM_BYTES,
        start: bool = True,
    ) -> float:
        return modelled_seconds(
            round(rows), round(outer), round(inner), self.gflops, scale=self.scale
        )


def predicted(result: Result, scale: float) -> float:
    """Seconds of a step of the benchmark's work, in a form of :data:`_FORMS`.

    Args:
        scale: how many times narrower the layers are than what they stand for.

    Raises:
        ValueError: it was not measured with sleeping GEMMs over links with a rate.
    """
    ranks = result.ranks
    asleep = re.match(r"sleeping GEMMs \(([\d.e+]+)", result.mode)
    sizes = [int(size) for size in re.findall(r"\d+", result.shape)]
    if result.work != _WORK or not asleep or not result.link_bytes_per_second or len(sizes) != 6:
        raise ValueError(
            f"{result.work}, {result.mode}, ratio {result.ratio:g}: measure --works {_WORK} "
            "with --sleep-gemm and ratios above 0"
        )
    rows, hidden, ffn, heads, head, groups = sizes
    qkv = (heads + 2 * groups) * head
    shape = LayerShape(rows, rows, 1, hidden, ffn, qkv, ranks, ranks, heads * head)
    gflops = float(asleep[1])
    attention = [_attention(shape, heads, head, groups, gflops, scale, way) for way in (0, 1)]

    def forward(rank: Rank) -> None:
        for _ in range(WORKS[_WORK].layers):
            llama.forward(rank, shape, Attended(attention[0]))

    def backward(rank: Rank) -> None:
        for _ in range(WORKS[_WORK].layers):
            llama.backward(rank, shape, Attended(attention[1]))

    def pair(rank: Rank) -> None:
        turns.pair(
            rank, shape, WORKS[_WORK].layers, (Attended(attention[0]), Attended(attention[1]))
        )

    wire, alone = result.wire_ms, result.communication_ms
    latency = max(0.0, alone - wire) / 1e3 / len(WORKS[_WORK].collectives)
    rate = result.link_bytes_per_second * machine.ITEM_BYTES / ITEM_BYTES[result.dtype]
    inside = machine.Level("full_mesh", rate, latency)
    one = _Asleep(
        npus_per_node=ranks, cube_flops=1.0, gemm_efficiency=1.0, half_rows=0.0, cores=0,
        gemm_start=0.0, attention_efficiency=1.0, hbm_bandwidth=1.0, transfer_slowdown=0.0,
        launch_overhead=0.0, post_overhead=0.0, event_overhead=0.0, inside=inside, between=None,
        batched=False, gflops=gflops, scale=scale,
    )  # fmt: skip

    def seconds(on: machine.Machine, variant: Variant, *builds: Callable[[Rank], None]) -> float:
        return sum(Group(on, ranks).play(variant, build).seconds for build in builds)

    # At 1 byte/s and at twice that: what does not halve are GEMMs.
    both = [
        seconds(replace(one, hbm_bandwidth=of), COMPUTE_ONLY, forward, backward)
        for of in (1.0, 2.0)
    ]
    traffic = 2 * (both[0] - both[1])
    besides = result.compute_ms / 1e3 / WORKS[_WORK].micro_batches - (both[0] - traffic)
    assert besides > 0, f"GEMMs alone sleep longer than {result.compute_ms:g} ms"
    one = replace(one, hbm_bandwidth=traffic / besides)
    variant = _FORMS[result.variant]
    if variant is not TURNS:
        return WORKS[_WORK].micro_batches * seconds(one, variant, forward, backward)
    ends = seconds(one, _FORMS["megatron-p2p"], forward, backward)
    return ends + (WORKS[_WORK].micro_batches - 1) * seconds(one, variant, pair)


def _attention(
    shape: LayerShape, heads: int, head: int, groups: int, gflops: float, scale: float, way: int
) -> float:
    """Seconds that the products of one rank's attention sleep, forward (0) or backward (1)."""
    here = groups // shape.ranks
    total = 0.0
    for run in range(_RUNS):
        queries = heads // groups * (shape.rows // _RUNS)
        keys = shape.rows // _RUNS * (run + 1)
        scores, out = (queries, keys, head), (queries, head, keys)
        products = (
            [scores, out] if way == 0 else [scores, scores, out, *[(keys, head, queries)] * 2]
        )
        total += sum(modelled_seconds(*of, gflops, scale=scale, batch=here) for of in products)
    return total


def _rows(results: Sequence[Result], scale: float) -> Iterator[str]:
    yield table_row(("ratio", *_FORMS))
    yield f"|---:{'|---:' * len(_FORMS)}|"
    for ratio in sorted({one.ratio for one in results}):
        cells = {}
        for one in results:
            if one.ratio == ratio and one.variant in _FORMS:
                said = 1e3 * predicted(one, scale)
                off = said / one.median_ms - 1
                cells[one.variant] = f"{one.median_ms:.0f} / {said:.0f} ({off:+.1%})"
        yield table_row((f"{ratio:g}", *(cells.get(form, "-") for form in _FORMS)))


def main(argv: Sequence[str]) -> int:
    """Predict and print: measured / predicted, in ms."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="what the benchmark's --json wrote")
    parser.add_argument("--scale", type=float, default=16.0, help="as the benchmark had it")
    given = parser.parse_args(argv)
    _, results, _ = load(given.file)
    try:
        print("\n".join(_rows(results, given.scale)))
    except ValueError as error:
        parser.error(str(error))
    return 0
