"""What is missing to make stand-ins for CANN.  Those made are used by the other tests here."""

from pathlib import Path

import pytest

from mindspeed_patches.rehearsal import cann_stubs


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(SystemExit, match=r"(?s)sh.*non-zero exit status 1.*an error"):
        cann_stubs._run("sh", "-c", "echo an error; exit 1")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match=r"'nm', and .*nm in binutils"):
        cann_stubs.write_cann_stubs(tmp_path / "stubs", tmp_path, tmp_path)
