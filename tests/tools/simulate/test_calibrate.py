"""Fitting to a benchmark and predicting the rest of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from commfuse_npu.tools import cli
from commfuse_npu.tools.bench.results import Result, Setting
from commfuse_npu.tools.bench.samples import Check
from commfuse_npu.tools.bench.stored import as_json
from commfuse_npu.tools.simulate import calibrate
from commfuse_npu.tools.simulate.calibrate import FITTED_ON, predictions
from commfuse_npu.tools.simulate.hardware import Hardware
from commfuse_npu.tools.simulate.machine import Machine
from commfuse_npu.tools.simulate.variants import COMPUTE_ONLY

TRUTH = replace(
    calibrate._START,
    cube_flops=4.3e10,
    half_rows=31.0,
    cores=0,
    gemm_start=0.0,
    hbm_bandwidth=2.2e9,
    transfer_slowdown=1.1,
    launch_overhead=2.5e-4,
)
"""A machine that was made up; the fit is not told."""

VARIANTS = ("p2p", "slices-2", "slices-4", "megatron-p2p", "ours-c1", "ours-c4", "ours-c8",
            "ours-c6-t1.5")  # fmt: skip


def _measured(work: str, ratio: float, variants: tuple[str, ...] = VARIANTS) -> list[Result]:
    """What the made-up machine takes."""
    shape = "S 2048, H 512, FFN 1792, 4 heads of 128, 2 key heads"
    rate = None if ratio == 0 else 1e8 / ratio
    setting = Setting("real GEMMs", work, 2, "mesh", "fp32", ratio, shape, rate, 10.0 * ratio)
    blank = Result(
        setting, "", 1.0, (1.0, 1.0), 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0,
        Check(True, 0.0, True, 0), 3, 0, 0,
    )  # fmt: skip
    compute = 1e3 * calibrate._seconds(TRUTH, replace(blank, variant="p2p"), COMPUTE_ONLY)
    found = []
    for name in variants:
        row = replace(blank, variant=name, compute_ms=compute)
        found.append(replace(row, median_ms=1e3 * calibrate._seconds(TRUTH, row)))
    return found


@pytest.mark.long
@pytest.mark.parametrize("work", ["all-gather", "reduce-scatter", "mlp"])
def test_other_ratios_and_variants_of_a_machine_follow_from_one_ratio(work: str) -> None:
    results = [row for ratio in (0.0, 0.5, 1.0, 2.0) for row in _measured(work, ratio)]
    found = list(predictions(results, 0.5))
    assert len(found) == len(results)
    for one in found:
        assert one.fitted == (one.setting.ratio == 0.5 and one.variant in FITTED_ON)
        assert abs(one.error) < 0.02, (one.variant, one.setting.ratio, one.error)
    # A machine that is another one is seen to be: the fit does not bend to everything.
    wrong = [
        replace(row, median_ms=row.median_ms * (2 if row.variant == "ours-c4" else 1))
        for row in results
    ]
    errors = {one.variant: one.error for one in predictions(wrong, 0.5) if one.setting.ratio == 2}
    assert errors["ours-c4"] == pytest.approx(-0.5, abs=0.02)


@pytest.fixture
def fitted(monkeypatch) -> None:
    """The fit finds the made-up machine, at once."""
    monkeypatch.setattr(calibrate, "_fitted", lambda rows: {r.setting.work: TRUTH for r in rows})


def test_what_has_no_form_is_left_out_and_a_ratio_that_is_not_there_refused(fitted) -> None:
    other = [
        replace(_measured("mlp", 0.5)[0], variant=name)
        for name in ("collective", "coc-4", "ring", "auto", "auto-wgrad")
    ]
    results = [*_measured("mlp", 0.5), *other]
    assert {one.variant for one in predictions(results, 0.5)} == set(VARIANTS)
    four = [
        replace(row, setting=replace(row.setting, ranks=4), variant=name)
        for row in _measured("all-gather", 0.5, ("ours-c1",))
        for name in ("p2p", "ours-c1", "ours-c4", "ours-c4-l1", "ring")
    ]
    assert {one.variant for one in predictions(four, 0.5)} == {"p2p", "ours-c1", "ours-c4"}
    with pytest.raises(ValueError, match=r"nothing at ratio 3 to fit; choose one of 0\.5"):
        list(predictions(results, 3))
    layers = [replace(row, setting=replace(row.setting, work="layers")) for row in results]
    with pytest.raises(ValueError, match=r"no form for what was measured \(layers\); .*mlp"):
        list(predictions(layers, 0.5))


def _described(tmp_path: Path) -> tuple[Path, Machine]:
    bench, described = tmp_path / "bench.json", tmp_path / "here.yaml"
    works = ("all-gather", "reduce-scatter", "mlp")
    results = [row for work in works for row in _measured(work, 0.5)]
    bench.write_text(json.dumps(as_json({}, results, [])))
    assert cli.main(["simulate", "--against", str(bench), "--calibrated", str(described)]) == 0
    return described, Hardware.load(described).machine()


def test_the_fitted_machine_becomes_a_description(tmp_path: Path, fitted) -> None:
    described, machine = _described(tmp_path)
    for name in ("cube_flops", "half_rows", "hbm_bandwidth", "launch_overhead"):
        assert getattr(machine, name) == pytest.approx(getattr(TRUTH, name)), name
    assert machine.inside.rate == 1e8 / 0.5
    # Per byte: at a fifth of the rate a fifth of the share.
    assert machine.transfer_slowdown == pytest.approx(TRUTH.transfer_slowdown * 0.2)
    assert "bench.json" in described.read_text()
    other = [
        replace(row, setting=replace(row.setting, dtype="bf16")) for row in _measured("mlp", 0.5)
    ]
    with pytest.raises(ValueError, match=r"no real GEMMs, 2, mesh, fp32 at ratio 0\.5 to describe"):
        calibrate.described(other, 0.5, "bench.json")


@pytest.mark.long
def test_the_fit_finds_the_machine(tmp_path: Path) -> None:
    _, machine = _described(tmp_path)
    for name in ("cube_flops", "half_rows", "hbm_bandwidth", "launch_overhead"):
        assert getattr(machine, name) == pytest.approx(getattr(TRUTH, name), rel=0.02), name
    assert machine.transfer_slowdown == pytest.approx(TRUTH.transfer_slowdown * 0.2, rel=0.05)


def test_the_command_prints_a_table_and_the_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    results = [row for ratio in (0.5, 1.0) for row in _measured("all-gather", ratio)]
    path.write_text(json.dumps(as_json({}, results, [])))
    assert cli.main(["simulate", "--against", str(path)]) == 0
    out = capsys.readouterr().out
    assert "## all-gather, 2 ranks, real GEMMs, fp32, mesh" in out
    rows = [line for line in out.splitlines() if line.startswith(("| 0.5", "| 1 "))]
    assert [row.count("*") for row in rows] == [len(FITTED_ON), 0]
    assert "All: error of 12 predicted times: median 0.0 %" in out
    assert cli.main(["simulate", "--against", str(path), "--fit-ratio", "7"]) == 2
    assert "choose one of 0.5, 1" in capsys.readouterr().err
    path.write_text("{}")
    assert cli.main(["simulate", "--against", str(path)]) == 2
