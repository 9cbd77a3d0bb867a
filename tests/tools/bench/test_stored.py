"""What ``--json`` wrote is shown again by ``--from``, and anything else is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commfuse_npu.tools import cli
from commfuse_npu.tools.bench.report import as_markdown
from commfuse_npu.tools.bench.results import Check, Result, Setting
from commfuse_npu.tools.bench.standing import verdict
from commfuse_npu.tools.bench.stored import as_json, load
from commfuse_npu.tools.bench.summary import summary


def _result(variant: str, total: float, *, ratio: float = 0.5, **changes: object) -> Result:
    setting = Setting(
        "real GEMMs", "mlp", 2, "mesh", "fp32", ratio, "S 8", 1e6 if ratio else None, 50.0
    )
    compute, reference = 100.0, 150.0
    found = Result(
        setting=setting,
        variant=variant,
        median_ms=total,
        quartiles_ms=(total - 1, total + 1),
        compute_ms=compute,
        communication_ms=50.0,
        bound_ms=100.0,
        exposed_ms=total - compute,
        removed=(reference - total) / (reference - compute),
        hideable=1.0,
        of_hideable=(reference - total) / 50.0,
        blocked_ms=total - compute,
        blocked_removed=0.5,
        speedup=reference / total,
        cpu_ms=90.0,
        extra_mib=2.5,
        check=Check(False, 1e-6, True, 0, ("gather 4 x 8: plain",) if variant == "auto" else ()),
        rounds=3,
    )
    return replace(found, **changes)  # type: ignore[arg-type]


RESULTS = [
    _result("p2p", 150.0),
    _result("slices-4", 120.0),
    _result("megatron", 140.0),
    _result("megatron-p2p", 130.0),
    _result("ours-c1", 113.0),
    _result("ours-c4", 110.0),
    _result("auto", 111.0),
    _result("p2p", 150.0, ratio=0.0),
    _result("ours-c4", 155.0, ratio=0.0),
]


def test_a_stored_run_is_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a run.json"
    machine = {"cores": 2, "link measured": ["fast"]}
    path.write_text(json.dumps(as_json(machine, RESULTS, ["a note"])))
    assert load(path) == (machine, RESULTS, ["a note"])
    assert cli.main(["bench", "--from", str(path)]) == 0
    said = [line.replace("**", "").replace("`", "") for line in verdict(RESULTS)]
    shown = [as_markdown(machine, RESULTS, ["a note"]), *said, ""]
    assert capsys.readouterr().out == "\n".join(shown)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"machine": {"notes": []}, "results": [{}]}'])
def test_another_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    assert cli.main(["bench", "--from", str(path)]) == 2
    assert f"{path}: not what `commfuse-npu bench --json` writes" in capsys.readouterr().err
    assert cli.main(["bench", "--from", str(tmp_path / "none")]) == 2


def _stored(path: Path, **changes: Any) -> Path:
    content = as_json({"cores": 2}, RESULTS, [])
    content["results"][0].update(changes)
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"median_ms": "fast"},
        {"median_ms": None},
        {"ranks": "two"},
        {"ranks": True},
        {"variant": 3},
        {"quartiles_ms": [1.0, "x"]},
        {"speedup": 10**400},
        {"chosen": [1]},
        {"ratio": []},
    ],
)
def test_values_that_no_table_can_show_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    path = _stored(tmp_path / "run.json", **changes)
    assert cli.main(["bench", "--from", str(path)]) == 2
    captured = capsys.readouterr()
    assert "not what `commfuse-npu bench --json` writes: TypeError" in captured.err
    assert captured.out == ""


def test_a_picture_that_cannot_be_written_costs_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], small_disk: Callable[[int], Path]
) -> None:
    pytest.importorskip("vl_convert")
    folder = small_disk(4)
    path = _stored(tmp_path / "run.json")
    assert cli.main(["bench", "--from", str(path), "--plot", str(folder / "a.png")]) == 2
    captured = capsys.readouterr()
    assert "a.png was not written: No space left on device; all else is there" in captured.err
    assert "| ours-c4" in captured.out
    assert list(folder.iterdir()) == []


def test_the_summary_has_a_row_per_work_and_ratio() -> None:
    rows = [line for line in summary(RESULTS).splitlines() if line.startswith("| mlp")]
    one, zero = rows
    cells = [cell.strip() for cell in one.strip("|").split("|")]
    assert cells == [
        *("mlp", "0.5", "**1.35x, 78 % (50 %)**", "**1.36x, 80 % (50 %)** ours-c4"),
        *("1.25x, 60 % (50 %) slices-4", "1.15x, 40 % (50 %) megatron-p2p"),
    ]
    # Nothing else was measured, and without a wire there is no share of it.
    assert [cell.strip() for cell in zero.strip("|").split("|")] == [
        *("mlp", "0", "-", "0.97x ours-c4", "-", "-")
    ]
    assert math.isclose(RESULTS[0].speedup, 1.0)
