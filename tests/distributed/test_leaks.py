"""A training with another shape in each iteration keeps nothing that it should give back."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from commfuse_npu import Schedule
from commfuse_npu.plan.rules import RULES
from commfuse_npu.runtime.executor import Running
from tests.distributed.programs import transport
from tests.limits import LIMIT
from tests.random_networks.case import Layer, Network
from tests.random_networks.network_run import run_network

if not sys.platform.startswith("linux"):
    pytest.skip("what a process holds is read from /proc", allow_module_level=True)

HIDDEN = 32, 64, 96, 128
WARM_UP = 0.3
"""Not judged: buffers of every length are made, and libraries load what they need at first use."""
AGREED_KIB, LIMIT_KIB, NOISE_KIB = 1, 16, 4096
"""What a transport remembers of one combination of operation and options; by how much resident
memory may grow per iteration, where a layer's input takes 20 KiB in the mean; and in all."""

OPS = (
    *("all_gather_linear", "attention_linear_reduce_scatter"),
    *("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce"),
)


def drawn(dice: random.Random) -> Network:
    """Attention, MLP and output, of another shape and schedule each time."""
    schedule = Schedule(lanes=dice.randint(1, 3), chunks=dice.randint(1, 6))
    hidden, wgrad = dice.choice(HIDDEN), dice.choice(("whole", "blocks"))
    layer = Layer("", hidden, hidden, schedule=schedule, wgrad=wgrad, mask="causal")
    layers = tuple(replace(layer, op=op, inputs=96 if "att" in op else hidden) for op in OPS)
    return Network(2, layers, dice.random(), rows=dice.randint(1, 64), batch=dice.randint(1, 3))


def held() -> dict[str, int]:
    """What this process holds while nothing is under way, and its resident memory in KiB.

    Without idle buffers and compiled programs, which are bounded, and without what was agreed.
    """
    for rule in RULES.values():
        rule.cache_clear()
    transport()._begun.clear()
    transport()._programs.clear()
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)  # glibc's: gives freed memory back
    kinds = [type(one) for one in gc.get_objects()]
    files = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    pool = transport().scratch
    # Of idle memory, and views of it.
    idle = sum(1 + sum(map(len, one.known.values())) for one in pool._idle.values())
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident = pages * os.sysconf("SC_PAGESIZE") // 1024
    return {
        "sockets": sum(Path(f).is_symlink() and "socket:" in os.readlink(f) for f in files),
        "threads": len(os.listdir("/proc/self/task")),
        "in flight": len(transport()._in_flight),
        "handles": kinds.count(Running),
        "lent": pool.lent,
        "tensors": sum(issubclass(kind, torch.Tensor) for kind in kinds) - idle,
        "memory": resident - (pool.idle_bytes >> 10) - AGREED_KIB * len(transport()._agreed),
    }


def trained(rank: int, iterations: int, every: int) -> list[str]:
    """What grew after the warm-up."""
    dice, samples = random.Random(1), []
    for iteration in range(1, iterations + 1):
        run_network(drawn(dice), "fused", transport())
        if iteration % every == 0:
            samples.append(held())
    return grown(samples, every)


def grown(samples: list[dict[str, int]], every: int) -> list[str]:
    """The names of what is more at the end, of memory by more than it may be."""
    later = samples[min(int(len(samples) * WARM_UP), len(samples) - 3) :]
    allowed = {"memory": LIMIT_KIB * every * (len(later) - 1) + NOISE_KIB}
    return [
        name for name, first in later[0].items() if later[-1][name] > first + allowed.get(name, 0)
    ]


@pytest.mark.parametrize(
    ("iterations", "every"),
    # The allocator settles in the first hundreds.
    [(4, 1), pytest.param(1000, 50, marks=(pytest.mark.long, pytest.mark.timeout(4 * LIMIT)))],
)
def test_a_training_keeps_nothing(ranks, iterations: int, every: int) -> None:
    for found in ranks(2).run(trained, iterations, every, timeout=3 * LIMIT):
        # So few iterations say little about memory.
        assert [name for name in found if every > 1 or name != "memory"] == []
