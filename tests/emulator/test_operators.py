"""The tests of the operators and of programs, which were written for gloo, on an emulated HCCL.

They get their ranks from the fixture of this folder; every transport posts batches.  With
``EMULATE_STREAMS=1`` in the environment all communicators of a rank share a stream, or so many as
are said.  On one stream ``test_buckets__a_start_needs_nobody_else`` hangs, and rightly so: it
broadcasts in another group, before the transfers on one rank and after them on the others.
"""

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


LEFT_OUT = {
    "test_flow__against_one_process_in_fp64": "HCCL adds up no float64",
    "test_sharded_module__a_plain_llama_trains_as_with_fully_shard": (
        "torch's fully_shard, its reference, averages gradients in the collective; HCCL only adds"
    ),
}
"""What cannot run on HCCL, and why."""


def _tests(module: ModuleType) -> dict[str, Any]:
    """Named after their module too: some have the same name."""
    about = module.__name__.rsplit(".", 1)[-1]
    found = {name: value for name, value in vars(module).items() if name.startswith("test_")}
    named = {f"{about}__{name.removeprefix('test_')}": test for name, test in found.items()}
    return {name: test for name, test in named.items() if name not in LEFT_OUT}


for _module in MODULES:
    globals().update(_tests(_module))
