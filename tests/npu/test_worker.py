"""The process with torch_npu: what goes wrong in it fails a test, and only that one."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.npu import worker as module


def wrong() -> None:
    raise LookupError("wrong over there")


def lost() -> None:
    os._exit(3)


@pytest.mark.long
def test_errors_deaths_and_hangs_fail_the_test_and_the_next_call_works(npu_pair) -> None:
    worker = npu_pair[0]
    assert worker.run(os.path.basename, "a/b") == "b"
    process = worker.run(os.getpid)
    with pytest.raises(
        pytest.fail.Exception, match=r"(?s)in the worker, wrong.*LookupError: wrong"
    ):
        worker.run(wrong)
    assert worker.run(os.getpid) == process
    with pytest.raises(pytest.fail.Exception, match=r"the worker died in lost\(\)"):
        worker.run(lost)
    assert worker.run(os.getpid) != process
    with pytest.raises(pytest.fail.Exception, match=r"sleep\(60,\) takes longer than 0.5 s"):
        worker.run(time.sleep, 60, timeout=0.5)


def test_without_the_environment_the_reason_names_the_command(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "ENVIRONMENT", tmp_path / "venv-npu")
    reason = module.why_not()
    assert reason is not None
    assert "bash scripts/test.sh tests/npu" in reason
    for part in (".installed-npu", "cann/stubs.json", "bin/python"):
        path = tmp_path / "venv-npu" / part
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert module.why_not() is None
