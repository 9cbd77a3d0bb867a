"""A run that fails or does not end leaves a message, and no process."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from commfuse_npu.tools.launch_script import bounded
from mindspeed_patches.rehearsal import run as runs
from mindspeed_patches.rehearsal.run import Run, RunFailedError, run_script


def prepared(tmp_path: Path, timeout: float, **environment: str) -> Run:
    script = tmp_path / "script.py"
    script.touch()
    return Run(script, 1, tmp_path, {**os.environ, **environment}, timeout)


def test_a_failing_rank_is_quoted(tmp_path: Path) -> None:
    # A package that the worker imports first and that fails.
    broken = tmp_path / "path" / "torch_npu"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('as arranged')\n", "utf-8")
    path = os.pathsep.join([str(tmp_path / "path"), str(runs._PROJECT)])
    run = prepared(tmp_path, 120, PYTHONPATH=path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    with pytest.raises(RunFailedError, match="as arranged") as raised:
        run_script(run, "reference", [], tmp_path / "records")
    assert "0 of 1 ranks" in str(raised.value)


def test_what_is_quoted_is_the_first_rank_that_failed(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(
        "started\n"
        "[rank1]: Traceback (most recent call last):\n"
        "[rank0]: Traceback (most recent call last):\n"
        "[rank1]: NotImplementedError: Could not run 'npu::npu_some_op' with the 'CPU' backend\n"
        "[rank0]: RuntimeError: the other one has gone\n"
        "[rank1]: CPU: registered at somewhere.cpp:1 [kernel]\n"
        "  frame #0: c10::Error\n"
        "Traceback (most recent call last):\n"
        '  File "/x/torch/distributed/run.py", line 1\n',
        "utf-8",
    )
    first, error, hint = runs._tail(log).splitlines()
    assert first.strip() == "Traceback (most recent call last):"
    assert "npu_some_op" in error
    assert "npu::npu_some_op has no CPU kernel" in hint


@pytest.mark.long
def test_a_run_without_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = tmp_path / "path" / "torch_npu"
    hanging.mkdir(parents=True)
    noted = tmp_path / "noted"
    (hanging / "__init__.py").write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(noted)!r}, 'w').write(str(os.getpid()))\n"
        "time.sleep(600)\n",
        "utf-8",
    )
    monkeypatch.setattr(bounded, "_GRACE", 0.5)
    path = os.pathsep.join([str(tmp_path / "path"), str(runs._PROJECT)])
    for limit in (10, 60, 200):  # a busy machine may not have come as far as the hanging
        run = prepared(tmp_path, limit, PYTHONPATH=path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
        with pytest.raises(RunFailedError, match=f"did not end within {limit} s"):
            run_script(run, "reference", [], tmp_path / f"records_{limit}")
        if noted.exists():
            break
    pid = int(noted.read_text("utf-8"))
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or "Z" in _state(pid):
            return
        time.sleep(0.1)
    pytest.fail(f"process {pid} is still there")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"
