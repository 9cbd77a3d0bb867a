"""``commfuse-npu simulate``: what it prints and writes, its page, and the picture in the README."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from commfuse_npu.tools import cli
from commfuse_npu.tools.report.charts import Row
from commfuse_npu.tools.simulate.lanes import lanes
from commfuse_npu.tools.simulate.step import Step
from commfuse_npu.tools.simulate.variants import Variant
from scripts.evidence.pictures import forms, main, step
from tests.tools.report.pages import read

QUICK = ["simulate", "--typical", "--variants", "megatron,commfuse-c2*", "--micro-batches", "1"]


def steps(tmp_path: Path, *words: str) -> dict[str, float]:
    """Seconds by variant."""
    out = tmp_path / "out.json"
    assert cli.main([*QUICK, "--sequence-lengths", "4096", "--json", str(out), *words]) == 0
    (point,) = json.loads(out.read_text())["points"]
    return {one["variant"]: one["step"]["typical"] for one in point["variants"]}


def test_options_of_the_machine_cost_what_they_say(tmp_path: Path) -> None:
    cheap, dear = (steps(tmp_path, "--post-us", us) for us in ("15", "60"))
    assert cheap["megatron"] == dear["megatron"]
    assert cheap["commfuse-c2-l7"] < dear["commfuse-c2-l7"]
    fast, slow = (steps(tmp_path, "--launch-us", us) for us in ("15", "200"))
    # Both are the host's then: of a layer 66 launches and 40 events, and more of ours.
    assert fast["megatron"] < slow["megatron"] < slow["commfuse-c2-l7"]
    # The sums of collectives, not of programs, which are in an order anyhow.
    given = ("--variants", "plain-mesh,mc2", "--tp", "4")
    any_order, ordered = (steps(tmp_path, *given, *more) for more in ((), ("--deterministic",)))
    for name in ("plain-mesh", "mc2"):
        assert ordered[name] > any_order[name]


def test_tables_and_json(capsys, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    lengths = ["--sequence-lengths", "2048", "4096"]
    options = ["simulate", "--variants", "commfuse-c2-l7", "--micro-batches", "1"]
    assert cli.main([*options, *lengths, "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "Simulated, not measured." in text
    assert text.count("## sequence") == 2
    assert "commfuse-c2-l7" in text
    content = json.loads(out.read_text())
    assert content["simulated"] is True
    assert content["hardware"]["figures"]["inside.rate"]["source"]
    first = content["points"][0]
    assert [variant["variant"] for variant in first["variants"]] == ["plain-mesh", "commfuse-c2-l7"]
    for variant in first["variants"]:
        for name in ("step", "mfu", "tokens", "exposed"):
            figure = variant[name]
            assert 0 < figure["low"] <= figure["typical"] <= figure["high"]
    plain, fused = first["variants"]
    assert plain["shorter"]["high"] == 0.0 < fused["memory_bytes"]
    ratio = fused["step"]["typical"] / plain["step"]["typical"]
    assert fused["shorter"]["typical"] == pytest.approx(1 - ratio)


def test_numbers_of_npus(capsys) -> None:
    options = ["--model", "llama3_70b", "--hardware", "ascend_910b_roce", "--npus", "32", "256"]
    assert cli.main([*QUICK, *options, "--sequence-lengths", "4096"]) == 0
    text = capsys.readouterr().out
    assert "DP 1, 8" in text
    assert "sequence 4096, 256 NPUs" in text


# ------------------------------------------------------------------- pages

SMALL = ["simulate", "--tp", "2", "--dp", "1", "--micro-batches", "1", "--sequence-lengths"]
SOME = ["--variants", "megatron,coc-2,mc2,kernel-ideal,commfuse-c[12]-l1"]
PLAN = ["plan", "--model", "llama3_8b", "--npus", "8", "--tp", "8", "--sequence-length", "2048"]
LAYER = "One layer of one micro-batch, forward then backward"
GAIN = "% less time per layer than in Megatron's order, with --commfuse-fb-overlap"
MEMORY = "Memory of the fullest NPU"


def _printed(text: str) -> list[list[list[str]]]:
    """The Markdown tables as cells, without marks."""
    tables: list[list[list[str]]] = [[]]
    for line in text.replace("**", "").splitlines():
        if not line.startswith("|"):
            tables.append([])
        elif not line.startswith("|---"):
            tables[-1].append([cell.strip() for cell in line.strip().strip("|").split(" | ")])
    return [table for table in tables if table]


@pytest.mark.parametrize(
    ("words", "headings"),
    [
        (
            [*SMALL, "2048", *SOME],
            ["Time of a step, with the range over the machine's uncertainty", GAIN, LAYER, MEMORY],
        ),
        (
            [*SMALL, "2048", "4096", *SOME, "--typical"],
            ["Time of a step, Megatron's order = 1, lower is better", GAIN, LAYER, MEMORY],
        ),
        (PLAN, ["Launch", "Time of a step, the best layouts", GAIN, LAYER, MEMORY]),
    ],
)
def test_the_page_has_what_is_printed(
    words: list[str], headings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vl_convert")
    path = tmp_path / "page.html"
    assert cli.main([*words, "--html", str(path)]) == 0
    printed = capsys.readouterr().out
    page = read(path)
    assert [rows for _, rows in page.tables[: len(_printed(printed))]] == _printed(printed)
    assert [said for _, said in page.headings][2:-1] == headings
    (verdict,) = [
        line for line in printed.splitlines() if line.startswith(("Recommended: ", "Best of ours"))
    ]
    assert verdict.replace("**", "").replace("`", "") in page.text
    (of_layer,) = (label for label in page.labels if "waiting" in label)
    said = re.findall(r"([\w-]+): [\d.]+ ms, waiting", of_layer)
    assert said[:2] == ["plain-mesh", "megatron"]
    assert len(said) == 3


def test_a_few_rows_unless_all_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "2048", "--typical"]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    rows = _printed(printed)[0][1:]
    # Plain, Megatron's order, the best rival, the best of ours and of ours with Megatron's bits.
    assert [row[0].split("-")[0] for row in rows[:3]] == ["plain", "megatron", "mc2"]
    assert len(rows) == 6
    assert rows[-1][0] == "kernel-ideal (ideal bound)"
    assert "more variants were simulated; --all shows them." in printed
    assert cli.main([*words, "--all"]) == 0
    assert len(_printed(capsys.readouterr().out)[0][1:]) > 10


# ------------------------------------------------------------------- a layer as lanes

PICTURE = (Path(__file__).resolve().parents[3] / "docs" / "forms.svg").read_text("utf-8")


def filled(step: Step, title: str, variant: Variant) -> Row:
    """Its lanes, of which work and waiting fill that of the compute engine."""
    parts = step.parts(variant)
    row = lanes(title, parts)
    end, at = 1e3 * sum(one.seconds for _, one in parts), 0.0
    for bit in sorted((b for b in row.bits if b.lane == "compute"), key=lambda bit: bit.start):
        assert bit.start == pytest.approx(at, abs=1e-5), bit
        at = bit.end
    assert at == pytest.approx(end)
    waited = sum(bit.end - bit.start for bit in row.bits if bit.kind == "waiting")
    assert row.said == f"{title}: {end:.1f} ms, waiting {waited:.1f} ms"
    assert {bit.kind for bit in row.bits if bit.lane == "links"} == {"transfer"}
    time = step.layer_time(variant)
    # A pair by itself, which has no neighbours, is a little longer.
    assert end == pytest.approx(1e3 * time.seconds, rel=0.01)
    # One rank of eight, of which the mean waits this long.
    assert waited == pytest.approx(1e3 * time.waiting, abs=10 * time.seconds)
    return row


def test_the_picture_says_what_is_simulated(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    at = step()
    rows = [filled(at, *item) for item in forms().items()]
    assert all(f">{row.said}</text>" in PICTURE for row in rows)
    # Whatever goes to several peers at once is one bit.
    sent = {bit.name for bit in rows[2].bits if bit.lane == "links"}
    assert sum(re.match(r"forward: fc1 chunk 0$", name) is not None for name in sent) == 1
    drawn = []
    for _ in range(2):
        assert main(["forms", "--folder", str(tmp_path)]) == 0
        # A process counts the clips of its pictures.
        drawn.append(re.sub(r"clip\d+", "clip", (tmp_path / "forms.svg").read_text("utf-8")))
    assert drawn[0] == drawn[1]
