"""Peak memory of each fused op beside that of its plain form.

Every tensor that torch allocates between the start of the forward and the end of the backward is
counted, from the events of `torch.profiler`: activations kept for the backward, gradients, buffers
of the transfers, scratch of the kernels.  Inputs and weights, which both forms have, are not.
Buffers are freed when an op gives them back; what the pool would keep for the next op instead, once
for all layers, has a column of its own.

Measured on CPU, whose attention kernel holds the scores of all its queries: the plain form pays for
all of them at once.  A device's kernel holds none, so attention is measured a second time with a
kernel that allocates its results and computes nothing.

A whole Llama layer in chunks that flow (:mod:`commfuse_npu.ops.flow`) is measured beside the same
layer in Megatron's order with sequence parallelism, which saves shards and gathers them again, and
beside the same chunks over blocking collectives, which save what they gathered; and what the
forward leaves for the backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from commfuse_npu import ops, reference
from commfuse_npu.ops import LinearOptions
from commfuse_npu.ops.flow import Flow
from commfuse_npu.plan import Schedule
from commfuse_npu.runtime.scratch import ScratchPool
from commfuse_npu.runtime.transport import Transport
from commfuse_npu.runtime.whole_file import write_json
from commfuse_npu.tools.bench.baselines import MegatronOrder
from commfuse_npu.tools.bench.buffer_pool import BufferPool
from commfuse_npu.tools.bench.carriers import TorchCollectives
from commfuse_npu.tools.bench.flows import FlowForm, flow_form, plain_flow_form
from commfuse_npu.tools.bench.forms import Form, baseline
from commfuse_npu.tools.bench.peak_memory import left_bytes, peak_bytes
from commfuse_npu.tools.bench.shapes import Shape
from commfuse_npu.tools.bench.works import Work
from scripts.gloo_ranks import run_ranks

__all__ = ["Memory", "main", "measure", "measure_layer", "without_scores"]


@dataclass(frozen=True)
class Memory:
    """Peaks of one op on one rank, in bytes.

    Attributes:
        block: one rank's rows of what is transferred.
        kept: what the pool of buffers keeps between calls, if it may.
        plain_saved, fused_saved: output and what is saved for the backward, where it was measured.
    """

    op: str
    plain: int
    fused: int
    block: int
    kept: int
    plain_saved: int | None = None
    fused_saved: int | None = None

    @property
    def extra_blocks(self) -> float:
        """What the fused form takes more than the plain one; negative if it takes less."""
        return (self.fused - self.plain) / self.block


class _WithoutScores:
    """Attention kernels that allocate what a device's kernel returns, and compute nothing."""

    @staticmethod
    def attention_forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        rows, batch, heads, _features = q.shape
        return torch.zeros_like(q), (q.new_zeros((batch, heads, rows, 1), dtype=torch.float32),)

    @staticmethod
    def attention_backward(
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        statistics: Sequence[torch.Tensor],
        grad_k: torch.Tensor,
        grad_v: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        grad_k.add_(torch.zeros_like(k))
        grad_v.add_(torch.zeros_like(v))
        return torch.zeros_like(q)


def measure(sequence: int, hidden: int, heads: int, chunks: int) -> list[Memory]:
    """Measure all ops on this rank; all ranks of the default group call it together.

    Args:
        sequence: whole, of micro-batch 1.
        hidden: whole; the group shares it out.
        heads: attention heads of all ranks together.
    """
    transport = Transport.create(lanes=2, timeout=timedelta(seconds=60))
    size, shard = transport.size, sequence // transport.size
    part = hidden // size
    options = LinearOptions(Schedule(lanes=2, chunks=chunks))
    fused: dict[str, Any] = {"transport": transport, "options": options}
    plain: dict[str, Any] = {"group": transport.group, "options": options}

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, requires_grad=True)

    x, wide = draw(shard, 1, hidden), draw(sequence, 1, part)
    column, row = draw(4 * part, hidden), draw(hidden, part)
    mine = [draw(sequence, 1, heads // size, hidden // heads) for _ in range(3)]
    whole = draw(hidden, hidden)
    calls: dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any], tuple[int, ...]]] = {
        "all_gather_linear": ((x, column), {}, (shard, 1, hidden)),
        "linear_reduce_scatter": ((wide, row), {}, (shard, 1, hidden)),
        "attention_linear_reduce_scatter": ((*mine, row), {"causal": True}, (shard, 1, hidden)),
        "attention_all_to_all": (tuple(mine), {"causal": True}, (shard, 1, part)),
        "attention_all_to_all_linear": ((*mine, whole), {"causal": True}, (shard, 1, part)),
    }
    found = []
    for name, (tensors, settings, block) in calls.items():
        forms = {
            "plain": _call(getattr(reference, f"plain_{name}"), tensors, settings | plain),
            "fused": _call(getattr(ops, name), tensors, settings | fused),
        }
        bytes_of_block = torch.Size(block).numel() * x.element_size()
        for scores in (True, False) if "attention" in name else (True,):
            peaks = {}
            with nullcontext() if scores else without_scores():
                transport.scratch = ScratchPool(keep_bytes=0)
                for form, call in forms.items():
                    peaks[form] = peak_bytes(call, "cpu")
                transport.scratch = ScratchPool()
                forms["fused"]()
            label = name if scores else f"{name}, no scores"
            found.append(
                Memory(label, block=bytes_of_block, kept=transport.scratch.idle_bytes, **peaks)
            )
    transport.close()
    return found


def measure_layer(sequence: int, hidden: int, heads: int, chunks: int) -> list[Memory]:
    """Measure a layer that flows beside each of its plain forms; as :func:`measure`.

    Args:
        chunks: of the sequence.
    """
    transport = Transport.create(lanes=1, timeout=timedelta(seconds=60))
    feed_forward = 7 * hidden // (2 * transport.size) * transport.size
    shape = Shape(sequence, hidden, feed_forward, heads, heads, hidden // heads)
    work = Work(
        "layer",
        shape,
        rank=transport.rank,
        size=transport.size,
        dtype="fp32",
        device="cpu",
        seed=0,
    )
    carrier = TorchCollectives(transport.group, BufferPool(keep_bytes=0))
    forms: dict[str, Form | FlowForm] = {
        "flow": flow_form(Flow(transport, chunks), lambda: 0.0),
        "Megatron's order": baseline(MegatronOrder(carrier)),
        "blocking chunks": plain_flow_form(transport, chunks),
    }
    found = []
    for scores in (True, False):
        with nullcontext() if scores else without_scores():
            for form in forms.values():
                work.run(form)  # rows in stripes, and what torch keeps for itself
            peaks = {name: peak_bytes(partial(work.run, of), "cpu") for name, of in forms.items()}
            # gloo's threads let go of what they carried a little later: the least of some.
            saved = {
                name: min(left_bytes(partial(work.forward, of)) for _ in range(4))
                for name, of in forms.items()
            }
        for plain in ("Megatron's order", "blocking chunks"):
            label = f"layer, {chunks} chunks that flow, beside {plain}"
            found.append(
                Memory(
                    label if scores else f"{label}, no scores",
                    peaks[plain],
                    peaks["flow"],
                    shape.sequence // transport.size * shape.hidden * 4,
                    0,
                    saved[plain],
                    saved["flow"],
                )
            )
    transport.close()
    return found


@contextmanager
def without_scores() -> Iterator[None]:
    """Inside, attention kernels allocate what a device's return, and compute nothing."""
    with ExitStack() as patches:
        for module in ("layers.attention_runs", "ops.flow.attention"):
            name = f"commfuse_npu.{module}.kernels_for"
            patches.enter_context(mock.patch(name, return_value=_WithoutScores))
        yield


def _call(
    op: Callable[..., torch.Tensor], tensors: tuple[torch.Tensor, ...], settings: dict[str, Any]
) -> Callable[[], None]:
    """Forward and backward of a first call; the gradient is freed with it."""

    def forward_and_backward() -> None:
        y = op(*tensors, **settings)
        y.backward(torch.empty_like(y).fill_(1.0))
        for tensor in tensors:
            tensor.grad = None

    return forward_and_backward


def _rank(rank: int, shape: tuple[int, int, int, int, int], file: str) -> None:
    *of_ops, flow = shape
    found = measure(*of_ops) + measure_layer(*shape[:3], flow)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if rank == 0:
        worst = [
            max(of_op, key=lambda memory: memory.fused) for of_op in zip(*everyone, strict=True)
        ]
        print(_table(worst, len(everyone), shape))
        if file:
            rows = [{**asdict(m), "extra_blocks": m.extra_blocks} for m in worst]
            write_json(Path(file), rows, indent=2)


def _table(found: list[Memory], size: int, shape: tuple[int, int, int, int, int]) -> str:
    sequence, hidden, heads, chunks, _ = shape
    lines = [
        f"peak of forward and backward, {size} ranks, sequence {sequence}, hidden {hidden}, "
        f"{heads} heads, fp32, {chunks} chunks, CPU; the rank with the highest",
        "",
        "| op | plain, MiB | fused, MiB | block, MiB | fused above plain | kept by the pool |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for m in found:
        sizes = " | ".join(f"{n / 2**20:.2f}" for n in (m.plain, m.fused, m.block))
        kept = m.kept / m.block
        lines.append(f"| {m.op} | {sizes} | {m.extra_blocks:+.2f} blocks | {kept:.2f} blocks |")
    lines.append("")
    for m in found:
        if m.plain_saved is not None and m.fused_saved is not None:
            saved = [f"{n / 2**20:.2f} MiB" for n in (m.plain_saved, m.fused_saved)]
            lines.append(f"after the forward, {m.op}: plain {saved[0]}, fused {saved[1]}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description="Peak memory of fused and plain ops, on CPU.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=1024, help="whole sequence")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--flow", type=int, default=4, help="chunks where layers flow")
    parser.add_argument("--json", default="", metavar="FILE")
    args = parser.parse_args(argv)
    for name in ("sequence", "hidden", "heads"):
        if getattr(args, name) < 1 or getattr(args, name) % args.ranks:
            parser.error(
                f"--{name} {getattr(args, name)} is not a positive multiple of --ranks {args.ranks}"
            )
    if args.hidden % args.heads:
        parser.error(f"--hidden {args.hidden} is not divisible by --heads {args.heads}")
    if args.flow < 2 or args.sequence % (args.flow * args.ranks):
        parser.error(
            f"--flow {args.flow} x --ranks {args.ranks} does not divide --sequence "
            f"{args.sequence}; choose 2 chunks or more that do"
        )
    shape = (args.sequence, args.hidden, args.heads, args.chunks, args.flow)
    return run_ranks(_rank, args.ranks, shape, args.json)
