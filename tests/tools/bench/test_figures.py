"""From rates and samples to the figures of the report."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from commfuse_npu.tools.bench.plot import pictures
from commfuse_npu.tools.bench.report import as_markdown
from commfuse_npu.tools.bench.results import (
    Check,
    Result,
    Sample,
    Setting,
    evaluate,
    worst_check,
)
from commfuse_npu.tools.bench.shapes import Shape, bytes_per_pair
from commfuse_npu.tools.bench.standing import shown, verdict
from commfuse_npu.tools.bench.stored import as_json

CONFIG = Path(__file__).parents[3] / "configs" / "llama3_8b.yaml"


# ------------------------------------------------------------------ sizes and rates


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("scale", [4, 16 / 3, 32])
def test_a_scaled_shape_can_be_shared_by_the_ranks(ranks: int, scale: float) -> None:
    shape = Shape.of_model(CONFIG, ranks, scale, 100)
    for width in (shape.sequence, shape.hidden, shape.ffn, shape.heads, shape.groups):
        assert width > 0
        assert width % ranks == 0
    assert shape.heads % shape.groups == 0
    assert shape.head == 128


def test_a_quarter_of_the_widths_is_a_quarter() -> None:
    assert Shape.of_model(CONFIG, 2, 4, None) == Shape(2048, 1024, 3584, 8, 2, 128, 4)


def test_what_a_pair_exchanges() -> None:
    shape = Shape(64, 32, 96, 4, 2, 8)
    assert bytes_per_pair("all-gather", shape, 2, "fp32") == 32 * 32 * 4
    assert bytes_per_pair("mlp", shape, 4, "bf16") == 16 * 32 * 2 * 5
    assert bytes_per_pair("layer", shape, 4, "fp32") == 16 * 32 * 4 * 10
    assert bytes_per_pair("layers", shape, 4, "fp32") == 16 * 32 * 4 * 20


# -------------------------------------------------------------------------- figures


def _setting(ratio: float = 1.0, wire_ms: float = 100.0) -> Setting:
    return Setting("real GEMMs", "mlp", 2, "mesh", "fp32", ratio, "S 8", 1e6, wire_ms)


def _evaluated(totals: dict[str, list[float]], setting: Setting | None = None) -> list[Result]:
    """From totals in ms; blocked a tenth of them."""
    samples = {
        name: [Sample(ms / 1e3, ms / 1e4, ms / 2e3) for ms in times]
        for name, times in totals.items()
    }
    checks = {name: Check(True, 0.0, None, 3 << 20) for name in totals}
    checks["compute"] = Check(False, 0.0, None, 1 << 20)
    return evaluate(setting or _setting(), samples, checks)


_TOTALS = {
    "compute": [100.0, 100.0, 130.0],
    "communication": [100.0, 100.0, 100.0],
    "p2p": [200.0, 210.0, 190.0],
    "ours-c4": [120.0, 125.0, 115.0],
    "coc-4": [250.0, 240.0, 260.0],
}


def test_figures_of_a_setting() -> None:
    reference, ours, sliced = _evaluated(_TOTALS)
    assert [r.variant for r in (reference, ours, sliced)] == ["p2p", "ours-c4", "coc-4"]
    assert (reference.removed, reference.speedup, reference.exposed_ms) == (0, 1, 100)
    assert ours.median_ms == pytest.approx(120)
    assert ours.quartiles_ms == (pytest.approx(117.5), pytest.approx(122.5))
    assert ours.exposed_ms == pytest.approx(20)
    assert ours.removed == pytest.approx(0.8)
    assert ours.hideable == 1
    assert ours.of_hideable == pytest.approx(0.8)
    assert ours.blocked_removed == pytest.approx(0.4)
    assert ours.extra_mib == 2
    assert sliced.removed == pytest.approx(-0.5)


def test_a_long_wire_bounds_what_can_be_hidden() -> None:
    _, ours, _ = _evaluated(_TOTALS, _setting(wire_ms=150))
    assert ours.bound_ms == 150
    assert ours.hideable == pytest.approx(0.5)
    assert ours.of_hideable == pytest.approx(1.6)


def test_nothing_exposed_is_nothing_to_remove() -> None:
    totals = {**_TOTALS, "p2p": [90.0, 90.0, 90.0]}
    _, ours, _ = _evaluated(totals, _setting(wire_ms=0))
    assert ours.removed is None
    assert ours.hideable == 0
    assert as_json({}, [ours], [])["results"][0]["overhead_removed"] == 0


def test_json_is_clipped_and_keeps_the_sign_beside() -> None:
    report = json.loads(json.dumps(as_json({"cores": 2}, _evaluated(_TOTALS), ["a note"])))
    assert report["machine"] == {"cores": 2, "notes": ["a note"]}
    rows = {row["variant"]: row for row in report["results"]}
    assert rows["coc-4"]["overhead_removed"] == 0
    assert rows["coc-4"]["overhead_removed_signed"] == pytest.approx(-0.5)
    assert rows["ours-c4"]["overhead_removed"] == pytest.approx(0.8)
    for row in rows.values():
        assert {"work", "ranks", "link", "ratio", "median_ms", "exposed_ms", "hideable"} <= set(row)
        assert 0 <= row["overhead_removed"] <= 1
        assert 0 <= row["hideable"] <= 1
        assert math.isfinite(row["median_ms"])


def test_the_table_says_who_is_slower() -> None:
    text = as_markdown({"cores": 2}, _evaluated(_TOTALS), ["skipped: something"])
    assert "| coc-4 | 250.0 | 245.0-255.0 | 150.0 | -50.0 % |" in text
    assert "| **ours-c4** | 120.0 |" in text
    assert "Fastest of ours: ours-c4, 66.7% ahead of the fastest other, p2p." in text
    assert "Slower than p2p, beyond both quartiles: coc-4 (25.0 %)." in text
    assert "; 3 rounds" in text
    assert "**skipped: something**" in text


def test_where_ours_is_behind_the_table_says_so() -> None:
    totals = {**_TOTALS, "ours-c4": [260.0, 260.0, 260.0]}
    text = as_markdown({}, _evaluated(totals), [])
    assert "ours-c4, 23.1% **slower than** the fastest other, p2p." in text


def test_bits_are_shown_as_they_are() -> None:
    totals = {**_TOTALS, "ours-c8": [150.0] * 3}
    results = _evaluated(totals)
    object.__setattr__(results[-1], "check", Check(False, 2.5e-6, True, 0))
    assert "| 2.5e-06 (same GEMMs: equal) |" in as_markdown({}, results, [], every=True)


def test_all_ranks_have_to_be_equal() -> None:
    checks = [Check(True, 0.0, True, 5), Check(False, 0.1, True, 9)]
    assert worst_check(checks) == Check(False, 0.1, True, 9)
    assert Sample.of_ranks([Sample(1, 2, 3), Sample(3, 4, 5)]) == Sample(3, 3, 4)


def test_pictures_are_over_ratios_or_bars() -> None:
    results = [r for ratio in (0.0, 0.5, 1.0) for r in _evaluated(_TOTALS, _setting(ratio))]
    (over,) = pictures(results)
    (table,) = over.tables
    assert table.head == ("communication / computation", "ours-c4", "coc-4",
                          "bound, max(compute, wire)")  # fmt: skip
    assert [row[:3] for row in table.rows] == [
        (ratio, "0.6", "1.25") for ratio in ("0.0", "0.5", "1.0")
    ]
    (bars,) = pictures(_evaluated(_TOTALS, _setting(0.5)))
    assert [row[:2] for row in bars.tables[0].rows] == [
        *(("p2p", "200"), ("ours-c4", "120"), ("coc-4", "250")),
        ("bound", "100"),
    ]


def test_what_is_far_off_is_named_and_not_drawn() -> None:
    totals = {**_TOTALS, "coc-4": [900.0] * 3}
    (picture,) = pictures(_evaluated(totals, _setting(0.5)))
    assert "coc-4" not in [row[0] for row in picture.tables[0].rows]
    assert picture.note == "More than 1.6 times p2p, not drawn: coc-4."


def test_the_verdict_counts_settings() -> None:
    results = [r for ratio in (0.5, 1.0) for r in _evaluated(_TOTALS, _setting(ratio))]
    first, second = verdict(results)
    assert first == (
        "Best of ours over 2 settings: **ours-c4**: "
        "`--use-commfuse --commfuse-lanes 1 --commfuse-chunks 4`"
    )
    assert second.startswith(
        "In 2 of 2 settings ahead, 40.0 % shorter in the middle one (40.0 % shorter to 40.0 % "
        "shorter) than the fastest other that was measured."
    )
    assert verdict([row for row in results if row.variant != "ours-c4"])[0].startswith("Nothing")


def test_the_verdict_on_overlap_has_its_flag_and_megatrons_order() -> None:
    measured = {"megatron-p2p": [180.0] * 3, "fb-overlap": [120.0] * 3}
    totals = {name: _TOTALS[name] for name in ("compute", "communication", "p2p")} | measured
    first, second = verdict(_evaluated(totals))
    assert first == "Best of ours over one setting: **fb-overlap**: `--commfuse-fb-overlap`"
    assert second.startswith("33.3 % shorter than Megatron's order over direct exchanges; ")


def test_five_variants_are_shown_and_the_rest_on_request() -> None:
    totals = {**_TOTALS, **{name: [150.0] * 3 for name in ("collective", "ring", "slices-2",
              "ours-c8", "auto")}}  # fmt: skip
    results = _evaluated(totals)
    assert shown(results) == ["p2p", "ours-c4", "collective", "ring", "auto"]
    short, long = as_markdown({}, results, []), as_markdown({}, results, [], every=True)
    assert "3 more variants were measured; --all shows them." in short
    assert "| slices-2 |" in long
    assert "| slices-2 |" not in short
