"""The pages of `simulate` and `plan`: what they show is what is printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from commfuse_npu.tools import cli
from tests.tools.report.pages import read

SMALL = ["simulate", "--tp", "2", "--dp", "1", "--micro-batches", "1", "--sequence-lengths"]
SOME = ["--variants", "megatron,coc-2,mc2,kernel-ideal,commfuse-c[12]-l1"]


def _printed(text: str) -> list[list[list[str]]]:
    """The Markdown tables as cells, without marks."""
    tables: list[list[list[str]]] = [[]]
    for line in text.replace("**", "").splitlines():
        if not line.startswith("|"):
            tables.append([])
        elif not line.startswith("|---"):
            tables[-1].append([cell.strip() for cell in line.strip().strip("|").split(" | ")])
    return [table for table in tables if table]


def test_the_page_has_the_numbers_that_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vl_convert")
    path = tmp_path / "page.html"
    assert cli.main([*SMALL, "2048", *SOME, "--html", str(path)]) == 0
    printed = capsys.readouterr().out
    page = read(path)
    assert page.tables[0][1] == _printed(printed)[0]
    first, second = printed.splitlines()[-2:]
    assert first.startswith("Best of ours: commfuse-c")
    assert second in page.text
    titles = [said for _, said in page.headings]
    assert "Where the time of a step goes, 2048 tokens, 8 NPUs" not in titles
    assert titles[2:-1] == [
        "Time of a step, with the range over the machine's uncertainty",
        "Where the time of a step goes, 2048 tokens, 2 NPUs",
        "One layer of one micro-batch, forward then backward",
    ]
    of_layer = [caption for caption, _ in page.tables if "waiting" in caption]
    assert [one.split(": ")[1] for one in of_layer[:2]] == ["plain-mesh", "megatron"]
    assert len(of_layer) == 3


def test_lines_over_what_varies_and_a_note_for_what_is_far_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vl_convert")
    path = tmp_path / "page.html"
    some = ["--variants", "plain-ring,megatron,commfuse-c2-l3", "--tp", "4", "--typical"]
    assert cli.main([*SMALL, "2048", "4096", *some, "--html", str(path)]) == 0
    page = read(path)
    over = next(rows for _, rows in page.tables if rows[0][0].startswith("tokens of a sequence"))
    assert over[0][0] == "tokens of a sequence"
    assert "Far off, not drawn: plain-ring." in page.text
    assert over[0][1:] == ["plain-mesh", "commfuse-c2-l3"]
    assert [row[0] for row in over[1:]] == ["2k", "4k"]


def test_a_few_rows_unless_all_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "2048", "--typical"]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    rows = _printed(printed)[0][1:]
    # Plain, Megatron's order, the best rival, the best of ours and of ours with Megatron's bits.
    assert [row[0].split("-")[0] for row in rows[:3]] == ["plain", "megatron", "mc2"]
    assert len(rows) == 6
    assert rows[-1][0] == "kernel-ideal (ideal bound)"
    assert "more variants were simulated; --all shows them." in printed
    assert cli.main([*words, "--all"]) == 0
    assert len(_printed(capsys.readouterr().out)[0][1:]) > 10


def test_a_plan_as_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vl_convert")
    path = tmp_path / "plan.html"
    words = [
        "plan",
        "--model",
        "llama3_8b",
        "--npus",
        "8",
        "--tp",
        "8",
        "--sequence-length",
        "2048",
    ]
    assert cli.main([*words, "--html", str(path)]) == 0
    printed = capsys.readouterr().out
    page = read(path)
    assert [row[1:] for row in page.tables[0][1]] == [row[1:] for row in _printed(printed)[0]]
    assert [said for _, said in page.headings[2:4]] == [
        "Launch",
        "Time of a step, the best layouts",
    ]
    (recommended,) = [line for line in printed.splitlines() if line.startswith("Recommended: ")]
    assert recommended in page.text
