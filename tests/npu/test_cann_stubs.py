"""The generator of stand-ins for CANN, on a small library whose dependency is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_patches.rehearsal import cann_stubs
from mindspeed_patches.rehearsal.cann_stubs import CannStubsError, write_cann_stubs
from tests.launchers.launching import started
from tests.limits import LIMIT

needs_tools = pytest.mark.skipif(
    not all(map(shutil.which, ("cc", "nm"))), reason="install gcc and binutils"
)


def compiled(source: str, library: Path, *options: str) -> str:
    library.parent.mkdir(parents=True, exist_ok=True)
    code = library.with_suffix(".c")
    code.write_text(source)
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(library)]
    subprocess.run([*command, str(code), *options], check=True, timeout=LIMIT)
    return str(library)


@pytest.fixture
def site(tmp_path: Path) -> tuple[Path, Path]:
    """Folders of torch_npu and torch, fake; a library needs libfake_cann.so, which is removed."""
    npu, torch = tmp_path / "torch_npu", tmp_path / "torch"
    gone = compiled("long vendor(void) { return 7; }", tmp_path / "gone" / "libfake_cann.so")
    fake = compiled("long of_torch(void) { return 3; }", torch / "lib/libfake_torch.so")
    compiled("long of_other(void) { return 5; }", npu / "libother.so")
    compiled(
        """
        #include <math.h>
        long vendor(void);
        long of_torch(void);
        long of_other(void);
        long other(void) { return of_other(); }
        long call(void) { return 10 * vendor() + of_torch() + (long)fabs(-1.0); }
        """,
        npu / "lib/libfake_npu.so",
        *(gone, fake, "-lm"),
    )
    Path(gone).unlink()
    return npu, torch


@needs_tools
def test_what_is_missing_is_found_and_replaced(site: tuple[Path, Path], tmp_path: Path) -> None:
    out, (npu, torch) = tmp_path / "stubs", site
    code = (
        f"import ctypes; ctypes.CDLL({str(npu / 'libother.so')!r}, ctypes.RTLD_GLOBAL); "
        f"print(ctypes.CDLL({str(npu / 'lib/libfake_npu.so')!r}).call())"
    )
    path = {**os.environ, "LD_LIBRARY_PATH": f"{out}{os.pathsep}{torch / 'lib'}"}
    assert "libfake_cann.so: cannot open" in started(sys.executable, "-c", code, env=path).stderr
    write_cann_stubs(out, npu, torch)
    assert {file.name for file in out.iterdir()} == {
        "stubs.c",
        "libstand_ins.so",
        "libfake_cann.so",
    }
    source = (out / "stubs.c").read_text()
    assert '"vendor"' in source
    assert '"of_torch"' not in source, "what torch defines is not replaced"
    assert '"of_other"' not in source, "nor what another library of torch_npu defines"
    called = started(sys.executable, "-c", code, env=path).stdout
    assert called == "4\n", "10 * 0 + 3 of torch + 1 of libm"


@needs_tools
def test_a_compiler_that_fails_is_quoted(site, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(cann_stubs, "_source", lambda symbols: "this is no C")
    with pytest.raises(CannStubsError, match=r"(?s)cc.*non-zero exit status 1.*error"):
        write_cann_stubs(tmp_path / "stubs", *site)


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch) -> None:
    file = Path(cann_stubs.__file__)
    run = started(sys.executable, "-S", str(file), str(tmp_path), env={})
    assert run.returncode == 2
    assert re.match("cann_stubs: .* has no torch_npu; install it", run.stderr)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CannStubsError, match=r"nm is not on the PATH.*nm in binutils"):
        write_cann_stubs(tmp_path / "stubs", tmp_path, tmp_path)
