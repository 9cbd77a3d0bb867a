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
from commfuse_npu.tools.measure.deadline import Deadline
from commfuse_npu.tools.measure.folder import Folder
from commfuse_npu.tools.measure.forms import Launches, launches
from commfuse_npu.tools.measure.trainings import train, trained
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


def started() -> list[str]:
    path = Path(os.environ["STARTED"])
    return path.read_text().split() if path.exists() else []


def test_each_form_leaves_its_files(launch: str, folder: Folder) -> None:
    assert run(launch, folder) == []
    assert started() == ["megatron", "commfuse", "flow", "plain"]
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
    assert len(started()) == 4


def test_launches_are_not_mixed(
    launch: str, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(launch, folder)
    monkeypatch.setenv("INTERRUPTED", "commfuse")
    # Who runs the tests in the background may have it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(f"{launch} --num-layers 4", folder)
    finally:
        signal.signal(signal.SIGINT, before)
    assert started()[4:] == ["megatron", "commfuse"]
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
    assert started()[4:] == ["megatron", "commfuse"]
    assert all(one.log is not None for one in trained(folder))


def test_a_form_that_hangs_is_ended(
    launch: str, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANGING", "megatron")
    monkeypatch.setenv("FAILING", "commfuse flow plain")
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
    (folder.path / "launch_flow.json").unlink()
    found = launches(launch, "cpu", 2, folder.path / "scratch")
    assert train(launch, found, folder, Deadline(60), first=900, limit=1000) == []
    assert limits[5:] == [1000]


def test_no_form_begins_when_the_time_is_over(launch: str, folder: Folder, capsys: Any) -> None:
    assert len(run(launch, folder, minutes=-1)) == 4
    assert started() == []
    assert capsys.readouterr().out.count("left out, -1 minutes are over") == 4
    assert {one.failed for one in trained(folder)} == {"left out, the time was over"}


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
