"""Locates the checkouts of MindSpeed-LLM, MindSpeed and Megatron-LM."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from commfuse_npu.packages import TOGETHER, find_package
from commfuse_npu.tools.launch_script import UsageError

__all__ = ["Stack", "find_stack"]


class Stack(NamedTuple):
    """The three checkouts: folders that are put on ``PYTHONPATH`` in this order."""

    llm: Path
    mindspeed: Path
    megatron: Path


_PARTS = (
    ("MindSpeed-LLM", "MINDSPEED_LLM_HOME", "mindspeed_llm/training/training.py"),
    ("MindSpeed", "MINDSPEED_HOME", "mindspeed/patch_utils.py"),
    ("Megatron-LM", "MEGATRON_HOME", "megatron/training/training.py"),
)
"""Title, variable, and a file by which a checkout is recognized."""


def find_stack(environ: Mapping[str, str] = os.environ) -> Stack:
    """Find the checkouts: by environment variable, else as importable packages.

    Raises:
        UsageError: one is missing, is something else, or is too old.
    """
    roots: list[Path] = []
    problems: list[str] = []
    for title, variable, marker in _PARTS:
        if text := environ.get(variable):
            candidates = [Path(text).expanduser().resolve()]
            problem = f"{variable} is {text}, which is no checkout of {title}: it has no {marker}"
        else:
            package = find_package(Path(marker).parts[0], {})
            installed = package.folders if package is not None else ()
            # Users of MindSpeed-LLM copy the folder megatron into its checkout.
            candidates = [*roots[:1], *(folder.resolve().parent for folder in installed)]
            problem = f"{title} is missing: give its checkout with {variable}=DIR, or install it"
        found = [folder for folder in candidates if (folder / marker).exists()]
        roots += found[:1]
        problems += [] if found else [problem]
    if not problems and not (roots[0] / "mindspeed_llm/tasks/megatron_adaptor_v2.py").exists():
        problems.append(
            f"the MindSpeed-LLM in {roots[0]} is 2.1.0 or older and takes no further features"
        )
    if problems:
        raise UsageError("\n".join([*problems, f"These belong together: {TOGETHER}"]))
    return Stack(*roots)
