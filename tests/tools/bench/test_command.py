"""The command with real processes: its output and files, and that no process is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path

import pytest

from commfuse_npu.tools.ranks import Ranks, RanksError
from tests.limits import LIMIT
from tests.processes import ended, interruptible, wait_for
from tests.tools.answers import answer

_SMALL = ["--scale", "64", "--sequence", "64", "--works", "reduce-scatter", "--ranks", "2"]


def test_a_small_run_from_options_to_report(tmp_path: Path, capsys) -> None:
    some = ["--variants", "coc-2,ours-c2", "--ratios", "0,1", "--rounds", "1", "--sequence", "70"]
    report = answer(tmp_path, "bench", "--quick", *_SMALL, *some)
    paced = report["results"][0]["link"] == "mesh"
    assert [(row["ratio"], row["variant"]) for row in report["results"]] == [
        (ratio, name)
        for ratio in ((0.0, 1.0) if paced else (0.0,))
        for name in ("p2p", "coc-2", "ours-c2")
    ]
    assert report["machine"]["link measured"]
    note = "--sequence 70: 64 rows on 2 ranks, where a rank's block is a multiple of 16"
    assert note in report["machine"]["notes"]
    tables = len(report["results"]) // 3
    assert capsys.readouterr().out.replace("**", "").count("| ours-c2 |") == tables


def test_ranks_are_ended_when_one_cannot_start() -> None:
    nowhere, before = "no_such_module:Worker", multiprocessing.active_children()
    with (
        pytest.raises(RanksError, match=r"of 2 failed in starting:\n[\s\S]*no_such_module"),
        Ranks(2, device="cpu", timeout=LIMIT, worker=nowhere),
    ):
        pass
    assert multiprocessing.active_children() == before


def test_ctrl_c_leaves_no_process_behind() -> None:
    command = [sys.executable, "-m", "commfuse_npu.tools.cli", "bench", *_SMALL]
    process = interruptible([*command, "--rounds", "100000"], start_new_session=True)
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        # Two starting ranks and the resource tracker of multiprocessing.
        wait_for(lambda: len(listed.read_text().split()) >= 3)
        children = [int(pid) for pid in listed.read_text().split()]
        # To the whole group, as a terminal does.
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=LIMIT)
        assert process.returncode == 130
        wait_for(lambda: all(map(ended, children)))
    finally:
        process.kill()
        process.wait()
