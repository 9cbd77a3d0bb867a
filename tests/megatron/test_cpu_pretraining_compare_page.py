"""The page of `--compare`: losses as they are, and a verdict that can say no."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("vl_convert", reason="pictures are optional")

from scripts.cpu_pretraining.compare_page import compare_page, pictures
from scripts.cpu_pretraining.training import Outcome
from tests.tools.report.pages import read

NEXT = math.nextafter(2.5, 3.0)


def _outcomes(fused: float) -> dict[str, Outcome]:
    return {
        "plain": Outcome({1: 5.5, 2: 2.5}, "a" * 64, iteration=2),
        "commfuse": Outcome({1: 5.5, 2: fused}, "a" * 64, iteration=2),
        "megatron": Outcome({1: 5.5, 2: 2.75}, "b" * 64, iteration=2),
    }


def test_losses_and_their_differences() -> None:
    losses, differences = pictures(_outcomes(NEXT))
    assert losses.tables[0].rows == (("1", "5.5", "5.5", "5.5"), ("2", "2.5", "2.5", "2.75"))
    # A bit is seen here.
    assert differences.tables[0].rows == (("1", "0", "0"), ("2", "4.44e-16", "0.25"))


@pytest.mark.parametrize("identical", [True, False])
def test_the_verdict_is_the_printed_one(identical: bool, tmp_path: Path) -> None:
    path = tmp_path / "compare.html"
    compare_page(path, ["--compare"], _outcomes(2.5), identical, ["more"])
    page = read(path)
    said = "are the same" if identical else "are not the same"
    assert f"Plain and fused {said}, bit for bit" in page.text
    assert page.tables[0][1][3] == ["megatron", "2.75", "b" * 64]
