"""The command with real processes: what it prints and writes, and that it leaves none behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commfuse_npu.tools import cli
from commfuse_npu.tools.bench.processes import Ranks, RanksError

_SMALL = ["--scale", "64", "--sequence", "64", "--works", "reduce-scatter", "--ranks", "2"]


def _alive(pid: int) -> bool:
    try:
        # A zombie is gone too: it waits for its parent only.
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_small_run_from_options_to_report(tmp_path: Path, capsys) -> None:
    written, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    out = ["--json", str(written), "--plot", str(picture)]
    some = ["--variants", "coc-2,ours-c2", "--ratios", "0,1", "--rounds", "1"]
    assert cli.main(["bench", "--quick", *_SMALL, *some, *out]) == 0
    text = capsys.readouterr().out
    report = json.loads(written.read_text())
    rows = [(row["ratio"], row["variant"]) for row in report["results"]]
    variants = ("p2p", "coc-2", "ours-c2")
    paced = report["results"][0]["link"] == "mesh"
    assert rows == [
        (ratio, name) for ratio in ((0.0, 1.0) if paced else (0.0,)) for name in variants
    ]
    assert report["machine"]["link measured"]
    assert text.count("| ours-c2 |") + text.count("| **ours-c2** |") == len(rows) // 3
    assert picture.stat().st_size > 10_000


def test_ranks_are_ended_when_one_fails() -> None:
    with Ranks(2, device="cpu", timeout=60) as ranks:
        pids = ranks.pids
        assert all(map(_alive, pids))
        pacing = ranks.ask("pace", 50e6)
        assert all(found.sockets or found.problem for found in pacing)
        with pytest.raises(RanksError, match="failed in no_such_question:"):
            ranks.ask("no_such_question")
    assert not any(map(_alive, pids))


def test_ctrl_c_leaves_no_process_behind() -> None:
    command = [
        sys.executable,
        "-m",
        "commfuse_npu.tools.cli",
        "bench",
        *_SMALL,
        "--rounds",
        "100000",
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # A job in the background is started with Ctrl-C ignored, and hands that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        end = time.monotonic() + 60
        children: list[int] = []
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        # Two ranks and the resource tracker of multiprocessing.
        while len(children) < 3 and time.monotonic() < end:
            time.sleep(0.1)
            children = [int(pid) for pid in listed.read_text().split()]
        assert len(children) >= 3
        time.sleep(1.0)  # anywhere in the start
        # To the whole group, as a terminal does.
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode == 130
        time.sleep(0.2)
        assert not any(map(_alive, children))
    finally:
        process.kill()
        process.wait()
