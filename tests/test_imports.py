"""Imports point down, from room to room as CONTRIBUTING draws them, and never in a circle."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import commfuse_npu
from commfuse_npu import ops

ROOT = Path(__file__).resolve().parents[1]
BELOW = {
    "plan": set[str](),
    "kernels": set[str](),
    "proof": {"plan"},
    "launch": {"plan"},
    "runtime": {"plan", "kernels"},
    "overlap": {"plan", "kernels", "runtime"},
    "ops": {"plan", "kernels", "runtime"},
    "tools": {"plan", "kernels", "runtime", "proof", "launch"},
}
TRAINING = {"plan", "kernels", "runtime", "overlap", "ops", "launch"}
MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for package in ("commfuse_npu", "mindspeed_patches")
    for file in ROOT.glob(f"{package}/**/*.py")
}


def imported(module: str) -> Iterator[str]:
    """Modules of this project that a module imports when it runs, anywhere in it."""
    tree = ast.parse(MODULES[module].read_text("utf-8"))
    types = {
        node
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node not in types:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found = name if name in MODULES else str(node.module)
                if found in MODULES:
                    yield found


def room(module: str) -> str:
    """``ops`` for ``commfuse_npu.ops.linear``; empty for a module outside of the rooms."""
    parts = module.split(".")
    return parts[1] if parts[0] == "commfuse_npu" and parts[1:] and parts[1] in BELOW else ""


def test_imports_point_down() -> None:
    edges = {module: set(imported(module)) for module in MODULES}
    assert len(edges) > 150
    wrong = []
    for module, targets in edges.items():
        if module.startswith("mindspeed_patches.rehearsal"):
            continue
        allowed = BELOW[room(module)] | {room(module)} if room(module) else TRAINING
        if module == "commfuse_npu.__main__":
            allowed = {"tools"}
        wrong += [(module, target) for target in targets if room(target) not in {*allowed, ""}]
        upward = module.startswith("commfuse_npu")
        wrong += [(module, t) for t in targets if upward and t.startswith("mindspeed_patches")]
    assert wrong == []
    list(TopologicalSorter(edges).static_order())  # raises a CycleError


def test_public_names_are_those_of_the_ops() -> None:
    values = {name: getattr(commfuse_npu, name) for name in commfuse_npu.__all__}
    of_ops = {name for name in values if hasattr(ops, name)}
    assert of_ops == set(ops.__all__) - {"BucketExchange"}
    assert all(values[name] is getattr(ops, name) for name in of_ops)
