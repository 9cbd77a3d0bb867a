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
    not all(map(shutil.which, ("gcc", "nm"))), reason="install gcc and binutils"
)


def compiled(source: str, library: Path, *options: str) -> Path:
    library.parent.mkdir(parents=True, exist_ok=True)
    code = library.with_suffix(".c")
    code.write_text(source)
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(library)]
    subprocess.run([*command, str(code), *options], check=True, timeout=LIMIT)
    return library


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Fake torch and torch_npu, whose library needs libfake_cann.so, which is removed."""
    vendor = compiled("long vendor(void) { return 7; }", tmp_path / "gone" / "libfake_cann.so")
    site = tmp_path / "site"
    torch = compiled("long of_torch(void) { return 3; }", site / "torch/lib/libfake_torch.so")
    compiled("long of_other(void) { return 5; }", site / "torch_npu/libother.so")
    compiled(
        """
        #include <math.h>
        long vendor(void);
        long of_torch(void);
        long of_other(void);
        long other(void) { return of_other(); }
        long call(void) { return 10 * vendor() + of_torch() + (long)fabs(-1.0); }
        """,
        site / "torch_npu/lib/libfake_npu.so",
        *(str(vendor), str(torch), "-lm"),
    )
    shutil.rmtree(vendor.parent)
    return site


def written(out: Path, site: Path) -> list[Path]:
    return write_cann_stubs(out, site / "torch_npu", site / "torch")


@needs_tools
def test_what_is_missing_is_found_and_replaced(site: Path, tmp_path: Path) -> None:
    library, other = site / "torch_npu/lib/libfake_npu.so", site / "torch_npu/libother.so"
    code = (
        f"import ctypes; ctypes.CDLL({str(other)!r}, ctypes.RTLD_GLOBAL); "
        f"print(ctypes.CDLL({str(library)!r}).call())"
    )
    out = tmp_path / "stubs"
    path = os.pathsep.join(map(str, (out, site / "torch/lib")))

    def call() -> subprocess.CompletedProcess[str]:
        return started(sys.executable, "-c", code, env={**os.environ, "LD_LIBRARY_PATH": path})

    assert "libfake_cann.so: cannot open" in call().stderr
    assert written(out, site) == [out / "libfake_cann.so"]
    source = (out / "stubs.c").read_text()
    assert '"vendor"' in source
    assert '"of_torch"' not in source, "what torch defines is not replaced"
    assert '"of_other"' not in source, "nor what another library of torch_npu defines"
    assert call().stdout.strip() == "4", "10 * 0 + 3 of torch + 1 of libm"


@needs_tools
def test_a_compiler_that_fails_is_quoted(site: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(cann_stubs, "_source", lambda symbols: "this is no C")
    with pytest.raises(CannStubsError, match=r"gcc|cc.*failed with 1.*error"):
        written(tmp_path / "stubs", site)


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch) -> None:
    file = Path(cann_stubs.__file__)
    run = started(sys.executable, "-S", str(file), str(tmp_path), env={})
    assert run.returncode == 2
    assert re.match("cann_stubs: .* has no torch_npu; install it", run.stderr)
    for absent, message in {
        ("cc", "gcc", "clang"): "cc or gcc or clang is not on the PATH.*apt-get install gcc",
        ("nm",): "nm is not on the PATH.*apt-get install binutils",
        ("ldd",): "ldd is not on the PATH.*apt-get install libc-bin",
    }.items():
        tools = {"cc": "/bin/true", "nm": "/bin/true", "ldd": "/bin/true"}
        present = {name: path for name, path in tools.items() if name not in absent}
        monkeypatch.setattr("shutil.which", present.get)
        with pytest.raises(CannStubsError, match=message):
            written(tmp_path / "stubs", tmp_path)
