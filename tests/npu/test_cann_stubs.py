"""What is missing to make stand-ins for CANN.  Those made are used by the other tests here."""

import re
import sys
from pathlib import Path

import pytest

from mindspeed_patches.rehearsal import cann_stubs
from tests.launchers.launching import started


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch) -> None:
    run = started(sys.executable, "-S", cann_stubs.__file__, str(tmp_path), env={})
    assert run.returncode == 1
    assert re.match("cann_stubs: .* has no torch_npu; install it", run.stderr)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("libplugin.so", "ldd"):
        (tmp_path / name).write_text("#!/bin/sh\necho an error; exit 1\n")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(SystemExit, match=r"(?s)ldd.*non-zero exit status 1.*an error"):
        cann_stubs.write_cann_stubs(tmp_path / "stubs", tmp_path, tmp_path)
    (tmp_path / "ldd").write_text("#!/bin/sh\n")
    with pytest.raises(SystemExit, match=r"nm is not on the PATH.*nm in binutils"):
        cann_stubs.write_cann_stubs(tmp_path / "stubs", tmp_path, tmp_path)
