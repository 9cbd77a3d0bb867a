"""The page of figures: other pages quote it, and its figures can be reproduced."""

import json
import re
from itertools import product
from pathlib import Path

import pytest

from commfuse_npu.proof.cases import cases
from commfuse_npu.tools.config_file import find_config
from commfuse_npu.tools.hardware.description import Hardware
from commfuse_npu.tools.hardware.machine import min_outputs_to_hide
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate.timed import ratio
from commfuse_npu.tools.simulate.training import Layout, training
from scripts.evidence.layers import layer, shares

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGE = (DOCS / "measured.md").read_text("utf-8")
README = (ROOT / "README.md").read_text("utf-8")
SIMULATE = (DOCS / "simulate.md").read_text("utf-8")
MODELS = {"Llama 2 7B": "llama2_7b", "Llama 3 8B": "llama3_8b"}
MACHINES = {"A2 server": "ascend_910b_server", "A3 supernode": "ascend_910c_supernode"}


_COMMAND = re.compile(r"`(commfuse-npu |python -m scripts\.|bash scripts/|pytest tests/)")


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+(?:[.,]\d+)*(?:e-\d)?", text))


def figures() -> list[list[str]]:
    """The cells of each row in tables that have commands."""
    lines = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line] for line in lines if len(line) == 5]
    return [row for row in rows if row[0] != "figures"]


def quoting(cell: str) -> list[Path]:
    """The files that a cell links to or names."""
    linked = [DOCS / name for name in re.findall(r"\]\(([\w.]+)\)", cell)]
    return linked + [ROOT / name for name in re.findall(r"`([\w./]+)`", cell)]


def simulated_rows() -> list[list[str]]:
    rows = re.findall(r"^\| (Llama .*) \|$", SIMULATE, re.M)
    return [row.replace("**", "").split(" | ") for row in rows]


def test_quoted_figures_are_the_measured_ones() -> None:
    assert len(figures()) > 25
    for figure, meaning, _, command, where in figures():
        assert command == "the same" or _COMMAND.match(command), command
        for file in quoting(where):
            lost = numbers(figure) - numbers(file.read_text("utf-8"))
            assert not lost, f"{file.name} does not quote {lost}: {meaning}"


def test_nothing_of_the_first_screen_is_left_out() -> None:
    simulated = README[README.index("**Simulated**") : README.index("**Measured**")]
    prose = re.sub(r"^\|.*$", "", simulated, flags=re.M)
    counted = re.findall(r"[\d.]+ %|(?<=at )\d+|\d+ points|\d+ of \d+", prose)
    listed = " ".join(row[0] for row in figures())
    assert len(counted) >= 5
    assert numbers(" ".join(counted)) <= numbers(listed)


def test_the_ratio_of_communication_to_computation() -> None:
    hardware = Hardware.load(find_config(MACHINES["A2 server"], "hardware"))
    setup = training(ModelConfig.load(find_config("llama3_8b")), Layout(8, 1, 1, 1), 8192)
    assert ratio(setup, hardware).text("{:.2f}".format) == "0.55 (0.29 .. 0.99)"
    assert "0.55, 0.29 to 0.99" in PAGE


@pytest.mark.parametrize("row", simulated_rows(), ids=lambda row: row[0])
def test_the_table_is_what_is_simulated(row: list[str]) -> None:
    model, size, name = row[0].split(", ")
    hardware = Hardware.load(find_config(MACHINES[name], "hardware"))
    setup = layer(MODELS[model], int(size.removeprefix("TP ")), 8192)
    corners = shares(hardware, setup, tuned=False)

    def shorter(form: str) -> str:
        """How much shorter it is: typical, and over the ends of the ranges."""
        if form not in corners[0]:
            return "-"
        saved = [100 * (1 - of[form]) for of in corners]
        return f"{saved[0]:.1f} % ({min(saved):.0f} .. {max(saved):.0f})"

    columns = "commfuse-fb", "commfuse", "coc", "coc-fused", "mc2"
    assert row[1:] == list(map(shorter, columns))


def test_the_points_are_counted_as_in_the_table() -> None:
    table = (DOCS / "layers_tables.md").read_text("utf-8")
    rows = re.findall(r"^\| \*([\w-]+)\* \| (.+) \|$", table, re.M)
    # Columns: CoC in slices, its kernel, MC2, Megatron's order, all: typical, ends, ordered.
    ahead = {form: [cell.split("; ") for cell in cells.split(" | ")] for form, cells in rows}
    sliced, kernel, mc2, megatron, _ = (cell[0] for cell in ahead["commfuse-fb"])
    sentence = README[README.index("Of the [72 points") : README.index("[How these figures")]
    assert re.findall(r"at\s(\d+)", sentence) == [sliced, megatron, mc2, kernel]
    quoted = re.findall(r"on (\d+)\sof", sentence), re.findall(r"recomputation (.+)\)", sentence)
    steps = re.findall(r"^\| 118 us, 8 micro-batches[^|]* \| (.+) \|$", table, re.M)
    kept, recomputed = (
        [cell.split("; ")[0] for cell in row.split(" | ")][::-1][:3] for row in steps
    )
    assert quoted == (kept, ["{}, {} and {}".format(*recomputed)])
    behind = [str(points - int(ahead["commfuse"][at][0])) for points, at in ((24, 1), (72, 2))]
    assert re.findall(r"at all (\d+) points, MC2 at (\d+) of 72", README) == [tuple(behind)]


def test_what_is_quoted_of_a_ratio_of_one_is_what_the_runs_wrote() -> None:
    quoted = []
    for work in ("mlp", "layers"):
        record = json.loads((DOCS / "measured" / f"{work}_sleep.json").read_text("utf-8"))
        rows = [row for row in record["results"] if (row["work"], row["ratio"]) == (work, 1.0)]
        for names, ranks in product((("auto", "ours"), ("slices", "ring")), (4, 8)):
            timed = [row for row in rows if row["ranks"] == ranks]
            of = [row for row in timed if row["variant"].startswith(names)]
            fastest = min(of, key=lambda row: row["median_ms"])
            quoted.append(f"{fastest['speedup']:.2f}")
    sentence = README[README.index("An MLP\nis 1.64") : README.index("[All comparisons]")]
    assert re.findall(r"\d\.\d\d", sentence) == quoted


def test_what_is_counted_is_as_many() -> None:
    sets = sum(len(list(cases(size))) for size in range(2, 17))
    assert f"proves {sets:,} sets of programs" in (DOCS / "trust.md").read_text("utf-8")
    for path in sorted((ROOT / "configs" / "hardware").glob("ascend*.yaml")):
        assumed, total = map(int, re.findall(r"\d+", Hardware.load(path).assumed))
        row = rf"{total - assumed} of {total}.* \| beside each in `configs/hardware/{path.name}`"
        assert re.search(row, PAGE), path.name
    server = Hardware.load(find_config(MACHINES["A2 server"], "hardware"))
    outputs = f"from {min_outputs_to_hide(server.machine(), 8):,} outputs on"
    assert outputs in (DOCS / "options.md").read_text("utf-8")
    assumed, total = map(int, re.findall(r"\d+", server.assumed))
    sentence = f"of {total} on an A2 server {assumed} are assumed"
    assert sentence in (DOCS / "simulate.md").read_text("utf-8").replace("\n", " ")
