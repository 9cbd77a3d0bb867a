"""``commfuse-npu simulate``: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commfuse_npu.tools import cli

QUICK = ["simulate", "--typical", "--variants", "megatron,commfuse-c2*", "--micro-batches", "1"]


def steps(tmp_path: Path, *words: str) -> dict[str, float]:
    """Seconds by variant."""
    out = tmp_path / "out.json"
    assert cli.main([*QUICK, "--sequence-lengths", "4096", "--json", str(out), *words]) == 0
    (point,) = json.loads(out.read_text())["points"]
    return {one["variant"]: one["step"]["typical"] for one in point["variants"]}


def test_options_of_the_machine_cost_what_they_say(tmp_path: Path) -> None:
    cheap, dear = (steps(tmp_path, "--post-us", us) for us in ("15", "60"))
    assert cheap["megatron"] == dear["megatron"]
    assert cheap["commfuse-c2-l7"] < dear["commfuse-c2-l7"]
    fast, slow = (steps(tmp_path, "--launch-us", us) for us in ("15", "200"))
    # Both are the host's then: of a layer 66 launches and 40 events, and more of ours.
    assert fast["megatron"] < slow["megatron"] < slow["commfuse-c2-l7"]
    # The sums of collectives, not of programs, which are in an order anyhow.
    given = ("--variants", "plain-mesh,mc2", "--tp", "4")
    any_order, ordered = (steps(tmp_path, *given, *more) for more in ((), ("--deterministic",)))
    for name in ("plain-mesh", "mc2"):
        assert ordered[name] > any_order[name]


def test_tables_and_json(capsys, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    lengths = ["--sequence-lengths", "2048", "4096"]
    options = ["simulate", "--variants", "commfuse-c2-l7", "--micro-batches", "1"]
    assert cli.main([*options, *lengths, "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "Simulated, not measured." in text
    assert text.count("## sequence") == 2
    assert "commfuse-c2-l7" in text
    content = json.loads(out.read_text())
    assert content["simulated"] is True
    assert content["hardware"]["figures"]["inside.rate"]["source"]
    first = content["points"][0]
    assert [variant["variant"] for variant in first["variants"]] == ["plain-mesh", "commfuse-c2-l7"]
    for variant in first["variants"]:
        for name in ("step", "mfu", "tokens", "exposed"):
            figure = variant[name]
            assert 0 < figure["low"] <= figure["typical"] <= figure["high"]
    plain, fused = first["variants"]
    assert plain["shorter"]["high"] == 0.0 < fused["memory_bytes"]
    ratio = fused["step"]["typical"] / plain["step"]["typical"]
    assert fused["shorter"]["typical"] == pytest.approx(1 - ratio)


def test_numbers_of_npus(capsys) -> None:
    options = ["--model", "llama3_70b", "--hardware", "ascend_910b_roce", "--npus", "32", "256"]
    assert cli.main([*QUICK, *options, "--sequence-lengths", "4096"]) == 0
    text = capsys.readouterr().out
    assert "DP 1, 8" in text
    assert "sequence 4096, 256 NPUs" in text
