"""``commfuse-npu simulate``: what it prints and writes, and the picture in the README."""

import errno
import os
import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from commfuse_npu.tools import cli, drawing
from commfuse_npu.tools.drawing import Bit, Row, Size, draw, gantt
from scripts.evidence.pictures import main
from tests.tools.answers import answer

QUICK = "--typical --tp 2 --dp 1 --micro-batches 1 --sequence-length 4096"


def test_options_of_the_machine_cost_what_they_say(tmp_path: Path) -> None:
    def steps(words: str) -> dict[str, float]:
        rows = answer(tmp_path, *f"simulate {QUICK} {words}".split())["forms"]
        return {row["form"]: row["step"]["typical"] for row in rows}

    cheap, posts, launches, ordered = map(
        steps, ("--post-us 15", "--post-us 2000", "--launch-us 999", "--deterministic")
    )
    assert cheap["Megatron's order"] == posts["Megatron's order"]
    assert cheap["fused layers"] < posts["fused layers"]
    # The host limits both: a layer has 66 launches and 40 events, CoC's has more.
    assert cheap["Megatron's order"] < launches["Megatron's order"] < launches["CoC in 8 slices"]
    # Only sums of collectives: those of programs have a fixed order anyway.
    for name in ("blocking collectives", "MC2"):
        assert ordered[name] > cheap[name]


def test_a_table_and_json(capsys, tmp_path: Path) -> None:
    words = "simulate --tp 2 --micro-batches 1 --sequence-length 2048"
    content = answer(tmp_path, *words.split())
    text = capsys.readouterr().out
    assert "Simulated, not measured." in text
    assert content["simulated"] is True
    assert content["hardware"]["figures"]["inside.rate"]["source"]
    rows = {row["form"]: row for row in content["forms"]}
    cells = {line.split(" | ")[0].strip("|* "): line.split(" | ") for line in text.splitlines()}
    assert set(rows) < set(cells)
    # Eight sequences on eight NPUs.
    seconds = {form: row["step"]["typical"] for form, row in rows.items()}
    assert int(cells["MC2"][3].replace(",", "")) == round(2048 / seconds["MC2"])
    less = 1 - seconds["MC2"] / seconds["Megatron's order"]
    assert cells["MC2"][2].startswith(f"{100 * less:.1f} % (")
    assert cells["Megatron's order"][2] == "reference"
    order = [form for form in cells if form in rows]
    assert order == sorted(rows, key=seconds.__getitem__)
    assert content["ratio"]["low"] < content["ratio"]["typical"] < content["ratio"]["high"]
    assert (rows["no communication"]["flags"], rows["Megatron's order"]["flags"]) == (None, [])
    assert content["recommended"]["form"] in text.splitlines()[0]


# ------------------------------------------------------------------- the picture

LAYER = "--typical --tp 2 --dp 1 --micro-batches 2 --sequence-length 8192"


def test_a_picture_that_cannot_be_written_costs_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vl_convert")
    path, late = tmp_path / "layer.svg", tmp_path / "late.svg"
    assert cli.main(["simulate", *LAYER.split(), "--svg", str(path)]) == 0
    rows = re.findall(r">([^<>:]+): [\d.]+ ms, waiting [\d.]+ ms</text>", path.read_text("utf-8"))
    assert rows[:2] == ["blocking collectives", "Megatron's order"]
    assert len(rows) == 3
    assert rows[2].startswith("overlap")
    printed = capsys.readouterr().out
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr("os.fsync", Mock(side_effect=full))
    assert cli.main(["simulate", *LAYER.split(), "--svg", str(late)]) == 2
    out, err = capsys.readouterr()
    assert f"simulate: error: {late}: No space left on device" in err
    assert printed.startswith(out.rstrip())
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "installed", "message"),
    [
        ("a.html", True, "'a.html' is not an SVG file; let its name end in .svg"),
        ("a.svg", False, "'a.svg' needs vl-convert-python; pip install 'vl-convert-python>=1.9', "
         "or leave the option out"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_refused_first(
    name, installed, message, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(drawing.util, "find_spec", lambda name: installed or None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate", "--svg", name])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_pictures_show_what_is_simulated(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    assert main(["--folder", str(tmp_path)]) == 0
    for drawn in tmp_path.iterdir():
        shipped = Path(__file__).parents[3] / "docs" / drawn.name
        # Numbers in texts, bars and whiskers; those of clips count a process's pictures.
        ours, theirs = (
            [
                float(n)
                for n in re.findall(r"clip\d+|(-?\d+(?:\.\d+)?)", file.read_text("utf-8"))
                if n
            ]
            for file in (drawn, shipped)
        )
        assert ours == pytest.approx(theirs, abs=0.01)


def test_a_picture_is_a_file_and_needs_a_package(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("vl_convert")
    bits = (Bit("compute", 1.0, 3.0, "work"), Bit("compute", 0.0, 1.0, "waiting", "1.0"))
    picture = gantt("Layer", "ms", [Row("plain: 3 ms", ("compute",), bits)], Size(24, 66, 760))
    for name in ("a.png", "a.svg"):
        draw([picture], "A <title>", tmp_path / name)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "a.svg").read_text("utf-8")
    for label in ("A &lt;title&gt;", "Layer", "plain: 3 ms", "compute", "1.0", "waiting"):
        assert f">{label}</text>" in text, label
    monkeypatch.setattr(drawing.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"a picture needs vl-convert-python; pip install"):
        draw([picture], "None", tmp_path / "b.png")
    assert not (tmp_path / "b.png").exists()
