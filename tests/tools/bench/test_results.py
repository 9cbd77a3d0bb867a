"""Figures, report and pictures from samples, and the file of ``--json``."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from commfuse_npu.tools import cli
from commfuse_npu.tools.bench.report import (
    as_markdown,
    important_variants,
    picture,
    summary,
    verdict,
)
from commfuse_npu.tools.bench.results import (
    Check,
    Result,
    Sample,
    Setting,
    evaluate,
    load,
)
from commfuse_npu.tools.bench.shapes import WORKS, Shape

CONFIG = Path(__file__).parents[3] / "configs" / "llama3_8b.yaml"

TOTALS = {
    "compute": [100.0, 100.0, 130.0],
    "communication": [100.0, 100.0, 100.0],
    "p2p": [200.0, 210.0, 190.0],
    "ours-c4": [120.0, 125.0, 115.0],
    "coc-4": [250.0, 240.0, 260.0],
}


def evaluated(ratio: float = 1.0, wire: float = 100.0, **totals: list[float]) -> list[Result]:
    """Results from totals in ms, which override or extend :data:`TOTALS`; a tenth is blocked."""
    rate = 1e6 if ratio else None
    setting = Setting("real GEMMs", "mlp", 2, "mesh", "fp32", ratio, "S 8", rate, wire)
    all_totals = {**TOTALS, **{name.replace("_", "-"): times for name, times in totals.items()}}
    samples = {
        name: [Sample(ms / 1e3, ms / 1e4, ms / 2e3) for ms in times]
        for name, times in all_totals.items()
    }
    checks = {name: Check(True, 0.0, None) for name in all_totals}
    checks["auto"] = Check(False, 2.5e-6, True, ("row forward 4 x 8: plain",))
    return evaluate(setting, samples, checks)


def test_a_scaled_shape_can_be_shared_by_the_ranks() -> None:
    for ranks, scale in product((2, 3, 4), (4, 16 / 3, 32)):
        shape = Shape.of_model(CONFIG, ranks, scale, 100)
        widths = shape.sequence, shape.hidden, shape.ffn, shape.heads, shape.groups
        assert all(width > 0 and width % ranks == 0 for width in widths)
        assert (shape.heads % shape.groups, shape.head) == (0, 128)
    # A scale of 4 divides the widths by 4.
    assert Shape.of_model(CONFIG, 2, 4, None) == Shape(2048, 1024, 3584, 8, 2, 128, 4)


@pytest.mark.parametrize(
    ("work", "ranks", "dtype", "expected"),
    [("all-gather", 2, "fp32", 32 * 32 * 4), ("mlp", 4, "bf16", 16 * 32 * 2 * 5),
     ("layer", 4, "fp32", 16 * 32 * 4 * 10), ("layers", 4, "fp32", 16 * 32 * 4 * 20)],
)  # fmt: skip
def test_what_a_pair_exchanges(work: str, ranks: int, dtype: str, expected: int) -> None:
    shape = Shape(64, 32, 96, 4, 2, 8)
    assert WORKS[work].bytes_per_pair(shape, ranks, dtype) == expected


def test_figures_of_a_setting() -> None:
    reference, ours, sliced = evaluated()
    assert [row.variant for row in (reference, ours, sliced)] == ["p2p", "ours-c4", "coc-4"]
    assert (reference.overhead_removed_signed, reference.speedup) == (0, 1)
    assert reference.exposed_ms == 100
    assert ours.median_ms == pytest.approx(120)
    assert ours.quartiles_ms == (pytest.approx(117.5), pytest.approx(122.5))
    assert (ours.exposed_ms, ours.cpu_ms) == (pytest.approx(20), pytest.approx(60))
    assert (ours.overhead_removed, ours.hideable) == (pytest.approx(0.8), 1)
    assert ours.of_hideable == pytest.approx(0.8)
    assert ours.blocked_removed == pytest.approx(0.4)
    assert ours.rounds == 3
    assert (sliced.overhead_removed, sliced.hideable) == (0, 1)
    assert sliced.overhead_removed_signed == pytest.approx(-0.5)

    # A long wire bounds what can be hidden.
    _, ours, _ = evaluated(wire=150)
    assert (ours.bound_ms, ours.hideable) == (150, pytest.approx(0.5))
    assert ours.of_hideable == pytest.approx(1.6)
    # Nothing exposed: nothing to remove.
    _, ours, _ = evaluated(wire=0, p2p=[90.0] * 3)
    assert (ours.overhead_removed_signed, ours.overhead_removed, ours.hideable) == (None, 0, 0)


def test_all_ranks_have_to_be_equal() -> None:
    checks = [Check(True, 0.0, True), Check(False, 0.1, True)]
    assert Check.of_ranks(checks) == Check(False, 0.1, True)
    assert Check.of_ranks([checks[0], Check(True, 0.0, None)]).equal_same_gemms is None
    assert Sample.of_ranks([Sample(1, 2, 3), Sample(3, 4, 5)]) == Sample(3, 3, 4)


# ------------------------------------------------------------------- the report


def test_the_table_says_who_is_fastest_who_is_slower_and_what_differs() -> None:
    text = as_markdown({"cores": 2}, evaluated(auto=[150.0] * 3), ["skipped: something"])
    for line in (
        "- cores: 2", "- **skipped: something**",
        "**Ratio 1** (S 8): compute alone 100.0, communication alone 100.0 (1.0 MB/s, wire 100.0), "
        "bound 100.0, wire / compute 1.00, hideable 100.0 %; 3 rounds",
        "| variant | total | quartiles | exposed | wall removed | blocked removed | of bound | "
        "speed-up | CPU | waiting | bits |\n|---" + "|---:" * 10 + "|",
        "| coc-4 | 250.0 | 245.0-255.0 | 150.0 | -50.0 % | -25.0 % | -50.0 % | 0.80x | 125.0 | "
        "25.0 | equal |",
        "| **ours-c4** | 120.0 |",
        "| 2.5e-06 (same GEMMs: equal) |",
        "Chosen by auto: row forward 4 x 8: plain.",
        "Slower than p2p, beyond both quartiles: coc-4 (25.0 %).",
    ):  # fmt: skip
        assert line in text


def test_five_variants_are_shown_and_the_others_on_request() -> None:
    names = ("collective", "ring", "slices_2", "ours_c8", "auto")
    results = evaluated(**{name: [150.0] * 3 for name in names})
    assert important_variants(results) == ["p2p", "ours-c4", "collective", "ring", "auto"]
    short, long = as_markdown({}, results, []), as_markdown({}, results, [], all_variants=True)
    assert "3 more variants were measured; --all shows them." in short
    assert "| slices-2 |" in long
    assert "| slices-2 |" not in short


def test_the_summary_has_a_row_per_work_and_ratio() -> None:
    results = [
        *evaluated(0.5, auto=[121.0] * 3, megatron=[180.0] * 3, megatron_p2p=[160.0] * 3),
        *evaluated(0.0, coc_4=[300.0] * 3),
    ]
    rows = [line for line in summary(results).splitlines() if line.startswith("| mlp")]
    assert [[cell.strip() for cell in row.strip("|").split("|")] for row in rows] == [
        ["mlp", "0.5", "**1.65x, 79 % (40 %)**", "**1.67x, 80 % (40 %)** ours-c4",
         "0.80x, -50 % (-25 %) coc-4", "1.25x, 40 % (20 %) megatron-p2p"],
        # Without a wire there is no share of the wire.
        ["mlp", "0", "-", "**1.67x** ours-c4", "0.67x coc-4", "-"],
    ]  # fmt: skip


def test_the_verdict_counts_settings() -> None:
    results = [row for ratio in (0.5, 1.0) for row in evaluated(ratio)]
    first, second = verdict(results)
    assert first.startswith("Best of ours over 2 settings: **ours-c4**: `--use-commfuse ")
    assert second.startswith(
        "In 2 of 2 settings ahead, 40.0 % shorter in the middle one (40.0 % shorter to 40.0 % "
        "shorter) than the fastest other that was measured."
    )
    assert verdict([row for row in results if row.variant != "ours-c4"])[0].startswith("Nothing")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fb-overlap", "--commfuse-fb-overlap"),
        ("auto-wgrad", "--use-commfuse --commfuse-tuning on --commfuse-wgrad blocks"),
        ("ours-c4-t2", "--use-commfuse --commfuse-lanes 1 --commfuse-chunks 4 --commfuse-taper 2"),
    ],
)
def test_the_verdict_has_the_options_and_what_users_have_today(name: str, options: str) -> None:
    totals = {"megatron-p2p": [180.0] * 3, name: [110.0] * 3}
    results = [row for row in evaluated(**totals) if row.variant != "ours-c4"]
    first, second = verdict(results)
    assert first == f"Best of ours over one setting: **{name}**: `{options}`"
    assert second.startswith("38.9 % shorter than Megatron's order over direct exchanges; ")


def test_a_picture_is_over_ratios() -> None:
    names = ["p2p", "ours-c4", "coc-4"]
    over = picture([row for ratio in (0.0, 0.5, 1.0) for row in evaluated(ratio)], names)
    points = [(row["name"], row["at"], row["value"]) for row in over.chart["data"]["values"]]
    shares = {"bound, max(compute, wire)": 0.5, "ours-c4": 0.6, "coc-4": 1.25}
    assert sorted(points) == sorted(
        (name, at, share) for name, share in shares.items() for at in (0.0, 0.5, 1.0)
    )
    far = picture(evaluated(0.5, coc_4=[900.0] * 3), names)
    assert {row["name"] for row in far.chart["data"]["values"]} == set(shares) - {"coc-4"}
    assert far.note == "More than 1.6 in part, not drawn: coc-4."


# ------------------------------------------------------------------- the file


def written(path: Path, **changes: Any) -> Path:
    content = {"machine": {"cores": 2, "link measured": ["fast"], "notes": ["a note"]}}
    rows = [asdict(result) for result in evaluated()]
    rows[0].update(changes)
    path.write_text(json.dumps({**content, "results": rows}))
    return path


def test_a_stored_run_is_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "a run.json")
    machine, results = {"cores": 2, "link measured": ["fast"]}, evaluated()
    assert load(path) == (machine, results, ["a note"])
    assert cli.main(["bench", "--from", str(path)]) == 0
    expected = [*verdict(results), "", as_markdown(machine, results, ["a note"]), ""]
    assert capsys.readouterr().out == "\n".join(expected)


@pytest.mark.parametrize(
    "changes",
    [{"median_ms": "fast"}, {"median_ms": None}, {"ranks": True}, {"variant": 3},
     {"quartiles_ms": [1.0, "x"]}, {"speedup": 10**400}, {"chosen": [1]}, {"ratio": []}],
)  # fmt: skip
def test_values_that_no_table_can_show_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    assert cli.main(["bench", "--from", str(written(tmp_path / "run.json", **changes))]) == 2
    captured = capsys.readouterr()
    assert "not what `commfuse-npu bench --json` writes: TypeError" in captured.err
    assert captured.out == ""


def test_a_picture_that_cannot_be_written_costs_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vl_convert")
    folder, path = tmp_path / "pages", written(tmp_path / "run.json")
    folder.mkdir()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr("os.fsync", Mock(side_effect=full))
    assert cli.main(["bench", "--from", str(path), "--html", str(folder / "a.html")]) == 2
    captured = capsys.readouterr()
    assert (
        "a.html was not written: No space left on device; all other files were written"
        in captured.err
    )
    assert "**ours-c4**" in captured.out
    assert list(folder.iterdir()) == []
