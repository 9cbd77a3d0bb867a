"""Where MindSpeed-LLM, MindSpeed and Megatron-LM are, and which versions they are."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from commfuse_npu.tools.launch_script import UsageError

__all__ = ["BRANCHES", "Stack", "find_stack"]

BRANCHES = """\
These belong together:
  MindSpeed-LLM 2.2.0, 2.3.0, 26.0.0, 26.1.0   MindSpeed branch <version>_core_r0.12.1
  MindSpeed-LLM master                         MindSpeed branch master
  all of them                                  Megatron-LM tag core_v0.12.1"""


@dataclass(frozen=True)
class _Part:
    title: str
    option: str
    variable: str
    package: str
    marker: str  # a file below the checkout by which it is recognised


_MINDSPEED = _Part(
    "MindSpeed", "--mindspeed", "MINDSPEED_HOME", "mindspeed", "mindspeed/patch_utils.py"
)
_LLM = _Part(
    "MindSpeed-LLM",
    "--mindspeed-llm",
    "MINDSPEED_LLM_HOME",
    "mindspeed_llm",
    "mindspeed_llm/training/training.py",
)
_MEGATRON = _Part(
    "Megatron-LM",
    "--megatron",
    "MEGATRON_HOME",
    "megatron.training",
    "megatron/training/training.py",
)


@dataclass(frozen=True)
class Stack:
    """The three checkouts.

    Attributes:
        mindspeed, llm, megatron: folders that go onto ``PYTHONPATH``.
    """

    mindspeed: Path
    llm: Path
    megatron: Path

    @property
    def python_path(self) -> list[str]:
        return [str(folder) for folder in (self.llm, self.mindspeed, self.megatron)]

    def versions(self) -> dict[str, str]:
        """What each checkout says of itself, and the branch if it is a git checkout."""
        return {
            part.title: ", ".join(filter(None, (_stated(folder), _branch(folder), str(folder))))
            for part, folder in (
                (_LLM, self.llm),
                (_MINDSPEED, self.mindspeed),
                (_MEGATRON, self.megatron),
            )
        }


def find_stack(
    mindspeed: str | None,
    llm: str | None,
    megatron: str | None,
    environ: Mapping[str, str] = os.environ,
) -> Stack:
    """Find the checkouts: by option, else by environment variable, else as importable packages.

    Raises:
        UsageError: one is missing, is something else, or is too old.
    """
    found: dict[str, Path] = {}
    problems: list[str] = []
    for part, option in ((_LLM, llm), (_MINDSPEED, mindspeed), (_MEGATRON, megatron)):
        try:
            # Users of MindSpeed-LLM copy the folder megatron into its checkout.
            fallback = found.get(_LLM.title) if part is _MEGATRON else None
            found[part.title] = _find(part, option, environ, fallback)
        except UsageError as error:
            problems.append(str(error))
    if problems:
        raise UsageError("\n".join([*problems, BRANCHES]))
    stack = Stack(found[_MINDSPEED.title], found[_LLM.title], found[_MEGATRON.title])
    if not (stack.llm / "mindspeed_llm/tasks/megatron_adaptor_v2.py").exists():
        raise UsageError(
            f"the MindSpeed-LLM in {stack.llm} is 2.1.0 or older and takes no further features.\n"
            f"{BRANCHES}"
        )
    return stack


def _find(
    part: _Part, option: str | None, environ: Mapping[str, str], fallback: Path | None
) -> Path:
    given, source = option, part.option
    if given is None:
        given, source = environ.get(part.variable), part.variable
    if given:
        folder = Path(given).expanduser().resolve()
        if not (folder / part.marker).exists():
            raise UsageError(
                f"{source} is {given}, which is no checkout of {part.title}: it has no "
                f"{part.marker}"
            )
        return folder
    if fallback is not None and (fallback / part.marker).exists():
        return fallback
    installed = _importable(part)
    if installed is None:
        raise UsageError(
            f"{part.title} is missing: give its checkout with {part.option} DIR or "
            f"{part.variable}=DIR, or install it"
        )
    return installed


def _importable(part: _Part) -> Path | None:
    """The folder above a package that this Python finds, without importing the package."""
    try:
        spec = importlib.util.find_spec(part.package)
    except ModuleNotFoundError:  # of the package above it
        return None
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        folder = Path(location).parents[part.package.count(".")].resolve()
        if (folder / part.marker).exists():
            return folder
    return None


def _stated(folder: Path) -> str:
    info = folder / "megatron/core/package_info.py"
    if (folder / "megatron/training").exists() and info.exists():
        numbers = re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", info.read_text("utf-8"), re.M)
        return "core " + ".".join(numbers)
    setup = folder / "setup.py"
    text = setup.read_text("utf-8") if setup.exists() else ""
    stated = re.search(r"^__version__ = ['\"](.+?)['\"]", text, re.M)
    return f"version {stated[1]} by its setup.py" if stated else ""


def _branch(folder: Path) -> str:
    head = folder / ".git" / "HEAD"
    if not head.is_file():
        return ""
    reference = head.read_text("utf-8").strip()
    return f"git {reference.removeprefix('ref: refs/heads/')[:40]}"
