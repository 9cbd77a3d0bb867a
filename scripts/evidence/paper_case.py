"""The paper's own case: its figures beside what the simulator makes of its set-up.

    python -m scripts.evidence paper_case [--markdown FILE] [--tables FILE] [--plot FILE]

CommFuse (arXiv 2604.24013) times single layers, forward, on 4 ranks with d = 4096, where only the
product of the row-parallel linear is scattered.  The set-up and the figures are second hand, from
public digests.  Simulated on the machines as they are described, and on one whose unknown rates
come from the paper's plain column alone: then all other columns are predictions.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from commfuse_npu.plan.program import Compute
from commfuse_npu.plan.rules import produce_scatter
from commfuse_npu.tools.config_file import find_config
from commfuse_npu.tools.report.drawing import Chart, draw_charts
from commfuse_npu.tools.report.palette import color
from commfuse_npu.tools.simulate import linear, llama
from commfuse_npu.tools.simulate.group import Group
from commfuse_npu.tools.simulate.hardware import Hardware
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.machine import ITEM_BYTES, Machine
from commfuse_npu.tools.simulate.rank import Rank, Width
from commfuse_npu.tools.simulate.sweep import CORNERS, Range
from commfuse_npu.tools.simulate.variants import COMPUTE_ONLY, Variant, tuned
from scripts.evidence.markdown_section import replace_section

__all__ = ["ATTENTION", "MLP", "READING", "READINGS", "Case", "Reading", "derived", "error", "main",
           "others", "predicted", "report", "with_attention"]  # fmt: skip

_RANKS, _HIDDEN = 4, 4096
_CHUNKS = (1, 2, 3, 4, 6, 8)
_SLICES = (2, 4, 8)
_LENGTHS = (1024, 2048, 4096, 8192, 16384)
_DESCRIBED = ("ascend_910b_server", "ascend_910c_supernode")
_DERIVED_FROM = _DESCRIBED[0]
_REMOVED, _SHORTER, _SLICING_SHORTER = (0.997, 0.998), (0.350, 0.402), (0.295, 0.350)
"""What the paper reports over 1K to 16K tokens: the least and the most."""

Build = Callable[[Rank], None]
Times = Mapping[str, float]
"""Milliseconds, by column."""


@dataclass(frozen=True)
class Case:
    """A layer, and what the paper reports for it in milliseconds.

    Attributes:
        paper: by column of :func:`predicted`.
        given: the columns that the derived machine is made from.
    """

    name: str
    batch: int
    sequence: int
    paper: Times
    given: tuple[str, ...]

    @property
    def rows(self) -> int:
        return self.batch * self.sequence


MLP = Case(
    "MLP",
    32,
    4096,
    {
        "plain, communication": 43.8,
        "plain": 122.3,
        "slicing": 83.9,
        "row-parallel": 77.1,
        "row-parallel, communication": 0.1,
    },
    ("plain, communication", "plain"),
)
ATTENTION = (
    Case(
        "attention",
        16,
        4096,
        {"plain": 270.1, "slicing": 246.1, "row-parallel": 230.9, "query split": 215.8},
        ("plain",),
    ),
    Case(
        "attention",
        4,
        8192,
        {"plain": 195.6, "slicing": 279.7, "query split": 145.1},
        ("plain",),
    ),
)


class Reading(NamedTuple):
    """How the set-up is read where the digests do not say.

    Attributes:
        feed_forward: inner width of the MLP, over all ranks.
        ups: GEMMs from the hidden to the inner width: none, one, or two with a gate.
        ring: whether a plain reduce-scatter goes around a ring, or straight to every peer.
    """

    name: str
    feed_forward: int
    ups: int
    ring: bool

    @property
    def flops(self) -> float:
        """Of one rank, for each row of the MLP."""
        return 2.0 * (self.ups + 1) * _HIDDEN * self.feed_forward / _RANKS

    def mlp(self, rows: int) -> Build:
        """The MLP, whose input is there."""
        inner = self.feed_forward // _RANKS

        def build(rank: Rank) -> None:
            if self.ups:
                rank.compute("fc1", rank.machine.gemm(rows, _HIDDEN, self.ups * inner))
                traffic = rows * (self.ups + 1) * inner * ITEM_BYTES
                rank.compute("activation", rank.machine.memory(traffic))
            linear.row(rank, "fc2", rows // _RANKS, inner, _HIDDEN)

        return build

    def build(self, case: Case) -> Build:
        return self.mlp(case.rows) if case is MLP else _attention(case)


_WIDTHS = (
    ("one GEMM, 4d to d", 4 * _HIDDEN, 0),
    ("d to 4d to d", 4 * _HIDDEN, 1),
    ("gated, inner width 14336", 14336, 2),
    ("gated, inner width 4d", 4 * _HIDDEN, 2),
)
READINGS = tuple(Reading(*width, ring) for width in _WIDTHS for ring in (True, False))
READING = READINGS[2]
"""The one that is shown in full."""


def _attention(case: Case) -> Build:
    """qkv, causal attention with as many keys as queries, and the output projection."""
    shape = LayerShape(
        sequence=case.sequence,
        attended=case.sequence,
        batch=case.batch,
        hidden=_HIDDEN,
        feed_forward=4 * _HIDDEN,
        qkv=3 * _HIDDEN,
        vocabulary=_RANKS,
        ranks=_RANKS,
    )

    def build(rank: Rank) -> None:
        attend = shape.attention(rank.machine)
        rank.compute("qkv", rank.machine.gemm(shape.rows, _HIDDEN, shape.qkv // _RANKS))
        if not rank.variant.attention:
            rank.compute("attention", attend(slice(0, shape.rows)))
            llama.output_projection(rank, shape)
            return

        def make(one: Compute, _: Width) -> float:
            assert one.run is not None
            rows = one.run.stop - one.run.start
            return attend(one.run) + rank.machine.gemm(rows, _HIDDEN // _RANKS, _HIDDEN)

        name = "attention and proj"
        program = produce_scatter(rank.place(name, causal=True), shape.block, _HIDDEN)
        rank.run(name, program, {"out": _HIDDEN}, {"make": make})

    return build


# ---------------------------------------------------------------------------- predictions


def predicted(machine: Machine, build: Build, *, ring: bool, split: bool = False) -> Times:
    """Every column, in milliseconds.

    Communication is for how long the compute engine stands still, beyond what it does without any.

    Args:
        split: whether there are queries to split.
    """
    group = Group(machine, _RANKS)
    plain = Variant("plain", "plain", ring=ring)
    slices = [Variant(f"coc-{k}", "sliced", ring=ring, slices=k) for k in _SLICES]
    ours = tuned(group.direct, group.direct.lanes_for(_RANKS), _CHUNKS)
    blocking, row = group.play(plain, build), group.play(ours, build)
    sliced = min((group.play(one, build) for one in slices), key=lambda one: one.seconds)
    ideal = group.play(COMPUTE_ONLY, build)
    found = {
        "compute": ideal.seconds,
        "plain, communication": blocking.waiting - ideal.waiting,
        "plain": blocking.seconds,
        "slicing": sliced.seconds,
        "slicing, communication": sliced.waiting - ideal.waiting,
        "row-parallel": row.seconds,
        "row-parallel, communication": row.waiting - ideal.waiting,
    }
    if split:
        found["query split"] = group.play(replace(ours, attention=True), build).seconds
    return {column: 1e3 * seconds for column, seconds in found.items()}


def error(time: float, paper: float, bound: float) -> float:
    """Share of the paper's figure, or of the computation alone where the figure is below it."""
    return time / max(paper, bound) - 1


def derived(reading: Reading, base: Machine) -> Machine:
    """With the compute rate and the link rate of the MLP's plain column; the rest of ``base``."""
    build = reading.build(MLP)
    communication = MLP.paper["plain, communication"]
    compute = MLP.paper["plain"] - communication
    plain = Variant("plain", "plain", ring=reading.ring)

    def computing(machine: Machine) -> float:
        return 1e3 * Group(machine, _RANKS).play(COMPUTE_ONLY, build).seconds

    def communicating(machine: Machine) -> float:
        return 1e3 * Group(machine, _RANKS).play(plain, build).seconds - computing(machine)

    def faster(machine: Machine, times: float) -> Machine:
        return replace(machine, cube_flops=machine.cube_flops * times)

    def faster_links(machine: Machine, times: float) -> Machine:
        return replace(machine, inside=replace(machine.inside, rate=machine.inside.rate * times))

    return _scaled(
        _scaled(base, computing, compute, faster), communicating, communication, faster_links
    )


def with_attention(reading: Reading, machine: Machine, case: Case) -> Machine:
    """With the efficiency of attention with which a case's plain column is the paper's."""
    build, plain = reading.build(case), Variant("plain", "plain", ring=reading.ring)

    def time(given: Machine) -> float:
        return 1e3 * Group(given, _RANKS).play(plain, build).seconds

    def faster(given: Machine, times: float) -> Machine:
        return replace(given, attention_efficiency=given.attention_efficiency * times)

    return _scaled(machine, time, case.paper["plain"], faster)


def _scaled(
    machine: Machine,
    time: Callable[[Machine], float],
    wanted: float,
    faster: Callable[[Machine, float], Machine],
) -> Machine:
    """Simulated, compared and scaled until the time is the one that is wanted."""
    for _ in range(200):
        ratio = time(machine) / wanted
        if abs(ratio - 1) < 1e-12:
            return machine
        machine = faster(machine, ratio)
    raise ValueError(f"no rate gives {wanted} ms; the last one is off by {ratio - 1:.1e}")


# ---------------------------------------------------------------------------- the report


def _described(name: str) -> list[Machine]:
    """At typical figures, and at the corners of the ranges."""
    hardware = Hardware.load(find_config(name, "hardware"))
    return [hardware.machine(compute, links) for compute, links in CORNERS]


def _of_case(machine: Machine, case: Case, reading: Reading) -> Times:
    build = reading.build(case)
    return predicted(machine, build, ring=reading.ring, split=case is not MLP)


def over_lengths(machine: Machine, reading: Reading) -> dict[int, Times]:
    """The MLP's columns, by tokens of a sequence."""
    return {
        length: predicted(machine, reading.mlp(MLP.batch * length), ring=reading.ring)
        for length in _LENGTHS
    }


def report(machine: Machine, lengths: Mapping[int, Times]) -> str:
    """Markdown: all columns beside the paper's, and the lengths."""
    return "\n".join(
        [
            "Milliseconds on the derived machine. \\*: the paper's figure is below the computation "
            "alone, and the error is against that.",
            "",
            *_on_the_derived(machine),
            "",
            f"MLP, batch {MLP.batch}, on the derived machine, over tokens of a sequence:",
            "",
            *_lengths(lengths),
        ]
    )


def others() -> str:
    """Markdown: the machines as they are described, and the other readings."""
    return "\n".join(
        [
            "Milliseconds on the machines as they are described (range of the description), with "
            "the error of the typical figure:",
            "",
            *_on_the_described(),
            "",
            f"MLP, batch {MLP.batch}, {MLP.sequence} tokens, read in other ways, each on a machine "
            "derived for it:",
            "",
            *_readings(),
        ]
    )


def _on_the_derived(machine: Machine) -> Iterator[str]:
    yield "| layer, (b, s, d) | column | paper | simulated | error |"
    yield "|---|---|---:|---:|---:|"
    for case in (MLP, *ATTENTION):
        here = machine if case is MLP else with_attention(READING, machine, case)
        times = _of_case(here, case, READING)
        for column in _columns(case):
            yield f"| {_beginning(case, column)} | {_cell(case, column, times)} |"


def _on_the_described() -> Iterator[str]:
    yield f"| layer, (b, s, d) | column | paper | {' | error | '.join(_DESCRIBED)} | error |"
    yield "|---|---|---:" + "|---:|---:" * len(_DESCRIBED) + "|"
    machines = [_described(name) for name in _DESCRIBED]
    for case in (MLP, *ATTENTION):
        times = [[_of_case(one, case, READING) for one in corners] for corners in machines]
        for column in _columns(case):
            cells = " | ".join(_ranged(case, column, one) for one in times)
            yield f"| {_beginning(case, column)} | {cells} |"


def _columns(case: Case) -> list[str]:
    return ["compute", *case.paper]


def _beginning(case: Case, column: str) -> str:
    figure = f"{_of_paper(case, column):.1f}" if _of_paper(case, column) else ""
    return f"{case.name}, ({case.batch}, {case.sequence}, {_HIDDEN}) | {column} | {figure}"


def _of_paper(case: Case, column: str) -> float:
    """The paper's figure; 0 if there is none."""
    if column == "compute" and "plain, communication" in case.paper:
        return case.paper["plain"] - case.paper["plain, communication"]
    return case.paper.get(column, 0.0)


def _cell(case: Case, column: str, times: Times) -> str:
    given = column in case.given or (column == "compute" and case is MLP)
    return f"{times[column]:.1f} | {'given' if given else _error(case, column, times)}"


def _ranged(case: Case, column: str, corners: Sequence[Times]) -> str:
    low, typical, high = Range.of([one[column] for one in corners])
    return f"{typical:.1f} ({low:.1f} .. {high:.1f}) | {_error(case, column, corners[0])}"


def _error(case: Case, column: str, times: Times) -> str:
    paper = _of_paper(case, column)
    if not paper:
        return ""
    if column == "row-parallel, communication":
        return f"{times[column] - paper:+.1f} ms"
    bound = 0.0 if column in ("compute", "plain, communication") else times["compute"]
    mark = "\\*" if paper < bound else ""
    return f"{100 * error(times[column], paper, bound):+.1f} %{mark}"


def _removed(times: Times) -> float:
    return 1 - times["row-parallel, communication"] / times["plain, communication"]


def _shorter(times: Times, column: str) -> float:
    return 1 - times[column] / times["plain"]


def _lengths(lengths: Mapping[int, Times]) -> Iterator[str]:
    names = " | ".join(f"{length // 1024}K" for length in lengths)
    yield f"| | paper, 1K to 16K | {names} |"
    yield "|---|---:" + "|---:" * len(lengths) + "|"
    rows: Sequence[tuple[str, tuple[float, float], Callable[[Times], float]]] = (
        ("communication removed, row-parallel, %", _REMOVED, _removed),
        ("shorter, row-parallel, %", _SHORTER, lambda one: _shorter(one, "row-parallel")),
        ("shorter, slicing, %", _SLICING_SHORTER, lambda one: _shorter(one, "slicing")),
    )
    for name, (low, high), of in rows:
        cells = " | ".join(f"{100 * of(times):.1f}" for times in lengths.values())
        yield f"| {name} | {100 * low:.1f} .. {100 * high:.1f} | {cells} |"


def _readings() -> Iterator[str]:
    yield (
        "| GEMMs of the MLP | plain reduce-scatter | TFLOP/s | GB/s of a link | slicing | error | "
        "row-parallel | error | its communication |"
    )
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|"
    base = _described(_DERIVED_FROM)[0]
    for reading in READINGS:
        machine = derived(reading, base)
        times = _of_case(machine, MLP, reading)
        rate = reading.flops * MLP.rows / times["compute"] / 1e9
        yield (
            f"| {reading.name} | {'ring' if reading.ring else 'straight'} | {rate:.0f} | "
            f"{machine.inside.rate / 1e9:.1f} | {_cell(MLP, 'slicing', times)} | "
            f"{_cell(MLP, 'row-parallel', times)} | {times['row-parallel, communication']:.1f} |"
        )


# ---------------------------------------------------------------------------- the picture


_FORMS = (
    ("plain", "plain", "grey"),
    ("slicing", "slicing", "green"),
    ("row-parallel", "CommFuse, row-parallel", "blue"),
)
"""Column, name, color."""
_SIZE = {"width": 400, "height": 300}


def draw(lengths: Mapping[int, Times], path: Path) -> None:
    """Write the picture in the paper's form: communication that is left, and the whole, in ms.

    Raises:
        OSError: the file cannot be written.
        ValueError: vl-convert-python is not installed.
    """
    compute = MLP.paper["plain"] - MLP.paper["plain, communication"]
    # The digests give no communication of slicing: what is above the computation.
    paper = {
        column: MLP.paper.get(f"{column}, communication", MLP.paper[column] - compute)
        for column, _, _ in _FORMS
    }
    left, left_paper = _rows(lengths, ", communication", paper)
    right, right_paper = _rows(lengths, "", MLP.paper)
    names = [name for _, name, _ in _FORMS]
    x = {"field": "length", "type": "ordinal", "sort": None, "axis": {"labelAngle": 0},
         "title": f"tokens of a sequence (batch {MLP.batch})"}  # fmt: skip
    y: Chart = {"field": "ms", "type": "quantitative"}
    hue = {"field": "form", "type": "nominal",
           "scale": {"domain": names, "range": [color(hue) for _, _, hue in _FORMS]}}  # fmt: skip
    shape = {"field": "form", "type": "nominal", "scale": {"domain": names}}
    hollow = {"type": "point", "fill": color("paper"), "size": 90, "opacity": 1}
    log = y | {
        "scale": {"type": "log", "domain": [0.05, 300], "nice": False},
        "axis": {"values": [0.1, 1, 10, 100]},
    }
    beside = {"xOffset": {"field": "form", "sort": names}}
    alone = [{"length": _k(at), "ms": times["compute"]} for at, times in lengths.items()]
    base = {"x": x, "color": hue, "shape": shape}
    line = {"type": "tick", "color": color("red"), "thickness": 2, "size": 70, "opacity": 1}
    charts: list[Chart] = [
        _SIZE | {
            "title": {"text": "communication that is left",
                      "subtitle": "hollow: the paper, second hand"},
            "data": {"values": left},
            "layer": [
                {"mark": "line", "encoding": {"x": x, "y": log, "color": hue}},
                {"mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
                 "encoding": base | {"y": log}},
                {"data": {"values": left_paper}, "mark": hollow, "encoding": base | {"y": log}},
            ],
        },
        _SIZE | {
            "title": {"text": "end to end", "subtitle": "red: computation alone"},
            "data": {"values": right},
            "layer": [
                {"mark": "bar", "encoding": {"x": x, "y": y, "color": hue} | beside},
                {"data": {"values": alone}, "mark": line, "encoding": {"x": x, "y": y}},
                {"data": {"values": right_paper}, "mark": hollow | {"stroke": color("ink")},
                 "encoding": {"x": x, "y": y, "shape": shape} | beside},
            ],
        },
    ]  # fmt: skip
    title = (
        f"MLP, forward, TP {_RANKS}, d = {_HIDDEN}: simulated on the machine derived from the "
        "paper's plain column"
    )
    draw_charts(charts, title, path, columns=2)


def _rows(
    lengths: Mapping[int, Times], what: str, paper: Mapping[str, float]
) -> tuple[list[Chart], list[Chart]]:
    """Simulated, of each length and form; and the paper's, of its length."""
    simulated: list[Chart] = [
        {"length": _k(length), "form": name, "ms": times[f"{column}{what}"]}
        for length, times in lengths.items()
        for column, name, _ in _FORMS
    ]
    theirs: list[Chart] = [
        {"length": _k(MLP.sequence), "form": name, "ms": paper[column]}
        for column, name, _ in _FORMS
    ]
    return simulated, theirs


def _k(length: int) -> str:
    return f"{length // 1024}K"


def main(argv: Sequence[str]) -> int:
    """Simulate and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="put the comparison into its section of FILE"
    )
    parser.add_argument(
        "--tables",
        type=Path,
        metavar="FILE",
        help="and the other machines and readings into theirs",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it (.svg, .png)")
    given = parser.parse_args(argv)
    machine = derived(READING, _described(_DERIVED_FROM)[0])
    lengths = over_lengths(machine, READING)
    for text, section, file in (
        (report(machine, lengths), "paper case", given.markdown),
        (others(), "other machines", given.tables),
    ):
        print(text, end="\n\n")
        if file:
            replace_section(file, section, text)
    if given.plot:
        draw(lengths, given.plot)
    return 0
