"""Forms of a layer in rounds, and their table."""

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from commfuse_npu.tools import ranks as module
from commfuse_npu.tools.measure.measuring_steps import Times
from commfuse_npu.tools.ranks import RanksError
from scripts.evidence.measured import __main__, rounds
from scripts.evidence.measured.__main__ import table
from scripts.evidence.measured.rounds import Sample, time_forms
from scripts.evidence.measured.works import REFERENCE, WORKS, scale_of
from tests.distributed.ranks import forkserver

TOTALS = {
    "compute": [0.1, 0.1, 0.13],
    "p2p": [0.2, 0.21, 0.19],
    "slices-4": [0.25, 0.24, 0.26],
    "ours-c4": [0.12, 0.125, 0.115],
    "auto": [0.15, 0.15, 0.15],
}


def timed(reached: float | None = 0.96, **totals: list[float]) -> Times:
    """Rows from seconds, which override or extend :data:`TOTALS`; a tenth is blocked."""
    return [
        {
            "form": name,
            "reached": reached,
            "difference": 2.5e-6 if name == "auto" else 0.0,
            "seconds": seconds,
            "blocked": [total / 10 for total in seconds],
        }
        for name, seconds in (TOTALS | totals).items()
    ]


@pytest.mark.parametrize(("work", "collectives"), [("mlp", 5), ("layers", 20)])
def test_what_a_pair_exchanges(work: str, collectives: int) -> None:
    assert WORKS[work].bytes_per_pair(scale_of("llama3_8b", 2)) == 1024 * 512 * 4 * collectives
    assert scale_of("llama3_8b", 3).rows == 2016


class Asked:
    """Stands in for two ranks: rank 1 takes longer, waits longer and differs more."""

    def __init__(self, problem: str = "") -> None:
        self.problem, self.calls, self.orders = problem, list[tuple[str, Any]](), list[list[str]]()

    def __call__(self, method: str, *args: Any) -> list[Any]:
        self.calls.append((method, args[-1]))
        if method == "round":
            (order,) = args
            self.orders.append(list(order))
            totals = [TOTALS.get(form, [0.3])[0] for form in order]
            return [[Sample(t * k, t * k / 10) for t in totals] for k in (0.5, 1.0)]
        if method == "check":
            return [0.0, 0.0 if args[0] == REFERENCE else 1e-6]
        answers = {"pace": ["", self.problem], "messages": [[0.04], [0.0625]]}
        return answers.get(method, [None, None])

    def of(self, *methods: str) -> list[tuple[str, Any]]:
        return [call for call in self.calls if call[0] in methods]


def test_forms_are_checked_and_timed_in_shuffled_rounds(monkeypatch) -> None:
    monkeypatch.setattr(rounds.os, "cpu_count", lambda: 2)
    asked, scale = Asked(), scale_of("llama3_8b", 2)
    rows = time_forms(asked, scale, "mlp", 0.5, ["ours-c4", "auto"], 5)
    names = ["compute", "p2p", "ours-c4", "auto"]
    assert [row["form"] for row in rows] == names
    assert asked.calls[0] == ("set_up", None), "real GEMMs: a core for each rank"
    rate = WORKS["mlp"].bytes_per_pair(scale) / (0.5 * 0.1)
    paced = [argument for _, argument in asked.of("pace")]
    assert paced == [pytest.approx(rate), None]
    order = [method for method, _ in asked.calls]
    assert order[:4] == ["set_up", "round", "pace", "messages"]
    assert order[4:] == [*["check"] * 3, *["round"] * 5, "pace"]
    drawn = asked.orders[1:]
    assert all(sorted(names_of) == sorted(names) for names_of in drawn)
    assert len(set(map(tuple, drawn))) > 1
    ours = rows[2]
    assert (ours["seconds"], ours["difference"]) == ([0.12] * 5, 1e-6)
    # The mean of both ranks.
    assert ours["blocked"] == pytest.approx([0.009] * 5)
    # A message of a twentieth of a second took a sixteenth.
    assert ours["reached"] == pytest.approx(min(rate / 20, 1 << 24) / 0.0625 / rate)


def test_gemms_of_more_ranks_than_cores_sleep(monkeypatch) -> None:
    monkeypatch.setattr(rounds.os, "cpu_count", lambda: 1)
    asked = Asked()
    rows = time_forms(asked, scale_of("llama3_8b", 2), "layers", 0.0, ["megatron"], 1)
    assert asked.calls[0] == ("set_up", 15.0)
    assert [row["form"] for row in rows] == ["compute", "p2p", "megatron"]
    assert not asked.of("pace", "messages")


def test_links_that_get_no_rate_are_an_error_with_a_way_out() -> None:
    asked = Asked("the kernel refuses")
    with pytest.raises(RanksError, match=r"rate: the kernel refuses; run on .* --ratios 0"):
        time_forms(asked, scale_of("llama3_8b", 2), "mlp", 1.0, [], 1)


def test_the_table_has_a_row_per_form() -> None:
    assert table(timed(auto=[0.11] * 3))[1:] == [
        "| p2p | 1.00x | - | - | equal |",
        "| slices-4 | 0.80x | -50 % | -25 % | equal |",
        "| ours-c4 | 1.67x | 80 % | 40 % | equal |",
        "| **auto** | 1.82x | 90 % | 45 % | 2.5e-06 |",
        "\nA message alone reached 96 % of the rate that links were given.",
    ]
    # Without a rate nothing is removed and no share of it is reached.
    assert table(timed(None))[2:] == [
        "| slices-4 | 0.80x | - | - | equal |",
        "| **ours-c4** | 1.67x | - | - | equal |",
        "| auto | 1.33x | - | - | 2.5e-06 |",
    ]
    # The reference takes no longer than the computation: nothing to remove.
    assert "| ours-c4 | 0.75x | - | -33 % | equal |" in table(timed(p2p=[0.09] * 3))


def test_the_command_prints_a_table_per_ratio(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(module, "_context", forkserver)
    scale = replace(scale_of("llama3_8b", 2), rows=64, shrink=32)
    monkeypatch.setattr(__main__, "scale_of", lambda *_: scale)
    words = ["--works", "mlp", "--rounds", "1", "--forms", "slices-2,ours-c4,auto"]
    assert __main__.main([*words, "--ratios", "1,0", "--json", str(tmp_path / "a.json")]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^## (.+)$", out, re.M) == [f"mlp, 2 ranks, ratio {at}" for at in "01"]
    names = ["compute", "p2p", "slices-2", "ours-c4", "auto"]
    rows = json.loads((tmp_path / "a.json").read_text("utf-8"))
    assert [(row["ratio"], row["form"]) for row in rows] == [*product((0.0, 1.0), names)]
    for name in names[1:]:
        assert len(re.findall(rf"^\| (?:\*\*)?{name}(?:\*\*)? \| \d", out, re.M)) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--works mlp,mpl", "'mpl' is unknown; choose from mlp, layers"),
        ("--ratios nan", "--ratios: 'nan': ratios are numbers from 0 to 100"),
        ("--config no_such", "'no_such' is neither a file nor one of"),
    ],
)
def test_bad_options_are_refused_in_a_line(words: str, said: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        __main__.main(words.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
