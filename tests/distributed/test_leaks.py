"""Training with a different shape in each iteration leaks no memory, handles or threads."""

import ctypes
import gc
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from commfuse_npu import Schedule
from commfuse_npu.plan.rules import forget_programs
from commfuse_npu.runtime import agreement
from commfuse_npu.runtime.executor import Running
from tests.distributed.programs import transport
from tests.limits import LIMIT
from tests.random_networks.case import Layer, Network
from tests.random_networks.network_run import run_network

if not sys.platform.startswith("linux"):
    pytest.skip("what a process holds is read from /proc", allow_module_level=True)

HIDDEN = 32, 64, 96, 128
AGREED_KIB, LIMIT_KIB, NOISE_KIB = 1, 16, 4096
"""Memory that a transport keeps per combination of operation and options; allowed growth of the
resident memory per iteration (a layer's input takes 20 KiB on average); allowed noise in total."""

OPS = (
    *("all_gather_linear", "attention_linear_reduce_scatter"),
    *("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce"),
)


def drawn(dice: random.Random) -> Network:
    """A network of attention, MLP and output with a random shape and schedule."""
    schedule = Schedule(lanes=dice.randint(1, 3), chunks=dice.randint(1, 6))
    hidden = dice.choice(HIDDEN)
    layer = Layer("", hidden, hidden, schedule=schedule, mask="causal")
    layers = tuple(replace(layer, op=op, inputs=96 if "att" in op else hidden) for op in OPS)
    return Network(2, layers, dice.random(), rows=dice.randint(1, 64), batch=dice.randint(1, 3))


def held() -> dict[str, int]:
    """Counts of objects of this idle process, and its resident memory in KiB.

    Compiled programs, which are bounded, and agreed operations are excluded.
    """
    forget_programs()
    transport().scratch.clear()
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)  # glibc: returns freed memory
    kinds = [type(item) for item in gc.get_objects()]
    files = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident = pages * os.sysconf("SC_PAGESIZE") // 1024
    return {
        "sockets": sum(Path(f).is_symlink() and "socket:" in os.readlink(f) for f in files),
        "threads": len(os.listdir("/proc/self/task")),
        "in flight": len(transport().in_flight),
        "handles": kinds.count(Running),
        "lent": transport().scratch.lent,
        "tensors": sum(issubclass(kind, torch.Tensor) for kind in kinds),
        "memory": resident - AGREED_KIB * len(transport()._agreed),
    }


def trained(rank: int, iterations: int, every: int) -> list[str]:
    """Train, take a sample every ``every`` iterations, and return what grew by more than allowed.

    The first third is ignored: buffers are allocated and libraries load lazily.
    """
    dice, samples = random.Random(1), []
    for iteration in range(1, iterations + 1):
        with mock.patch.object(agreement, "_MOST_BEGUN", 0):  # holds one program
            run_network(drawn(dice), "fused", transport())
        if iteration % every == 0:
            samples.append(held())
    later = samples[len(samples) // 3 :]
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
    for names in ranks(2).run(trained, iterations, every, timeout=3 * LIMIT):
        # Four iterations are too few to judge memory.
        assert [name for name in names if every > 1 or name != "memory"] == []
