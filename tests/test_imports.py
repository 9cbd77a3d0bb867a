"""Imports point down: what trains does not need the command line's tools."""

import re
from pathlib import Path

import commfuse_npu
from commfuse_npu import ops

ROOT = Path(__file__).resolve().parents[1]
TOOLS = "commfuse_npu/tools", "commfuse_npu/__main__.py", "mindspeed_patches/rehearsal"


def test_what_trains_imports_no_tools() -> None:
    files = [*ROOT.glob("commfuse_npu/**/*.py"), *ROOT.glob("mindspeed_patches/**/*.py")]
    names = {str(file.relative_to(ROOT)): file.read_text("utf-8") for file in files}
    trains = {name: text for name, text in names.items() if not name.startswith(TOOLS)}
    assert len(trains) > 50
    imports = re.compile(r"^ *(?:from|import) commfuse_npu\.tools", re.MULTILINE)
    assert [name for name, text in trains.items() if imports.search(text)] == []


def test_public_names_are_those_of_the_ops() -> None:
    values = {name: getattr(commfuse_npu, name) for name in commfuse_npu.__all__}
    of_ops = {name for name in values if hasattr(ops, name)}
    assert of_ops == set(ops.__all__) - {"BucketExchange"}
    assert all(values[name] is getattr(ops, name) for name in of_ops)
