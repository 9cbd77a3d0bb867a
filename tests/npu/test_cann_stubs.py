"""Stand-ins for CANN are written anew for the real torch_npu, which imports with them."""

import os
import re
import sys
from pathlib import Path

import pytest

from mindspeed_patches.rehearsal import cann_stubs
from mindspeed_patches.rehearsal.cann_stubs import write_cann_stubs
from tests.launchers.launching import started
from tests.npu.worker import ENVIRONMENT, why_not


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_torch_npu_imports_with_them(tmp_path: Path) -> None:
    python = str(ENVIRONMENT / "bin/python")
    settings = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "LD_LIBRARY_PATH": str(tmp_path)}
    environment = {name: os.environ[name] for name in ("PATH", "HOME")} | settings
    code = "import torch, torch_npu; torch.ops.npu.npu_fusion_attention.default"
    assert "cannot open shared" in started(python, "-c", code, env=environment).stderr
    written = started(python, cann_stubs.__file__, str(tmp_path), env=environment)
    assert written.returncode == 0, written.stderr
    imported = started(python, "-c", code, env=environment)
    assert imported.returncode == 0, imported.stderr
    replaced = re.findall(r'"(\w+)"', (tmp_path / "stubs.c").read_text())
    # The interpreter, torch, and another library of torch_npu define the last three.
    names = (
        "aclrtMalloc",
        "PyBool_FromLong",
        "_ZN3c106Device8validateEv",
        "_ZN3tng6Status7SuccessEv",
    )
    assert [name in replaced for name in names] == [True, False, False, False]


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch) -> None:
    run = started(sys.executable, "-S", cann_stubs.__file__, str(tmp_path), env={})
    assert run.returncode == 1
    assert re.match("cann_stubs: .* has no torch_npu; install it", run.stderr)
    with pytest.raises(SystemExit, match=r"(?s)sh.*non-zero exit status 1.*an error"):
        cann_stubs._run("sh", "-c", "echo an error; exit 1")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match=r"nm is not on the PATH.*nm in binutils"):
        write_cann_stubs(tmp_path / "stubs", tmp_path, tmp_path)
