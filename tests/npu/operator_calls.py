"""Which operators of torch_npu a source file calls, found without running it."""

from __future__ import annotations

import ast
from dataclasses import dataclass


@dataclass(frozen=True)
class OperatorCall:
    """``torch.ops.npu.<name>(...)`` in a source file."""

    name: str
    line: int
    positional: int
    keywords: tuple[str, ...]
    unpacked: int
    """Results that are given a name, which have to be there."""


def operator_calls(source: str) -> list[OperatorCall]:
    """Every call of an ``npu`` operator.

    Raises:
        ValueError: torch_npu or ``torch.ops`` is used in another way, which nobody would check.
    """
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    found = []
    for node in ast.walk(tree):
        imported = [name.name for name in getattr(node, "names", []) if isinstance(name, ast.alias)]
        if isinstance(node, ast.ImportFrom):
            imported.append(node.module or "")
        if any(name.split(".")[0] == "torch_npu" or name == "torch.ops" for name in imported):
            raise ValueError(f"line {node.lineno} imports {imported}; call torch.ops.npu.<name>()")
        if isinstance(node, ast.Constant) and node.value in ("ops", "torch_npu"):
            raise ValueError(
                f"line {node.lineno} looks {node.value!r} up by name; call it directly"
            )
        if not (isinstance(node, ast.Attribute) and node.attr == "ops"):
            continue
        namespace = parents[node]
        operator = parents.get(namespace, tree)
        call = parents.get(operator, tree)
        if not (
            ast.unparse(namespace) == "torch.ops.npu"
            and isinstance(operator, ast.Attribute)
            and isinstance(call, ast.Call)
            and call.func is operator
            and all(keyword.arg for keyword in call.keywords)
            and not any(isinstance(argument, ast.Starred) for argument in call.args)
        ):
            raise ValueError(
                f"line {node.lineno}: {ast.unparse(namespace)!r} "
                "is no plain call torch.ops.npu.<name>(...) with its arguments written out"
            )
        found.append(
            OperatorCall(
                operator.attr,
                node.lineno,
                len(call.args),
                tuple(keyword.arg or "" for keyword in call.keywords),
                _unpacked(parents[call]),
            )
        )
    return found


def _unpacked(statement: ast.AST) -> int:
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Tuple):
        return 1
    targets = statement.targets[0].elts
    return sum(not isinstance(target, ast.Starred) for target in targets)
