"""The examples run as their first lines say, and the pages show what is cut from them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.limits import LIMIT

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
RESULTS = {
    "forward_backward_overlap": r"5 pairs, 40 transfers .*\n.*the same bits on 2 ranks: True",
    "megatron_wrappers": r"fc1: 1 forward calls fused\nfc2: 1 forward calls fused\n"
    r"largest difference to Megatron's own layers, GEMMs not split: (0|\d\.\d)e[+-]\d\d",
    "own_program": r"the product of an all-gather: True; .*",
    "sharded_llama": r"loss 4\.\d\d -> 1\.\d\d; 53,568 of 102,720 parameters on each of 2 ranks",
    "tp_mlp": r"losses .*; fused and plain have the same bits on 2 ranks: True",
}
_ABSENT = """
import sys
from importlib.machinery import PathFinder

class Rest(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in {absent!r} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Rest
"""
"""Modules that are installed and are not to be found."""


def cuts(example: Path) -> dict[str, str]:
    """What stands between ``# cut: NAME`` and ``# end``, the parts of one name together."""
    found: dict[str, str] = {}
    for name, part in re.findall(
        r"^ *# cut: ([^\n]+)\n(.*?)^ *# end\n", example.read_text("utf-8"), re.M | re.S
    ):
        text = textwrap.dedent(part).strip("\n") + "\n"
        gap = "\n\n" if text.startswith("def ") else "\n"  # as ruff formats pages, too
        found[name] = found[name] + gap + text if name in found else text
    return found


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.M | re.S)


def test_the_pages_show_what_is_cut_from_the_examples() -> None:
    cut = [text for example in EXAMPLES for text in cuts(example).values()]
    assert sorted(blocks("docs/python.md")) == sorted(cut)
    assert blocks("README.md") == [
        cuts(ROOT / "examples" / "forward_backward_overlap.py")["overlap"]
    ]


def first_lines(example: Path) -> tuple[list[str], list[str]]:
    """What is to be installed, and how it is started."""
    install, start = re.findall(r"^(pip install|torchrun) (.+)$", example.read_text("utf-8"), re.M)
    return shlex.split(install[1]), ["torchrun", *shlex.split(start[1])]


def brought(requirements: list[str]) -> set[str]:
    """The distributions that these bring along, as they are installed here."""
    found: set[str] = set()
    ahead = [Requirement(word) for word in requirements]
    while ahead:
        one = ahead.pop()
        name = canonicalize_name(one.name)
        wanted = one.marker is None or one.marker.evaluate({"extra": ""})
        if not wanted or name in found:
            continue
        found.add(name)
        with suppress(metadata.PackageNotFoundError):  # not installed here either
            ahead += map(Requirement, metadata.requires(name) or ())
    return found


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_it_runs_with_what_its_first_lines_ask_for(example: Path, tmp_path: Path) -> None:
    install, start = first_lines(example)
    assert install[:2] == ["-e", "."]
    if any(word.startswith("megatron") for word in install):
        pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    there = brought(["pyyaml", *install[2:]])
    absent = {
        module
        for module, owners in metadata.packages_distributions().items()
        if there.isdisjoint(map(canonicalize_name, owners))
    } - {"commfuse_npu", "mindspeed_patches"}
    (tmp_path / "sitecustomize.py").write_text(_ABSENT.format(absent=absent))
    for name in ("commfuse_npu", "mindspeed_patches", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = subprocess.run(
        start,
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(tmp_path),
            "OMP_NUM_THREADS": "1",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        },
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(RESULTS[example.stem] + r"\n", done.stdout), done.stdout
