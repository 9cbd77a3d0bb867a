"""A training of a launch: its files, its failures, its time limit, and parsing of its log."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from commfuse_npu.tools.launch_script import bounded
from commfuse_npu.tools.measure.launches import FORMS, launches
from commfuse_npu.tools.measure.trainings import TrainingError, limit_of, read_log, train
from tests.limits import LIMIT
from tests.processes import ended, wait_for
from tests.tools.measure.trainings import launch


def test_a_form_leaves_its_files(tmp_path: Path, monkeypatch) -> None:
    plan = launches(launch(tmp_path, monkeypatch), "cpu", 2, tmp_path / "scratch")
    log = train(FORMS[0], plan, tmp_path, LIMIT)
    assert log.milliseconds == [100.0 + i for i in range(1, 11)]
    assert log.steady == log.milliseconds[3:]
    assert log.weights == "a" * 64
    assert "iteration" in (tmp_path / "launch_megatron.log").read_text()


@pytest.mark.parametrize(
    ("how", "limit", "first", "last"),
    [
        ("fails", LIMIT, "exit code 1 (", "OSError: liblcal.so: no such file"),
        ("short", LIMIT, "4 of 10 iterations with a loss (", "sha256 of all weights: " + "a" * 64),
        ("hangs", 0.5, "did not end within 0 s; give more with --timeout (", ""),
    ],
)
def test_a_form_that_fails_says_why(
    tmp_path: Path, monkeypatch, how: str, limit: float, first: str, last: str
) -> None:
    line = launch(tmp_path, monkeypatch, megatron=how)
    with pytest.raises(TrainingError) as failed:
        train(FORMS[0], launches(line, "cpu", 2, tmp_path / "scratch"), tmp_path, limit)
    lines = str(failed.value).splitlines()
    assert lines[0].startswith(first)
    assert lines[-1].endswith(last)


def test_others_have_three_times_as_long_as_the_first() -> None:
    assert [limit_of(longest, 900) for longest in (0.0, 20.0, 400.0)] == [900, 240, 900]


def test_what_a_launch_leaves_behind_is_ended(tmp_path: Path) -> None:
    """A rank in its own session, as torchrun starts them, whose launcher has exited."""
    orphan = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
    launcher = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {orphan!r}], start_new_session=True)\n"
        "while not os.path.exists('pid') or not open('pid').read(): time.sleep(0.01)\n"
        "sys.exit(3)\n"
    )
    words, log = [sys.executable, "-c", launcher], tmp_path / "log"
    options = {"folder": tmp_path, "environment": os.environ, "log": log, "seconds": LIMIT}
    assert bounded.run_bounded(words, **options) == 3
    wait_for(lambda: ended(int((tmp_path / "pid").read_text())))


def test_logs_of_mindspeed_llm_and_of_the_cpu_pretraining() -> None:
    log = read_log(
        " [2026-11-22 22:41:45] iteration        1/      10 | elapsed time per iteration (ms): "
        "5578.3 | throughput per GPU (TFLOP/s/GPU): 17.5 | lm loss: 8.317678E+00 | grad norm: 0.5 |"
        "\nmost memory taken of a device (MB): 20000.5\n"
        " iteration        2/      10 | consumed samples:            4 | elapsed time per "
        "iteration (ms): 98.4 | lm loss: 5.545177E+00 | loss scale: 1.0 | grad norm: 2.310 |\n"
        " validation loss at iteration 1 | lm loss value: 5.000000E+00 |\n"
    )
    assert (log.losses, log.milliseconds) == ([8.317678, 5.545177], [5578.3, 98.4])
    assert (log.peak, log.weights) == (20000.5, None)
