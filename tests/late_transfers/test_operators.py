"""The tests of the operators and of programs, which were written for gloo, with late transfers."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from tests.distributed import (
    test_attention,
    test_buckets,
    test_flow,
    test_linear,
    test_programs,
    test_sharded_linear,
    test_sharded_module,
    test_ulysses,
)

MODULES = (
    test_attention,
    test_buckets,
    test_flow,
    test_linear,
    test_programs,
    test_sharded_linear,
    test_sharded_module,
    test_ulysses,
)


def _tests(module: ModuleType) -> dict[str, Any]:
    """Named after their module too: some have the same name."""
    about = module.__name__.rsplit(".", 1)[-1]
    found = {name: value for name, value in vars(module).items() if name.startswith("test_")}
    return {f"{about}__{name.removeprefix('test_')}": test for name, test in found.items()}


for _module in MODULES:
    globals().update(_tests(_module))
