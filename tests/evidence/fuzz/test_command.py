"""`python -m scripts.evidence fuzz`: how cases are shared out, what it prints, when it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.evidence import fuzz
from tests.evidence.fuzz.alone import complaints_alone
from tests.evidence.fuzz.campaign import Compare, Figures
from tests.evidence.fuzz.case import Layer, Network
from tests.evidence.fuzz.compare import complaints
from tests.one_device.ranks import RanksOfOneDevice

CASE = Network(2, (Layer("linear_reduce_scatter"),))


@pytest.mark.parametrize("cases", [1, 10, 333, 10_000])
def test_every_case_is_run_once(cases: int) -> None:
    assert sum(fuzz.shares(cases).values()) == cases


@pytest.mark.parametrize("one_device", [False, True])
@pytest.mark.parametrize("failing", [0, 3])
def test_figures_and_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any, failing: int, one_device: bool
) -> None:
    def made_up(group: Any, cases: int, seed: int, compare: Compare) -> Figures:
        assert seed == 7
        assert isinstance(group, RanksOfOneDevice) == one_device
        assert compare is (complaints_alone if one_device else complaints)
        figures = Figures(cases=cases, seconds=cases / 4)
        figures.tried.update({("op", "sharded_linear"): cases, ("chunks", "2"): 1})
        if group.size == failing:
            figures.smallest, figures.failure = CASE, f"wrong: {CASE!r}"
        return figures

    monkeypatch.setattr(fuzz, "campaign", made_up)
    file = tmp_path / "page.md"
    words = ["--one-device"] * one_device
    code = fuzz.main(["--cases", "200", "--seed", "7", "--markdown", str(file), *words])
    said = capsys.readouterr().out
    assert code == int(failing > 0)
    assert "seed 7" in said
    assert (f"wrong: {CASE!r}" in said) == (failing > 0)
    text = file.read_text("utf-8")
    assert text.startswith("<!-- begin: fuzz -->")
    assert f"`python -m scripts.evidence fuzz {' '.join(['--cases 200 --seed 7', *words])}`" in text
    assert "200 different cases in 50 s" in text
    assert ("1 failure." in text) == (failing > 0)
    assert f"| 3 | 30 | 8 | 4.0 | {int(failing == 3)} |" in text
    assert "| op | sharded_linear 200 |" in text


def test_another_seed_each_time_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    seeds = []
    monkeypatch.setattr(
        fuzz, "campaign", lambda group, cases, seed, compare: seeds.append(seed) or Figures()
    )
    for _ in range(2):
        fuzz.main(["--cases", "1"])
        assert f"seed {seeds[-1]}" in capsys.readouterr().out
    assert seeds[0] != seeds[1]


def test_one_case(capsys: Any) -> None:
    assert fuzz.main(["--case", repr(CASE)]) == 0
    assert "fused is plain" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--cases", "0"], ["--case", "Network("]])
def test_bad_arguments_are_refused(arguments: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit):
        fuzz.main(arguments)
    assert arguments[0] in capsys.readouterr().err
