"""Locates the checkouts of MindSpeed-LLM, MindSpeed and Megatron-LM."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from commfuse_npu.packages import TOGETHER, find_package
from commfuse_npu.tools.launch_script import UsageError

__all__ = ["Stack", "find_stack"]


@dataclass(frozen=True)
class Stack:
    """The three checkouts: folders that are put on ``PYTHONPATH`` in this order."""

    llm: Path
    mindspeed: Path
    megatron: Path


@dataclass(frozen=True)
class _Part:
    title: str
    variable: str
    package: str
    marker: str  # a file of the package by which a checkout is recognized


_PARTS = {
    "llm": _Part("MindSpeed-LLM", "MINDSPEED_LLM_HOME", "mindspeed_llm", "training/training.py"),
    "mindspeed": _Part("MindSpeed", "MINDSPEED_HOME", "mindspeed", "patch_utils.py"),
    "megatron": _Part("Megatron-LM", "MEGATRON_HOME", "megatron", "training/training.py"),
}


def find_stack(environ: Mapping[str, str] = os.environ) -> Stack:
    """Find the checkouts: by environment variable, else as importable packages.

    Raises:
        UsageError: one is missing, is something else, or is too old.
    """
    roots: dict[str, Path] = {}
    problems: list[str] = []
    for name, part in _PARTS.items():
        try:
            # Users of MindSpeed-LLM copy the folder megatron into its checkout.
            llm = roots.get("llm") if name == "megatron" else None
            roots[name] = _find(part, environ.get(part.variable), llm)
        except UsageError as error:
            problems.append(str(error))
    if not problems and not (roots["llm"] / "mindspeed_llm/tasks/megatron_adaptor_v2.py").exists():
        problems.append(
            f"the MindSpeed-LLM in {roots['llm']} is 2.1.0 or older and takes no further features"
        )
    if problems:
        raise UsageError("\n".join([*problems, f"These belong together: {TOGETHER}"]))
    return Stack(**roots)


def _find(part: _Part, text: str | None, beside: Path | None) -> Path:
    marker = Path(part.package, part.marker)
    if text:
        folder = Path(text).expanduser().resolve()
        if not (folder / marker).exists():
            raise UsageError(
                f"{part.variable} is {text}, which is no checkout of {part.title}: "
                f"it has no {marker}"
            )
        return folder
    if beside is not None and (beside / marker).exists():
        return beside
    installed = find_package(part.package, {})
    folder_of = installed.folder_with(part.marker) if installed is not None else None
    if folder_of is None:
        raise UsageError(
            f"{part.title} is missing: give its checkout with {part.variable}=DIR, or install it"
        )
    return folder_of.resolve().parent
