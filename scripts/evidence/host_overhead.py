"""What a fused op costs its host, beside the same layer written out by hand.

On a stand-in for a process group that completes every transfer at once (torch's own, for tests),
so that nothing but the host's work is left: views, posts, waits, launches of small GEMMs.  Measured
is the CPU time of the thread that runs the op; op and hand-written loop
(:mod:`scripts.evidence.hand_written`) take turns, and the ratio is that of the medians.  Programs
are for batches, as on HCCL.

So is a whole layer in chunks that flow, beside one in Megatron's order over the same group's
collectives, which has a transfer, a GEMM and an attention kernel where the flow has one per chunk.
Attention kernels allocate their results and compute nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.ops import LinearOptions, all_gather_linear, linear_reduce_scatter
from commfuse_npu.ops.flow import Flow
from commfuse_npu.plan import Schedule
from commfuse_npu.runtime.transport import Transport
from commfuse_npu.tools.bench.baselines import MegatronOrder
from commfuse_npu.tools.bench.buffer_pool import BufferPool
from commfuse_npu.tools.bench.carriers import TorchCollectives
from commfuse_npu.tools.bench.flows import FlowForm, flow_form
from commfuse_npu.tools.bench.forms import Form, baseline
from commfuse_npu.tools.bench.shapes import Shape
from commfuse_npu.tools.bench.works import Work
from scripts.evidence.hand_written import Setting, column_layer, row_layer
from scripts.evidence.memory import without_scores

__all__ = ["Overhead", "main", "measure"]

_ROWS, _FEATURES = 64, 64
_LAYERS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., Any], bool]] = {
    "all_gather_linear": (all_gather_linear, column_layer, False),
    "linear_reduce_scatter": (linear_reduce_scatter, row_layer, True),
}
"""Op, the same by hand, and whether its input has the rows of all ranks."""


@dataclass(frozen=True)
class Overhead:
    """Of one direction of one op, in microseconds of CPU time: medians."""

    op: str
    direction: str
    chunks: int
    op_us: float
    hand_us: float
    beside: str = "by hand"

    @property
    def ratio(self) -> float:
        return self.op_us / self.hand_us

    def __str__(self) -> str:
        return (
            f"{self.op} {self.direction}, {self.chunks} chunks: {self.op_us:.0f} us, {self.beside} "
            f"{self.hand_us:.0f} us, {self.ratio:.2f}x"
        )


class _Alone(Transport):
    """A transport whose peers agree with everything."""

    def share(self, name: str, value: Any) -> list[Any]:
        return [value] * self.size


def _transport(size: int) -> tuple[Transport, list[dist.ProcessGroup]]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # Nothing arrives: scratch is what it was, and denormal numbers are slow.
    torch.set_flush_denormal(True)
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=size // 2, world_size=size, store=FakeStore())
    everyone = list(range(size))
    lanes = [dist.new_group(everyone) for _ in range(size - 1)]
    world = dist.group.WORLD
    assert world is not None
    limit = timedelta(seconds=60)
    return _Alone(world, lanes, lanes[0], timeout=limit, batched=True), lanes


def measure(
    ranks: int, calls: int, chunks: Iterable[int] = (1, 2, 4), flows: Iterable[int] = (4,)
) -> list[Overhead]:
    """Medians over ``calls`` calls of each op and direction; ends the process group it makes.

    Args:
        chunks: of an op.
        flows: chunks of a layer that flows; at most 8.
    """
    transport, lanes = _transport(ranks)
    try:
        found = [
            overhead
            for name in _LAYERS
            for count in chunks
            for overhead in _op(name, count, transport, lanes, calls)
        ]
        return found + [one for count in flows for one in _layer(count, transport, calls)]
    finally:
        dist.destroy_process_group()
        torch.set_flush_denormal(False)


def _op(
    name: str, chunks: int, transport: Transport, lanes: list[dist.ProcessGroup], calls: int
) -> list[Overhead]:
    op, by_hand, whole = _LAYERS[name]
    rows = _ROWS * (transport.size if whole else 1)
    x = torch.ones(rows, _FEATURES, requires_grad=True)
    weight = torch.ones(_FEATURES, _FEATURES, requires_grad=True)
    options = LinearOptions(Schedule(chunks=chunks))
    setting = Setting(lanes, transport.rank, transport.size, _ROWS, chunks, {})
    function, arguments = by_hand(setting, x, weight)
    forms: list[Callable[[], torch.Tensor]] = [
        lambda: op(x, weight, transport=transport, options=options),
        lambda: function.apply(*arguments),
    ]
    grad = torch.ones_like(forms[0]())
    times = _compared(forms, lambda y: y.backward(grad), calls)
    return [Overhead(name, direction, chunks, *medians) for direction, medians in times.items()]


def _layer(chunks: int, transport: Transport, calls: int) -> list[Overhead]:
    size = transport.size
    shape = Shape(_ROWS * size, _FEATURES, _FEATURES * size, size, size, _FEATURES)
    rank = transport.rank
    work = Work("layer", shape, rank=rank, size=size, dtype="fp32", device="cpu", seed=0)
    carrier = TorchCollectives(transport.group, BufferPool())
    forms: list[Form | FlowForm] = [
        flow_form(Flow(transport, chunks), lambda: 0.0),
        baseline(MegatronOrder(carrier), runs=1),
    ]
    calls_of = [partial(work.forward, form) for form in forms]
    with without_scores():
        times = _compared(calls_of, lambda made: torch.autograd.grad(*made), calls)
    return [
        Overhead("layer that flows", direction, chunks, *medians, "in Megatron's order")
        for direction, medians in times.items()
    ]


def _compared(
    forms: Sequence[Callable[[], Any]], backward: Callable[[Any], object], calls: int
) -> dict[str, tuple[float, float]]:
    """Microseconds of both forms, by direction: medians."""
    times: list[tuple[list[float], list[float]]] = [([], []), ([], [])]
    for number in range(calls + 10):
        # By turns first and second: what is left in the caches helps both alike.
        for form in (0, 1) if number % 2 else (1, 0):
            start = time.thread_time()
            made = forms[form]()
            times[form][0].append(time.thread_time() - start)
            start = time.thread_time()
            backward(made)
            times[form][1].append(time.thread_time() - start)
    op, other = ([1e6 * statistics.median(way[10:]) for way in of] for of in times)
    return dict(zip(("forward", "backward"), zip(op, other, strict=True), strict=True))


def main(argv: Sequence[str]) -> int:
    """Print a line per op, direction and number of chunks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=8, choices=range(2, 65), metavar="2..64")
    parser.add_argument("--calls", type=int, default=300, help="per op; default %(default)s")
    given = parser.parse_args(argv)
    if given.calls < 1:
        parser.error(f"--calls is {given.calls}; give a whole number from 1")
    print(f"{given.ranks} ranks, stand-in group, medians of {given.calls} calls, CPU time")
    for overhead in measure(given.ranks, given.calls):
        print(overhead)
    return 0
