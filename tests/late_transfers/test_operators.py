"""The tests of the operators and of programs, which were written for gloo, with late transfers."""

from __future__ import annotations

from importlib import import_module
from typing import Any

MODULES = (
    "test_accuracy",
    "test_bucket_order",
    "test_buckets",
    "test_linear",
    "test_sharded_module",
    "test_weight_prefetch",
)

LEFT_OUT = {"test_a_weight_that_changes_is_never_used_stale"}
"""It changes a weight on purpose while the old one is sent, and throws away what arrives."""


def _tests(module: str) -> dict[str, Any]:
    """Named after their module too: some have the same name."""
    found = vars(import_module(f"tests.distributed.{module}"))
    return {
        f"{module}__{name.removeprefix('test_')}": test
        for name, test in found.items()
        if name.startswith("test_") and name not in LEFT_OUT
    }


for _module in MODULES:
    globals().update(_tests(_module))
