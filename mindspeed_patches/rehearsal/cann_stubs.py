"""Stand-ins for the CANN libraries, so that the real torch_npu imports on a machine without CANN.

torch_npu's libraries are linked against CANN's, which come with the NPU driver.  What they take
from them is generated here: a C file with a function for every symbol that nobody else defines,
each returning 0 (which is ``ACL_SUCCESS``), compiled once and linked into one shared library per
missing soname.  That is enough to import torch_npu, to read its schemas and to run its meta
kernels; **nothing that needs a device works**::

    python -m mindspeed_patches.rehearsal.cann_stubs OUT_DIR [--site-packages DIR]
    LD_LIBRARY_PATH=OUT_DIR TORCH_DEVICE_BACKEND_AUTOLOAD=0 python -c 'import torch, torch_npu'

Which libraries and symbols are missing is found out from the files, not listed here, so that other
versions of torch_npu work too.  Needs a C compiler and binutils; imports neither torch nor
torch_npu, so that it also runs (as a file) where `import torch` fails for the want of CANN.
"""

from __future__ import annotations

import argparse
import ctypes
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

__all__ = ["CannStubsError", "load_cann_stubs", "write_cann_stubs"]

_MANIFEST = "stubs.json"
_SONAME = re.compile(r"[\w.+-]+\.so[\w.]*")


class CannStubsError(RuntimeError):
    """The stand-ins cannot be made here; the message says what is missing and where to get it."""


def write_cann_stubs(out_dir: Path, site_packages: Path | None = None) -> list[Path]:
    """Write the stand-ins for what torch_npu misses into ``out_dir``.

    Nothing is done if they are there and neither torch_npu, torch nor this file has changed.

    Args:
        out_dir: made if it does not exist.
        site_packages: the directory that holds ``torch_npu``; by default the one in which this
            Python finds it.  ``torch`` is taken from there too, or else from where this Python
            finds it.

    Returns:
        The libraries, one per missing soname, sorted by name.

    Raises:
        CannStubsError: torch_npu, torch or a tool is missing, or the compiler failed.
    """
    npu = _package("torch_npu", site_packages)
    torch = _package("torch", site_packages)
    # ATB is a further product beside CANN, and its plugin is loaded only when an ATB op is used.
    plugins = [path for path in _libraries(npu) if "plugin_atb" not in path.name]
    torch_libraries = _libraries(torch / "lib")
    fingerprint = _fingerprint([*plugins, *torch_libraries])
    out_dir = Path(out_dir)
    if (written := _up_to_date(out_dir, fingerprint)) is not None:
        return written

    compiler, nm = _tool("cc", "gcc", "clang"), _tool("nm")
    present = {path.name for path in [*plugins, *torch_libraries]}
    needed = set().union(*map(_needed, plugins)) - present
    system = {name: path for name in needed if (path := _system_library(compiler, name))}
    missing = sorted(needed - set(system))

    wanted = set().union(*(_undefined(nm, path) for path in plugins))
    provided = [*plugins, *torch_libraries, *system.values()]
    symbols = sorted(wanted.difference(*(_defined(nm, path) for path in provided)))

    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / _MANIFEST).unlink(missing_ok=True)
    (out_dir / "stubs.c").write_text(_source(symbols))
    written = _link(compiler, out_dir / "stubs.c", [out_dir / name for name in missing])
    manifest = {"fingerprint": fingerprint, "libraries": missing, "symbols": len(symbols)}
    (out_dir / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return written


def load_cann_stubs(directory: Path) -> None:
    """Load the stand-ins of ``directory`` into this process, for a torch_npu imported later.

    The dynamic loader reads ``LD_LIBRARY_PATH`` only when a process starts; libraries which are
    there already satisfy torch_npu just as well.

    Raises:
        CannStubsError: there are none in ``directory``.
    """
    manifest = Path(directory) / _MANIFEST
    if not manifest.is_file():
        raise CannStubsError(
            f"there are no stand-ins for CANN in {directory}; write them with "
            f"python -m mindspeed_patches.rehearsal.cann_stubs {directory}"
        )
    for name in json.loads(manifest.read_text())["libraries"]:
        ctypes.CDLL(str(Path(directory).resolve() / name), mode=ctypes.RTLD_GLOBAL)


# ---------------------------------------------------------- where things are


def _package(name: str, site_packages: Path | None) -> Path:
    """The directory of a package, found without importing it."""
    if site_packages is not None and (site_packages / name).is_dir():
        return site_packages / name
    if name == "torch" or site_packages is None:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            return Path(spec.origin).parent
    where = site_packages or sys.executable
    raise CannStubsError(
        f"{name} is not installed in {where}; install it (pip install --no-deps torch-npu==2.13.0 "
        "beside torch==2.13.0), or name the directory that holds it with --site-packages"
    )


def _libraries(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*.so*") if path.is_file())


def _tool(*names: str) -> str:
    for name in names:
        if (found := shutil.which(name)) is not None:
            return found
    package = "binutils" if "nm" in names or "readelf" in names else "gcc"
    raise CannStubsError(
        f"{' or '.join(names)} is not on the PATH, and making stand-ins for CANN needs it; install "
        f"it, for instance with `apt-get install {package}` or `dnf install {package}`"
    )


def _system_library(compiler: str, name: str) -> Path | None:
    """Where the linker finds a library; for an unknown one the compiler echoes the name."""
    path = Path(_run(compiler, f"-print-file-name={name}").strip())
    return path if path.is_absolute() else None


# -------------------------------------------------------- what is in a library


def _needed(library: Path) -> set[str]:
    """Sonames which the dynamic loader looks for when it loads ``library``."""
    reader = shutil.which("readelf")
    lines = _run(reader, "-d", library) if reader else _run(_tool("objdump"), "-p", library)
    names = (line.split()[-1].strip("[]") for line in lines.splitlines() if "NEEDED" in line)
    return {name for name in names if _SONAME.fullmatch(name)}


def _symbols(nm: str, library: Path, which: str) -> Iterable[tuple[str, str]]:
    for line in _run(nm, "-D", which, library).splitlines():
        *_, kind, name = line.split()
        yield kind, name.split("@")[0]


def _undefined(nm: str, library: Path) -> set[str]:
    """Symbols which have to be defined elsewhere; those of Python come with the interpreter."""
    # Weak ones (kinds w and v) may stay undefined.
    found = {name for kind, name in _symbols(nm, library, "--undefined-only") if kind == "U"}
    return {name for name in found if not name.startswith(("Py", "_Py"))}


def _defined(nm: str, library: Path) -> set[str]:
    return {name for _, name in _symbols(nm, library, "--defined-only")}


# ------------------------------------------------------------------- writing


def _source(symbols: Sequence[str]) -> str:
    """C for the symbols: zeroed data for C++ tables and type information, functions otherwise."""
    lines = ["/* Stand-ins for CANN, written by cann_stubs.py. Every function returns 0. */"]
    for index, name in enumerate(symbols):
        if name.startswith(("_ZTI", "_ZTS", "_ZTV")):
            lines.append(f'void *data_{index}[64] __asm__("{name}") = {{0}};')
        else:
            lines.append(f'long call_{index}(void) __asm__("{name}");')
            lines.append(f"long call_{index}(void) {{ return 0; }}")
    return "\n".join(lines) + "\n"


def _link(compiler: str, source: Path, libraries: Sequence[Path]) -> list[Path]:
    """Every library gets all symbols: which of them CANN defines where is not known."""
    with tempfile.TemporaryDirectory(dir=source.parent) as scratch:
        code = Path(scratch, "stubs.o")
        _run(compiler, "-c", "-fPIC", "-O1", source, "-o", code)
        for library in libraries:
            made = Path(scratch, library.name)
            _run(compiler, "-shared", f"-Wl,-soname,{library.name}", code, "-o", made)
            # In one step: a process that is loading it must not see half a library.
            made.replace(library)
    return list(libraries)


def _fingerprint(libraries: Sequence[Path]) -> str:
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in libraries:
        status = path.stat()
        digest.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _up_to_date(out_dir: Path, fingerprint: str) -> list[Path] | None:
    try:
        manifest = json.loads((out_dir / _MANIFEST).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    libraries = [out_dir / name for name in manifest["libraries"]]
    current = manifest["fingerprint"] == fingerprint and all(p.is_file() for p in libraries)
    return libraries if current else None


def _run(*command: str | Path) -> str:
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    if done.returncode != 0:
        text = " ".join(map(str, command))
        raise CannStubsError(f"`{text}` failed with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see the module."""
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_patches.rehearsal.cann_stubs",
        description="Write stand-ins for the CANN libraries that torch_npu needs.",
    )
    parser.add_argument("out_dir", type=Path, help="where the libraries go")
    parser.add_argument(
        "--site-packages", type=Path, help="the directory that holds torch_npu (default: Python's)"
    )
    asked = parser.parse_args(arguments)
    try:
        libraries = write_cann_stubs(asked.out_dir, asked.site_packages)
    except CannStubsError as error:
        print(f"cann_stubs: {error}", file=sys.stderr)
        return 2
    print(f"{len(libraries)} stand-ins in {asked.out_dir}: {', '.join(p.name for p in libraries)}")
    print(f"use them with LD_LIBRARY_PATH={asked.out_dir.resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
