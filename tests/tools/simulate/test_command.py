"""``commfuse-npu simulate``: what it prints and writes, its page, and the picture in the README."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from commfuse_npu.tools import cli
from commfuse_npu.tools.simulate.lanes import lanes
from scripts.evidence.layers import BOUNDS, OURS, RIVALS, point
from scripts.evidence.pictures import forms, main, step
from tests.tools.answers import answer
from tests.tools.report.pages import read

QUICK = "--typical --variants megatron,commfuse-c2* --micro-batches 1 --sequence-lengths 4096"


def test_options_of_the_machine_cost_what_they_say(tmp_path: Path) -> None:
    def steps(words: str) -> dict[str, float]:
        (point,) = answer(tmp_path, *f"simulate {QUICK} {words}".split())["points"]
        return {variant["variant"]: variant["step"]["typical"] for variant in point["variants"]}

    cheap, dear = (steps(f"--post-us {us}") for us in (15, 60))
    assert cheap["megatron"] == dear["megatron"]
    assert cheap["commfuse-c2-l7"] < dear["commfuse-c2-l7"]
    fast, slow = (steps(f"--launch-us {us}") for us in (15, 200))
    # The host limits both: a layer has 66 launches and 40 events, CommFuse's has more.
    assert fast["megatron"] < slow["megatron"] < slow["commfuse-c2-l7"]
    # Only sums of collectives: those of programs have a fixed order anyway.
    base = "--variants plain-mesh,mc2 --tp 4"
    any_order, ordered = (steps(f"{base} {more}") for more in ("", "--deterministic"))
    for name in ("plain-mesh", "mc2"):
        assert ordered[name] > any_order[name]


def test_tables_and_json(capsys, tmp_path: Path) -> None:
    words = "simulate --variants commfuse-c2-l7 --micro-batches 1 --sequence-lengths 2048 4096"
    content = answer(tmp_path, *words.split())
    text = capsys.readouterr().out
    assert "Simulated, not measured." in text
    assert text.count("## sequence") == 2
    assert content["simulated"] is True
    assert content["hardware"]["figures"]["inside.rate"]["source"]
    plain, fused = content["points"][0]["variants"]
    for variant, name in product((plain, fused), ("step", "mfu", "tokens", "exposed")):
        figure = variant[name]
        assert 0 < figure["low"] <= figure["typical"] <= figure["high"]
    assert plain["shorter"]["high"] == 0.0 < fused["memory_bytes"]
    ratio = fused["step"]["typical"] / plain["step"]["typical"]
    assert fused["shorter"]["typical"] == pytest.approx(1 - ratio)
    words = f"simulate {QUICK} --hardware ascend_910b_roce --npus 32 256"
    npus = answer(tmp_path, *words.split())["points"]
    assert [point["npus"] for point in npus] == [32, 256]
    assert "DP 4, 32" in capsys.readouterr().out


# ------------------------------------------------------------------- pages

SMALL = "simulate --tp 2 --dp 1 --micro-batches 1 --sequence-lengths 2048"
SOME = "--variants megatron,coc-2,mc2,kernel-ideal,commfuse-c[12]-l1"
PLAN = "plan --model llama3_8b --npus 8 --tp 8 --sequence-length 2048"
TIME = "Time of a step, "


def _printed(text: str) -> list[list[list[str]]]:
    """The cells of the Markdown tables, without markup."""
    tables = [
        [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table.splitlines()]
        for table in re.findall(r"(?:^\|.*\n)+", text.replace("**", ""), re.M)
    ]
    return [[row for row in table if not row[0].startswith("--")] for table in tables]


@pytest.mark.parametrize(
    ("words", "headings"),
    [
        (f"{SMALL} {SOME}", [f"{TIME}with the range over the machine's uncertainty"]),
        (f"{SMALL} 4096 {SOME} --typical", [f"{TIME}Megatron's order = 1, lower is better"]),
        (PLAN, ["Launch", f"{TIME}the best layouts"]),
    ],
)
def test_the_page_has_what_is_printed(
    words: str, headings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vl_convert")
    path = tmp_path / "page.html"
    assert cli.main([*words.split(), "--html", str(path)]) == 0
    printed = capsys.readouterr().out
    page = read(path)
    assert [rows for _, rows in page.tables[: len(_printed(printed))]] == _printed(printed)
    assert [waits for _, waits in page.headings][2:-4] == headings
    (verdict,) = re.findall(r"^(?:Recommended: |Best of ours).*", printed, re.M)
    assert re.sub(r"\*\*|`", "", verdict) in page.text
    (of_layer,) = (label for label in page.labels if "waiting" in label)
    waits = re.findall(r"([\w-]+): [\d.]+ ms, waiting", of_layer)
    assert waits[:2] == ["plain-mesh", "megatron"]


def test_the_picture_says_what_is_simulated(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    assert main(["forms", "--folder", str(tmp_path)]) == 0
    created = (tmp_path / "forms.svg").read_text("utf-8")
    shipped = (Path(__file__).parents[3] / "docs" / "forms.svg").read_text("utf-8")
    for title, variant in forms().items():
        parts, time = step().parts(variant), step().layer_time(variant)
        row = lanes(title, parts)
        end, at = 1e3 * sum(part.seconds for _, part in parts), 0.0
        # Work and waiting fill the lane of the compute engine.
        for bit in sorted((b for b in row.bits if b.lane == "compute"), key=lambda bit: bit.start):
            assert bit.start == pytest.approx(at, abs=1e-5), bit
            at = bit.end
        assert at == pytest.approx(end)
        waited = sum(bit.end - bit.start for bit in row.bits if bit.kind == "waiting")
        assert row.label == f"{title}: {end:.1f} ms, waiting {waited:.1f} ms"
        assert {bit.kind for bit in row.bits if bit.lane == "links"} == {"transfer"}
        # A single pair has no neighbors and takes a little longer.
        assert end == pytest.approx(1e3 * time.seconds, rel=0.01)
        # This is one rank of eight; the time is their mean.
        assert waited == pytest.approx(1e3 * time.waiting, abs=10 * time.seconds)
        assert all(f">{row.label}</text>" in picture for picture in (created, shipped))


def test_a_point_of_the_table_of_layers_is_simulated() -> None:
    result = point("ascend_910b_server", "llama2_7b", 2, 4096, corners=1)
    (shares,) = result.shares
    assert shares.keys() == {*OURS, *RIVALS, *BOUNDS} - {"CoC fused", "catccos"}, "for 8 ranks"
    assert shares["compute"] < shares["ideal"] < shares["ours"] <= shares["default"] < 1
    assert shares["ideal"] < shares["MC2"] < shares["Megatron"]
    assert shares["CoC tuned"] <= shares["CoC"]
    # Programs add in a fixed order anyway; plain collectives take longer to do so.
    assert result.ordered["ours"] < shares["ours"]
    assert shares["compute"] < shares["forward-backward"] < shares["MC2"]
