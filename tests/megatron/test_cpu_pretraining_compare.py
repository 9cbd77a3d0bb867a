"""The verdict of `--compare`: it must be able to say False."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from scripts.cpu_pretraining import compare as compare_module
from scripts.cpu_pretraining.interrupt import StopRequest
from scripts.cpu_pretraining.training import Outcome

NEXT = math.nextafter(2.5, 3.0)


@pytest.mark.parametrize(
    ("fused", "code"),
    [
        (Outcome({1: 2.5}, "same", ["  qkv: 8 forward calls fused"], iteration=1), 0),
        (Outcome({1: NEXT}, "same", iteration=1), 1),
        (Outcome({1: 2.5}, "other", iteration=1), 1),
    ],
    ids=["equal", "one bit of one loss", "weights"],
)
def test_one_differing_bit_is_reported(
    fused: Outcome,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    reference = Outcome({1: 2.5}, "same", iteration=1)

    def train(*_: Any, mode: str, **__: Any) -> Outcome:
        return fused if mode == "commfuse" else reference

    given = argparse.Namespace(html=None, commfuse_fb_overlap=False)

    monkeypatch.setattr(compare_module, "train", train)
    monkeypatch.setattr(compare_module.dist, "get_rank", lambda: 0)
    corpus: Any = None
    answer = compare_module.compare(given, corpus, tmp_path, StopRequest())
    lines = capsys.readouterr().out.splitlines()
    assert answer == code
    assert lines[-1] == f"identical: {code == 0}"
    assert all(f"commfuse: {line}" in lines for line in fused.linears)


@pytest.mark.parametrize(("weights", "code"), [("megatron's", 0), ("other", 1)])
def test_an_overlap_has_to_have_megatrons_bits(
    weights: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def train(*_: Any, mode: str, overlap: bool, **__: Any) -> Outcome:
        own = {"megatron": weights if overlap else "megatron's"}
        return Outcome({1: 2.5}, own.get(mode, "fused"), iteration=1)

    monkeypatch.setattr(compare_module, "train", train)
    monkeypatch.setattr(compare_module.dist, "get_rank", lambda: 0)
    given, corpus = argparse.Namespace(html=None, commfuse_fb_overlap=True), Any
    answer = compare_module.compare(given, corpus, tmp_path, StopRequest())  # type: ignore[arg-type]
    assert answer == code
    assert capsys.readouterr().out.splitlines()[-1] == f"identical: {code == 0}"


def test_interrupted_comparison_gives_no_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(
        compare_module, "train", lambda *_, **__: Outcome({1: 2.5}, stopped_by=2, iteration=1)
    )
    monkeypatch.setattr(compare_module.dist, "get_rank", lambda: 0)
    corpus: Any = None
    given = argparse.Namespace(html=None, commfuse_fb_overlap=False)
    answer = compare_module.compare(given, corpus, tmp_path, StopRequest())
    assert answer == 130
    assert "identical" not in capsys.readouterr().out
