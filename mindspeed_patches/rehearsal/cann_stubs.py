"""Stand-ins for the CANN libraries, so that the real torch_npu imports on a machine without CANN.

torch_npu's libraries are linked against CANN's, which come with the NPU driver.  This module writes
a C file with a function for every undefined symbol, each of which returns 0 (``ACL_SUCCESS``).  It
is compiled once, and linked under the name of every missing library.  That is enough to import
torch_npu, to read its schemas and to run its meta kernels; **nothing that needs a device works**::

    python mindspeed_patches/rehearsal/cann_stubs.py OUT_DIR
    LD_LIBRARY_PATH=OUT_DIR TORCH_DEVICE_BACKEND_AUTOLOAD=0 python -c 'import torch, torch_npu'

``ldd -r`` lists missing libraries and symbols, so that other versions of torch_npu work too.  Needs
cc, nm and ldd.  Imports neither torch nor torch_npu, as ``import torch`` may fail for lack of CANN.
``scripts/environment.sh`` runs this file.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

_LIBRARY = "libstand_ins.so"


def write_cann_stubs(out_dir: Path, npu: Path, torch: Path) -> None:
    """Write the stand-ins for libraries that torch_npu lacks into ``out_dir``.

    Args:
        npu, torch: the folders of the packages torch_npu and torch.

    Raises:
        SystemExit: a tool is missing, or the compiler failed.
    """
    # ATB is a separate product, and its plugin is loaded only when an ATB op is used.
    files = (path for path in sorted(npu.rglob("*.so*")) if path.is_file())
    plugins = [path for path in files if "plugin_atb" not in path.name]
    folders = os.pathsep.join(map(str, (torch / "lib", npu / "lib")))
    report = "".join(_run("ldd", "-r", path, LD_LIBRARY_PATH=folders) for path in plugins)
    libraries = set(re.findall(r"(\S+) => not found", report))
    # The interpreter defines Python's symbols; torch_npu's libraries define each other's.
    undefined = set(re.findall(r"undefined symbol: (?!_?Py)(\w+)", report))
    defined = re.findall(r"^\w+ \w (\w+)", _run("nm", "-D", "--defined-only", *plugins), re.M)
    symbols = sorted(undefined.difference(defined))

    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "stubs.c").write_text(_source(symbols))
    with tempfile.TemporaryDirectory(dir=out_dir) as scratch:
        library = Path(scratch, _LIBRARY)
        _run("cc", "-shared", "-fPIC", "-O1", out_dir / "stubs.c", "-o", library)
        # Atomically: a process that loads it must not see a partial library.
        library.replace(out_dir / _LIBRARY)
        for name in libraries:
            link = Path(scratch, name)
            link.symlink_to(_LIBRARY)
            link.replace(out_dir / name)


def _package(name: str) -> Path:
    """The folder of a package, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(
            f"cann_stubs: {sys.executable} has no {name}; install it (pip install --no-deps "
            "torch-npu==2.13.0 beside torch==2.13.0)"
        )
    return Path(spec.origin).parent


def _source(symbols: Iterable[str]) -> str:
    """C for the symbols: zeroed data for C++ tables and type information, functions otherwise."""
    lines = ["/* Stand-ins for CANN, written by cann_stubs.py. Every function returns 0. */"]
    for index, name in enumerate(symbols):
        if name.startswith(("_ZTI", "_ZTS", "_ZTV")):
            lines.append(f'void *data_{index}[64] __asm__("{name}") = {{0}};')
        else:
            lines.append(f'long call_{index}(void) __asm__("{name}");')
            lines.append(f"long call_{index}(void) {{ return 0; }}")
    return "\n".join(lines) + "\n"


def _run(*command: str | Path, **environment: str) -> str:
    if shutil.which(command[0]) is None:
        raise SystemExit(
            f"cann_stubs: {command[0]} is not on the PATH, and making stand-ins for CANN needs it; "
            "install it: cc is in the package gcc, nm in binutils, ldd in libc-bin"
        )
    environment = {**os.environ, "LC_ALL": "C", **environment}
    try:
        return subprocess.check_output(
            command, stderr=subprocess.STDOUT, text=True, timeout=300, env=environment
        )
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"cann_stubs: {error}: {error.output.strip()}") from error


if __name__ == "__main__":
    write_cann_stubs(Path(sys.argv[1]), _package("torch_npu"), _package("torch"))
