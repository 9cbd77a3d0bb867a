"""The examples run with the command in their docstring, and pages show excerpts of them."""

import os
import re
import shlex
import sys
import textwrap
from pathlib import Path

import pytest

from tests.launchers.launching import started

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
RESULTS = {
    "by_hand": r"(\w+: True\n){4}attention_linear_reduce_scatter: True",
    "forward_backward_overlap": r"6 runs, 48 transfers .*\n.*the same bits on 2 ranks: True",
    "own_program": r"the product of an all-gather: True; .*",
    "tp_mlp": r"losses .*; fused and plain have the same bits on 2 ranks: True",
}


def cuts(example: Path) -> dict[str, str]:
    """Excerpts between ``# cut: NAME`` and ``# end`` by name; parts of one name are joined."""
    texts: dict[str, str] = {}
    parts = re.compile(r"^ *# cut: ([^\n]+)\n(.*?)^ *# end\n", re.M | re.S)
    for name, part in parts.findall(example.read_text("utf-8")):
        text = textwrap.dedent(part).strip("\n") + "\n"
        gap = "\n\n" if text.startswith("def ") else "\n"  # as ruff formats pages, too
        texts[name] = texts[name] + gap + text if name in texts else text
    return texts


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.M | re.S)


def test_the_pages_show_what_is_cut_from_the_examples() -> None:
    cut = [text for example in EXAMPLES for text in cuts(example).values()]
    assert set(blocks("docs/python.md")) <= set(cut)
    assert set(cut) <= {*blocks("docs/python.md"), *blocks("docs/how.md")}
    lines = {
        line.strip() for text in (*cut, *blocks("docs/megatron.md")) for line in text.split("\n")
    }
    shown = [line for text in blocks("README.md") for line in text.splitlines()]
    assert shown
    assert set(shown) <= lines


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_it_runs_as_its_first_lines_say(example: Path) -> None:
    text = example.read_text("utf-8")
    (start,) = re.findall(r"^(torchrun .+)$", text, re.M)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    settings = {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **settings}
    done = started(*shlex.split(start), env=environment, folder=ROOT)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(RESULTS[example.stem] + r"\n", done.stdout), done.stdout
