"""Stand-ins for the CANN libraries, so that the real torch_npu imports on a machine without CANN.

torch_npu's libraries are linked against CANN's, which come with the NPU driver.  This module writes
a C file with a function for every undefined symbol, each of which returns 0 (``ACL_SUCCESS``).  It
is compiled once, and linked under the name of every missing library.  That is enough to import
torch_npu, to read its schemas and to run its meta kernels; **nothing that needs a device works**::

    python -m mindspeed_patches.rehearsal.cann_stubs OUT_DIR [--site-packages DIR]
    LD_LIBRARY_PATH=OUT_DIR TORCH_DEVICE_BACKEND_AUTOLOAD=0 python -c 'import torch, torch_npu'

``ldd -r`` lists missing libraries and symbols, so that other versions of torch_npu work too.  Needs
a C compiler and nm.  Imports neither torch nor torch_npu, so that it also runs (as a file) where
`import torch` fails for lack of CANN.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["CannStubsError", "write_cann_stubs"]

_MANIFEST = "stubs.json"
_LIBRARY = "libstand_ins.so"


class CannStubsError(RuntimeError):
    """The stand-ins cannot be created; the message says what is missing and where to get it."""


def write_cann_stubs(out_dir: Path, site_packages: Path | None = None) -> list[Path]:
    """Write the stand-ins for libraries that torch_npu lacks into ``out_dir``.

    Does nothing if they exist and neither torch_npu, torch nor this file has changed.

    Args:
        out_dir: created if it does not exist.
        site_packages: the directory that contains ``torch_npu``; by default the one in which this
            Python finds it.  ``torch`` is taken from there if it exists, otherwise from where this
            Python finds it.

    Returns:
        The libraries, one per missing name, sorted.

    Raises:
        CannStubsError: torch_npu, torch or a tool is missing, or the compiler failed.
    """
    npu, torch = _package("torch_npu", site_packages), _package("torch", site_packages)
    # ATB is a separate product, and its plugin is loaded only when an ATB op is used.
    plugins = [path for path in _libraries(npu) if "plugin_atb" not in path.name]
    fingerprint = _fingerprint([Path(__file__), *plugins, *_libraries(torch / "lib")])
    try:
        manifest = json.loads((out_dir / _MANIFEST).read_text())
        libraries = [out_dir / name for name in manifest["libraries"]]
        if manifest["fingerprint"] == fingerprint and all(path.is_file() for path in libraries):
            return libraries
    except (FileNotFoundError, json.JSONDecodeError):
        pass  # missing or incomplete

    compiler, loader, nm = _tool("cc", "gcc", "clang"), _tool("ldd"), _tool("nm")
    folders = os.pathsep.join(map(str, (torch / "lib", npu / "lib")))
    report = "".join(_run(loader, "-r", path, LD_LIBRARY_PATH=folders) for path in plugins)
    libraries = sorted(out_dir / name for name in set(re.findall(r"(\S+) => not found", report)))
    # The interpreter defines Python's symbols; torch_npu's libraries define each other's.
    undefined = set(re.findall(r"undefined symbol: (?!_?Py)(\w+)", report))
    defined = re.findall(r"^\w+ \w (\w+)", _run(nm, "-D", "--defined-only", *plugins), re.M)
    symbols = sorted(undefined.difference(defined))

    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / _MANIFEST).unlink(missing_ok=True)
    (out_dir / "stubs.c").write_text(_source(symbols))
    with tempfile.TemporaryDirectory(dir=out_dir) as scratch:
        library = Path(scratch, _LIBRARY)
        _run(compiler, "-shared", "-fPIC", "-O1", out_dir / "stubs.c", "-o", library)
        # Atomically: a process that loads it must not see a partial library.
        library.replace(out_dir / _LIBRARY)
        for path in libraries:
            link = Path(scratch, path.name)
            link.symlink_to(_LIBRARY)
            link.replace(path)
    names = [path.name for path in libraries]
    (out_dir / _MANIFEST).write_text(json.dumps({"fingerprint": fingerprint, "libraries": names}))
    return libraries


def _package(name: str, site_packages: Path | None) -> Path:
    """The directory of a package, found without importing it."""
    if site_packages is not None and (site_packages / name).is_dir():
        return site_packages / name
    if name == "torch" or site_packages is None:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            return Path(spec.origin).parent
    place = site_packages or sys.executable
    raise CannStubsError(
        f"{name} is not installed in {place}; install it (pip install --no-deps torch-npu==2.13.0 "
        "beside torch==2.13.0), or name the directory that holds it with --site-packages"
    )


def _libraries(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*.so*") if path.is_file())


def _tool(*names: str) -> str:
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        package = {"ldd": "libc-bin", "nm": "binutils"}.get(names[0], "gcc")
        raise CannStubsError(
            f"{' or '.join(names)} is not on the PATH, and making stand-ins for CANN needs it; "
            f"install it, for instance with `apt-get install {package}`"
        )
    return path


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


def _fingerprint(files: Iterable[Path]) -> str:
    status = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(status).encode()).hexdigest()


def _run(*command: str | Path, **environment: str) -> str:
    environment = {**os.environ, "LC_ALL": "C", **environment}
    process = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        env=environment,
    )
    if process.returncode != 0:
        text = " ".join(map(str, command))
        raise CannStubsError(f"`{text}` failed with {process.returncode}: {process.stdout.strip()}")
    return process.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_patches.rehearsal.cann_stubs",
        description="Write stand-ins for the CANN libraries that torch_npu needs.",
    )
    parser.add_argument("out_dir", type=Path, help="where the libraries go")
    parser.add_argument(
        "--site-packages", type=Path, help="the directory that holds torch_npu (default: Python's)"
    )
    options = parser.parse_args(arguments)
    try:
        libraries = write_cann_stubs(options.out_dir, options.site_packages)
    except CannStubsError as error:
        print(f"cann_stubs: {error}", file=sys.stderr)
        return 2
    print(
        f"{len(libraries)} stand-ins in {options.out_dir}: {', '.join(p.name for p in libraries)}"
    )
    print(f"use them with LD_LIBRARY_PATH={options.out_dir.resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
