"""``commfuse-npu simulate``: what it prints and writes, and the picture in the README."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from commfuse_npu.tools import cli
from commfuse_npu.tools.report import drawing
from commfuse_npu.tools.simulate.lanes import lanes
from scripts.evidence.layers import BOUND, OURS, RIVALS, point
from scripts.evidence.pictures import forms, main, step
from tests.tools.answers import answer

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
    for variant, name in product((plain, fused), ("step", "tokens", "exposed")):
        figure = variant[name]
        assert 0 < figure["low"] <= figure["typical"] <= figure["high"]
    assert plain["shorter"]["high"] == 0.0 < fused["memory_bytes"]
    ratio = fused["step"]["typical"] / plain["step"]["typical"]
    assert fused["shorter"]["typical"] == pytest.approx(1 - ratio)
    words = f"simulate {QUICK} --npus 32 256"
    npus = answer(tmp_path, *words.split())["points"]
    assert [point["npus"] for point in npus] == [32, 256]
    assert "DP 4, 32" in capsys.readouterr().out


# ------------------------------------------------------------------- the picture

LAYER = "--typical --tp 2 --dp 1 --micro-batches 1 --sequence-lengths 2048"
SOME = "megatron,coc-2,commfuse-c[12]-l1"


def test_a_picture_of_a_layer(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    path = tmp_path / "layer.svg"
    assert cli.main(["simulate", *LAYER.split(), "--variants", SOME, "--svg", str(path)]) == 0
    rows = re.findall(r">([\w-]+): [\d.]+ ms, waiting [\d.]+ ms</text>", path.read_text("utf-8"))
    assert rows[:2] == ["plain-mesh", "megatron"]
    assert len(rows) == 3
    assert rows[2].startswith("commfuse-c")


def test_a_picture_that_cannot_be_written_costs_no_result(
    capsys: pytest.CaptureFixture[str], small_disk: Callable[[int], Path]
) -> None:
    pytest.importorskip("vl_convert")
    folder = small_disk(4)
    path = folder / "layer.svg"
    words = ["simulate", *LAYER.split(), "--variants", SOME, "--svg", str(path)]
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    message = f"--svg {path} was not written: No space left on device; all other files were written"
    assert message in captured.err
    assert "Best of ours: **commfuse-c" in captured.out
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "installed", "message"),
    [
        ("a.html", True, "'a.html' is not an SVG file; let its name end in .svg"),
        ("a.svg", False, "'a.svg' needs vl-convert-python; pip install 'vl-convert-python>=1.9', "
         "or leave the option out"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_refused_before_anything_is_computed(
    name: str, installed: bool, message: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(drawing.util, "find_spec", lambda name: installed or None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate", "--svg", name])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


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
    assert shares.keys() == {*OURS, *RIVALS, BOUND} - {"CoC fused"}, "for 8 ranks"
    assert shares[BOUND] < shares["ours"] <= shares["default"] < 1
    assert shares[BOUND] < shares["MC2"] < shares["Megatron"]
    # Programs add in a fixed order anyway; plain collectives take longer to do so.
    assert result.ordered["ours"] < shares["ours"]
    assert shares["compute"] < shares["forward-backward"] < shares["MC2"]
