"""The table of a layer in every form."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.evidence import layers
from scripts.evidence.layers import BOUNDS, OURS, RIVALS, Point, main, point, report

FORMS = {"ours": 0.8, "ours, other rounding": 0.7, "default": 0.9, "CoC": 0.85, "Megatron": 0.95}
KERNEL = {"CoC fused": 0.75}
LIMITS = {"CoC tuned": 0.83, "MC2": 0.75, "compute": 0.5}


def given(*corners: dict[str, float]) -> Point:
    shares = tuple({**FORMS, **LIMITS, **corner} for corner in corners)
    return Point("a machine", "a model", 8, 4096, shares)


def test_a_form_is_ahead_of_those_that_exist() -> None:
    text = report([given({}, {"ours": 0.9}), given({"ours, other rounding": 0.86}, {})])
    assert (
        "*ours*: ahead of CoC in slices and of Megatron's order at 2 of 2 points, at 1 of" in text
    )
    assert (
        "*ours, other rounding*: ahead of CoC in slices and of Megatron's order at 1 of 2" in text
    )
    assert "behind the first two at a machine a model TP 8 4096." in text
    assert "*default*: ahead of CoC in slices and of Megatron's order at 0 of 2 points" in text
    assert "MC2 is ahead of all of ours at 1 of 2 points" in text
    # The shortest that can be launched is bold, and its range is there.
    assert "| 0.800 (0.80 .. 0.90) | **0.700** (0.70 .. 0.70) |" in text


def test_a_kernel_of_others_is_counted_by_itself() -> None:
    text = report([given(KERNEL), given({})])
    assert "at 2 of them at every end of the ranges; of CoC as a kernel, too, at 1." in text
    assert "| 0.850 | 0.750 | 0.950 |" in text
    assert "| 0.850 | - | 0.950 |" in text


def test_a_point_is_simulated() -> None:
    one = point("ascend_910b_server", "llama2_7b", 2, 4096, corners=1)
    (shares,) = one.shares
    assert shares.keys() == {*OURS, *RIVALS, *BOUNDS} - {"CoC fused"}, "which is for 8 ranks"
    assert shares["compute"] < shares["MC2"] < shares["ours"] <= shares["default"] < 1
    assert shares["CoC tuned"] <= shares["CoC"]


def test_the_table_goes_into_its_section(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Pool:
        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *error: object) -> None: ...

        map = staticmethod(map)

    monkeypatch.setattr(layers, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(layers, "_point", lambda wanted: given({}))
    file = tmp_path / "page.md"
    assert main(["--tp", "8", "--markdown", str(file)]) == 0
    assert file.read_text().count("| a machine | a model | 8 | 4096 |") == 24
    assert "begin: layers" in file.read_text()
    assert capsys.readouterr().out
