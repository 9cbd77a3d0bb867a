"""A Llama layer in every form, over machines, models, groups and lengths: who is ahead where?

    python -m scripts.evidence layers [--models ...] [--sequence-lengths ...] [--markdown FILE]

Simulates forward and backward of one layer, each form at its best: ours with the fastest number of
chunks for each operation, or Megatron's order where that is faster, CoC with the fastest number of
slices (2, 4, 8) for all, with 8 ranks also as kernels.  With other rounding sums are made in one
pass, and weight gradients of row-parallel layers by blocks.  Times are shares of those with
blocking collectives.  Nobody can launch the last three: CoC tuned for each operation as ours is, an
MC2 without a cost of cutting, and a layer without communication.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

from commfuse_npu.plan import least_rows, usual_chunks
from commfuse_npu.tools.config_file import find_config
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate.cover import covering_outputs
from commfuse_npu.tools.simulate.hardware import Hardware
from commfuse_npu.tools.simulate.machine import Machine
from commfuse_npu.tools.simulate.step import Step
from commfuse_npu.tools.simulate.sweep import CORNERS, Layout, Options, best_lanes, training
from commfuse_npu.tools.simulate.variants import (
    COC_FUSED,
    COMPUTE_ONLY,
    REFERENCE,
    Variant,
    direct,
    fused,
    sliced,
    tuned,
)
from scripts.evidence.markdown_section import replace_section

__all__ = ["BOUNDS", "OURS", "RIVALS", "Point", "main", "point", "report"]

_MACHINES = ("ascend_910b_server", "ascend_910c_supernode")
_MODELS = ("llama2_7b", "llama3_8b", "llama3_70b")
_SEQUENCES = (4096, 8192, 16384, 32768)
_SIZES = (2, 4, 8)
_CHUNKS = (1, 2, 3, 4, 6)
_SLICES = (2, 4, 8)

OURS = ("ours", "ours, other rounding", "default")
_KERNEL = "CoC fused"
RIVALS = ("CoC", _KERNEL, "Megatron")
BOUNDS = ("CoC tuned", "MC2", "compute")


class Point(NamedTuple):
    """Times of a layer by form, as shares of the layer with blocking collectives.

    ``shares`` has one entry per corner of the machine's description, typical figures first.
    """

    machine: str
    model: str
    tp: int
    sequence: int
    shares: tuple[dict[str, float], ...]

    def ahead(self, form: str, others: Sequence[str], corner: int = 0) -> bool:
        """Whether a form is faster than all the others."""
        shares = self.shares[corner]
        return all(shares[form] < shares[other] for other in others if other in shares)


def forms(machine: Machine, tp: int, lanes: int, rows: int) -> dict[str, Variant]:
    """By name; ``rows`` of a rank's block."""
    base, least = direct(tp, tp), covering_outputs(machine, tp)
    megatron = Variant("megatron", "megatron")
    default = fused(base, lanes, usual_chunks(tp, rows), collectives_from=least)
    return {
        "ours": tuned(base, lanes, _CHUNKS),
        "ours, other rounding": tuned(base, lanes, _CHUNKS, wgrad="blocks", sums="once"),
        "default": default if rows >= least_rows(tp) else megatron,
        **{f"CoC {k}": Variant(f"coc-{k}", "sliced", slices=k) for k in _SLICES},
        **({_KERNEL: COC_FUSED} if tp == 8 else {}),
        "Megatron": megatron,
        "CoC tuned": sliced(),
        "MC2": Variant("mc2", "kernel"),
        "compute": COMPUTE_ONLY,
    }


def point(machine: str, model: str, tp: int, sequence: int, corners: int = len(CORNERS)) -> Point:
    """Simulate a layer of one sequence.

    Args:
        corners: how many of the corners of the machine's description.
    """
    hardware = Hardware.load(find_config(machine, "hardware"))
    options = Options(micro_batch=1, micro_batches=1)
    what = training(ModelConfig.load(find_config(model)), Layout(tp, 1, 1, 1), sequence, options)
    found = []
    for compute, links in CORNERS[:corners]:
        step = Step(hardware.machine(compute, links), what)
        plain = _seconds(step, REFERENCE)
        every = forms(hardware.machine(), tp, best_lanes(hardware, tp), sequence // tp).items()
        shares = {name: _seconds(step, one) / plain for name, one in every}
        shares["CoC"] = min(shares.pop(f"CoC {k}") for k in _SLICES)
        found.append(shares)
    return Point(machine, model, tp, sequence, tuple(found))


def _seconds(step: Step, variant: Variant) -> float:
    return step.layer(variant, "forward").seconds + step.layer(variant, "backward").seconds


def _point(given: tuple[str, str, int, int]) -> Point:
    return point(*given)


def report(points: Sequence[Point]) -> str:
    """Markdown: where we are ahead, and a row per point."""
    names = [*OURS, *RIVALS, *BOUNDS]
    lines = [
        *_verdicts(points),
        "",
        f"| machine | model | TP | tokens | {' | '.join(names)} |",
        f"|---|---|---:|---:|{'---:|' * len(names)}",
    ]
    for one in points:
        fastest = min(one.shares[0].get(name, 1.0) for name in (*OURS, *RIVALS))
        cells = (_cell(one, name, fastest) for name in names)
        lines.append(
            f"| {one.machine} | {one.model} | {one.tp} | {one.sequence} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def _cell(one: Point, name: str, fastest: float) -> str:
    shares = [of[name] for of in one.shares if name in of]
    if not shares:
        return "-"
    text = f"{shares[0]:.3f}"
    if shares[0] == fastest:
        text = f"**{text}**"
    return f"{text} ({min(shares):.2f} .. {max(shares):.2f})" if len(shares) > 1 else text


def _verdicts(points: Sequence[Point]) -> Iterator[str]:
    without_kernel = [name for name in RIVALS if name != _KERNEL]
    for form in OURS:
        ahead = [one for one in points if one.ahead(form, without_kernel)]
        ends = [
            one
            for one in points
            if all(one.ahead(form, without_kernel, corner) for corner in range(len(one.shares)))
        ]
        everywhere = sum(one.ahead(form, RIVALS) for one in points)
        yield (
            f"- *{form}*: ahead of CoC in slices and of Megatron's order at {len(ahead)} of "
            f"{len(points)} points, at {len(ends)} of them at every end of the ranges; of CoC as a "
            f"kernel, too, at {everywhere}{_list(points, ahead)}"
        )
    ideal = [one for one in points if one.ahead("MC2", OURS)]
    yield f"- The ideal MC2 is ahead of all of ours at {len(ideal)} of {len(points)} points."


def _list(points: Sequence[Point], ahead: Sequence[Point]) -> str:
    behind = [f"{p.machine} {p.model} TP {p.tp} {p.sequence}" for p in points if p not in ahead]
    return f"; behind the first two at {', '.join(behind)}." if behind and len(behind) <= 8 else "."


def main(argv: Sequence[str]) -> int:
    """Simulate and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machines", nargs="+", default=_MACHINES)
    parser.add_argument("--models", nargs="+", default=_MODELS)
    parser.add_argument("--tp", nargs="+", type=int, default=_SIZES)
    parser.add_argument("--sequence-lengths", nargs="+", type=int, default=_SEQUENCES)
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="put the table into its section of FILE"
    )
    given = parser.parse_args(argv)
    wanted = product(given.machines, given.models, given.tp, given.sequence_lengths)
    with ProcessPoolExecutor() as pool:
        text = report(list(pool.map(_point, wanted)))
    print(text)
    if given.markdown:
        replace_section(given.markdown, "layers", text)
    return 0
