"""Trainings of a launch: kept one by one, gone on with, failing ones named; and a limit."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from commfuse_npu.tools.launch_script import bounded
from commfuse_npu.tools.measure import trainings
from commfuse_npu.tools.measure.folder import Deadline, Folder
from commfuse_npu.tools.measure.forms import Launches, launches
from commfuse_npu.tools.measure.trainings import BASELINE, read_log, train, trained
from tests.limits import LIMIT

TRAINING = """
import os, sys, time
name = sys.argv[sys.argv.index("--name") + 1]
with open(os.environ["STARTED"], "a") as file:
    file.write(name + "\\n")
if name in os.environ.get("FAILING", "").split():
    raise OSError("liblcal.so: no such file")
if name in os.environ.get("HANGING", "").split():
    time.sleep(600)
if name in os.environ.get("INTERRUPTED", "").split():
    os.kill(os.getppid(), 2)
    time.sleep(600)
iterations = 4 if name in os.environ.get("SHORT", "").split() else 10
for i in range(1, iterations + 1):
    print(f" iteration {i:8d}/      10 | elapsed time per iteration (ms): {100 + i}.0 | throughput "
          f"per GPU (TFLOP/s/GPU): 1.5 | lm loss: 1.{i}E+01 | grad norm: 2.5 |")
print("sha256 of all weights: " + "a" * 64)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "measured", {}, resume=False)


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A launch that prints ten iterations in no time."""
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    monkeypatch.setenv("STARTED", str(tmp_path / "started"))
    return f"{sys.executable} {script}"


def run(launch: str, folder: Folder, limit: float = LIMIT, minutes: float = 60) -> list[str]:
    found: Launches = launches(launch, "cpu", 2, folder.path / "scratch")
    return train(launch, found, folder, Deadline(minutes), first=limit)


ON_CPU = ["megatron", "fb_overlap", "commfuse", "plain"]
"""Forms of the CPU pretraining, in the order in which they are measured."""


def started() -> list[str]:
    path = Path(os.environ["STARTED"])
    return path.read_text().split() if path.exists() else []


def test_each_form_leaves_its_files(launch: str, folder: Folder) -> None:
    assert run(launch, folder) == []
    assert started() == ON_CPU
    assert [one.form.name for one in trained(folder)] == started()
    for one in trained(folder):
        assert one.log is not None
        assert one.log.milliseconds == [100.0 + i for i in range(1, 11)]
        assert one.log.weights == "a" * 64
        path = folder.path / f"launch_{one.form.name}.log"
        assert "iteration" in path.read_text()
        baseline = json.loads((folder.path / f"baseline_{one.form.name}.json").read_text())
        assert baseline["time info"] == one.log.milliseconds
        assert baseline["throughput"] == [1.5] * 10


def test_forms_that_are_kept_are_not_trained_again(launch: str, folder: Folder) -> None:
    run(launch, folder)
    assert run(launch, folder) == []
    assert len(started()) == len(ON_CPU)


def test_launches_are_not_mixed(
    launch: str, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(launch, folder)
    monkeypatch.setenv("INTERRUPTED", "fb_overlap")
    # Who runs the tests in the background may have it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(f"{launch} --num-layers 4", folder)
    finally:
        signal.signal(signal.SIGINT, before)
    assert started()[len(ON_CPU) :] == ["megatron", "fb_overlap"]
    assert [one.form.name for one in trained(folder)] == ["megatron"]


def test_a_form_that_fails_is_named_and_tried_again(
    launch: str, folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("FAILING", "commfuse")
    monkeypatch.setenv("SHORT", "megatron")
    assert run(launch, folder) == ["megatron", "commfuse"]
    failed = {one.form.name: one.failed for one in trained(folder) if one.log is None}
    assert failed["commfuse"].startswith("exit code 1 (")
    assert failed["commfuse"].endswith("OSError: liblcal.so: no such file")
    assert failed["megatron"].startswith("4 of 10 iterations with a loss (")
    assert "OSError: liblcal.so" in capsys.readouterr().err
    assert not (folder.path / "baseline_commfuse.json").exists()
    monkeypatch.delenv("FAILING")
    monkeypatch.delenv("SHORT")
    assert run(launch, folder) == []
    assert started()[len(ON_CPU) :] == ["megatron", "commfuse"]
    assert all(one.log is not None for one in trained(folder))


def test_a_form_that_hangs_is_ended(
    launch: str, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANGING", "megatron")
    monkeypatch.setenv("FAILING", "fb_overlap commfuse plain")
    assert "megatron" in run(launch, folder, limit=2)
    assert trained(folder)[0].failed.startswith("did not end within 2 s; give more with")


def test_others_have_three_times_as_long_as_the_first(
    launch: str, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    def ended(command: Sequence[str], *, log: Path, seconds: float, **_: Any) -> int:
        limits.append(seconds)
        if len(limits) == 1:
            return 1
        line = "iteration {}/ 10 | elapsed time per iteration (ms): 1.0 | lm loss: 1.0 |\n"
        log.write_text("".join(line.format(i) for i in range(10)))
        clock[0] += 20
        return 0

    clock = [0.0]
    monkeypatch.setattr(trainings, "run_bounded", ended)
    monkeypatch.setattr(trainings.time, "monotonic", lambda: clock[0])
    assert run(launch, folder, limit=900) == ["megatron"]
    assert limits == [900, 900, 240, 240]
    # What was kept counts, too.
    assert run(launch, folder, limit=900) == []
    assert limits[4:] == [900]
    # Who gives more knows better.
    (folder.path / "launch_plain.json").unlink()
    found = launches(launch, "cpu", 2, folder.path / "scratch")
    assert train(launch, found, folder, Deadline(60), first=900, limit=1000) == []
    assert limits[5:] == [1000]


def test_no_form_begins_when_the_time_is_over(launch: str, folder: Folder, capsys: Any) -> None:
    assert run(launch, folder, minutes=-1) == ON_CPU
    assert started() == []
    assert capsys.readouterr().err.count("left out, -1 minutes are over") == len(ON_CPU)
    assert {one.failed for one in trained(folder)} == {"left out, -1 minutes are over"}


def test_what_a_launch_leaves_behind_is_ended(tmp_path: Path) -> None:
    """A rank in a session of its own, as torchrun makes them, whose launcher has gone."""
    left = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
    launcher = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {left!r}], start_new_session=True)\n"
        "while not os.path.exists('pid') or not open('pid').read(): time.sleep(0.01)\n"
        "sys.exit(3)\n"
    )
    code = bounded.run_bounded(
        [sys.executable, "-c", launcher],
        folder=tmp_path,
        environment=os.environ,
        log=tmp_path / "log",
        seconds=LIMIT,
    )
    assert code == 3
    stat = Path(f"/proc/{int((tmp_path / 'pid').read_text())}/stat")
    end = time.monotonic() + LIMIT
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end
        time.sleep(0.01)


MINDSPEED_LLM = """\
 [2026-11-22 22:41:45] iteration        1/      10 | elapsed time per iteration (ms): 5578.3 | \
throughput per GPU (TFLOP/s/GPU): 17.5 | core attn ratio (%): 50.0 | lm loss: 8.317678E+00 | \
grad norm: 0.526 | number of nan iterations:   0 |
[Rank 1] (after 1 iterations) memory (MB) | allocated: 10350.45 | max allocated: 10366.5 | \
reserved: 1.0 | max reserved: 2.0
[Rank 0] (after 1 iterations) memory (MB) | allocated: 10350.0 | max allocated: 10370.0 | \
reserved: 1.0 | max reserved: 2.0
 [2026-11-22 22:41:46] iteration        2/      10 | elapsed time per iteration (ms): 473.9 | \
throughput per GPU (TFLOP/s/GPU): 206.0 | lm loss: 8.217678E+00 | grad norm: 0.525 |
most memory taken of a device (MB): 20000.5
"""


def test_a_log_and_its_baseline_of_mindspeed_llm() -> None:
    log = read_log(MINDSPEED_LLM)
    assert log.teraflops == [17.5, 206.0]
    assert (log.peak, log.weights) == (20000.5, None)
    baseline = log.baseline()
    assert tuple(baseline) == BASELINE
    assert baseline["lm loss"] == [8.317678, 8.217678]
    assert baseline["grad norm"] == [0.526, 0.525]
    assert baseline["time info"] == [5578.3, 473.9]
    rank = {"rank": 1, "allocated memory": 10350.45, "max allocated memory": 10366.5}
    assert baseline["memo info"][1] == {**rank, "format": "megatron"}


def test_a_log_of_the_cpu_pretraining() -> None:
    log = read_log(
        " iteration        1/      10 | consumed samples:            4 | elapsed time per "
        "iteration (ms): 98.4 | lm loss: 5.545177E+00 | loss scale: 1.0 | grad norm: 2.310 |\n"
        " validation loss at iteration 1 | lm loss value: 5.000000E+00 |\n"
        f"sha256 of all weights: {'ab' * 32}\n"
    )
    assert (log.losses, log.grad_norms, log.milliseconds) == ([5.545177], [2.31], [98.4])
    assert log.weights == "ab" * 32
    assert log.megabytes == []
