"""A run that fails or does not end leaves a message, and no process."""

from __future__ import annotations

from pathlib import Path

import pytest

from commfuse_npu.tools.launch_script import bounded
from mindspeed_patches.rehearsal import run as runs
from mindspeed_patches.rehearsal.run import Run, RunFailedError, worker_environment
from mindspeed_patches.rehearsal.stack import Stack
from tests.processes import ended, wait_for


def with_torch_npu(folder: Path, code: str, timeout: float) -> Run:
    """A run whose worker imports a torch_npu of this code."""
    package = folder / "path" / "torch_npu"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(code, "utf-8")
    script = folder / "script.py"
    script.touch()
    stack = Stack(folder / "path", folder, folder)
    environment = worker_environment(stack, None, {"OF_THE_LAUNCH": "1"}, folder / "tools")
    return Run(script, 1, folder, environment, timeout)


def test_a_failing_rank_is_quoted(tmp_path: Path) -> None:
    run = with_torch_npu(tmp_path, "import os\nraise ImportError(os.environ['OF_THE_LAUNCH'])", 120)
    with pytest.raises(RunFailedError, match="ImportError: 1") as raised:
        run.start("reference", [], tmp_path / "records")
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
    noted = tmp_path / "noted"
    hanging = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(noted)!r}, 'w').write(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(bounded, "_GRACE", 0.5)
    for limit in (10, 60, 200):  # a busy machine may not have come as far as the hanging
        run = with_torch_npu(tmp_path, hanging, limit)
        with pytest.raises(RunFailedError, match=f"did not end within {limit} s"):
            run.start("reference", [], tmp_path / f"records_{limit}")
        if noted.exists():
            break
    wait_for(lambda: ended(int(noted.read_text("utf-8"))))
