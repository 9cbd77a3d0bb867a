"""docs/simulate.md says of every figure of a description whether it is measured."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from commfuse_npu.config_file import find_config
from commfuse_npu.hardware.description import Hardware
from commfuse_npu.tools.measure.figures import Peaks, figures
from commfuse_npu.tools.measure.steps import STEPS

TEXT = (Path(__file__).parents[3] / "docs" / "simulate.md").read_text("utf-8")
ROWS = re.findall(r"^\| (`\w+\.\w+`.*?) \| (.*) \|$", TEXT, re.MULTILINE)


def names(of: str) -> set[str]:
    return set(re.findall(r"`(\w+\.\w+)`", of))


def test_every_figure_has_a_row() -> None:
    described = Hardware.load(find_config("ascend_910b_roce", "hardware")).figures
    found = [name for figure, _ in ROWS for name in names(figure)]
    assert sorted(found) == sorted(described)


@pytest.mark.parametrize("peaks", [Peaks(20, 3e14, 1.6e12, 2.8e10), Peaks(0, 0.0, 0.0, 0.0)])
def test_rows_are_of_what_is_made_of_measurements(peaks: Peaks) -> None:
    seconds = [1e-3]
    gemm = {"layer": "fc1", "rows": 8192, "inputs": 256, "outputs": 2048, "seconds": seconds}
    run = {"queries": 1024, "keys": 1024, "heads": 1, "of": 64, "seconds": seconds}
    exchange = {"gemm": 1e-3, "exchange": 1e-3, "gemm beside": 1e-3, "both": 2e-3}
    measured: dict[str, list[dict[str, Any]]] = {
        "links": [
            {"bytes": 8, "lanes": 1, "half a ping-pong": True, "seconds": seconds},
            {"bytes": 1 << 20, "lanes": 1, "seconds": seconds},
        ],
        "gemms": [gemm, {**gemm, "rows": 4096, "seconds": [6e-4]}],
        "host": [{"what": "batch", "seconds": seconds}],
        "beside": [{"what": what, "seconds": [one]} for what, one in exchange.items()],
        "memory": [{"what": "copy", "numbers": 1000, "seconds": seconds}],
        "communicators": [{"MB of a buffer": 200, "bytes taken": 4, "seconds": seconds}],
        "attention": [run, {**run, "queries": 512, "seconds": [9e-4]}],
    }
    made = set(figures(measured, peaks))
    rows = [figure for figure, by in ROWS if not by.startswith("no")]
    claimed = {name for figure in rows for name in names(figure)}
    on_npus = {"npu.gemm_start", "host.message_copies", "inside.beside_work"}
    here = on_npus if not peaks.cores else set()
    assert made == claimed - here


def test_every_step_is_in_the_text() -> None:
    section = TEXT[TEXT.index("Which figures are your machine's?") : TEXT.index("How well does it")]
    for step in STEPS:
        assert f"`{step}`" in section
