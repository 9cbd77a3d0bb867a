"""Finds the packages that a launch needs without importing them; the supported versions.

Versions were read in the sources of MindSpeed-LLM, MindSpeed and Megatron-LM.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SUPPORTED_LLM = ("2.2.0", "2.3.0", "26.0.0", "26.1.0")
NPU_TORCH = "2.7.1"
MEGATRON = "0.12.1"
TOGETHER = (
    "MindSpeed-LLM 2.2.0, 2.3.0, 26.0.0, 26.1.0 or master, with MindSpeed's branch "
    "<version>_core_r0.12.1 or master, and Megatron-LM core_v0.12.1"
)

SUPPORTED_WITHOUT_LLM = ("0.16",)
"""Versions of MindSpeed that have no MindSpeed-LLM, and of the Megatron core that they are for."""
WITHOUT_LLM = (
    "without MINDSPEED_LLM_HOME, for Megatron-LM's own pretrain_gpt.py, MindSpeed's branch "
    "core_r0.16.0 and Megatron-LM core_r0.16.0"
)

NEWEST_CORE = (0, 19)
"""The newest Megatron core that is supported without MindSpeed."""
WITHOUT_MINDSPEED = (0, 17)
"""From this version of Megatron core on, MindSpeed has no layers with norm of its own."""
WHY_WITHOUT = (
    "from 0.17 on its layers are adapted to NPUs by MegatronAdaptor and TransformerEngineNPU, "
    "which CommFuse does not know"
)


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version such as 26.0.0dev0, 2.7.1+cpu or 8.3.RC1."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


@dataclass(frozen=True)
class Package:
    """A package that was found, with its folders; a namespace package may have several."""

    version: str | None
    folders: tuple[Path, ...] = ()

    def folder_with(self, file: str) -> Path | None:
        return next((folder for folder in self.folders if (folder / file).exists()), None)


def find_package(name: str, variables: Mapping[str, str]) -> Package | None:
    """Find a package as ``import name`` would, or in the working directory or a home folder.

    Args:
        variables: the environment; ``MINDSPEED_LLM_HOME``, ``MINDSPEED_HOME``, ``MEGATRON_HOME``.
    """
    spec = importlib.util.find_spec(name)
    if spec is None:
        homes = ("MINDSPEED_LLM_HOME", "MINDSPEED_HOME", "MEGATRON_HOME")
        paths = [os.getcwd(), *filter(None, map(variables.get, homes))]
        spec = importlib.machinery.PathFinder.find_spec(name, paths)
    if spec is None:
        return None
    folders = tuple(map(Path, spec.submodule_search_locations or ()))
    return Package(_version(name, folders), folders)


def _version(name: str, folders: tuple[Path, ...]) -> str | None:
    # Files next to the code are about this copy; metadata may be about another one.
    for folder in folders:
        info = folder / "core" / "package_info.py"
        setup = folder.parent / "setup.py"
        if name == "megatron" and info.exists():
            numbers = re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", info.read_text("utf-8"), re.M)
            return ".".join(numbers)
        if name != "megatron" and setup.exists():
            match = re.search(r"^__version__ = ['\"](.+)['\"]", setup.read_text("utf-8"), re.M)
            if match is not None:
                return match[1]
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
