"""A long training with a random shape in each iteration; does it leak?

Tensor parallel over gloo: small Llama layers with fused linears, forward, backward and optimizer.
Sequence, batch, chunks, lanes, hidden size and schedule are drawn anew in each iteration, the same
on every rank.  What each process holds is printed as it goes, and judged at the end; the command
exits with 1 if something grew.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from commfuse_npu import Schedule, Transport
from commfuse_npu.ops import (
    LinearOptions,
    all_gather_linear,
    attention_linear_reduce_scatter,
    linear_all_reduce,
    linear_reduce_scatter,
)
from scripts.evidence.markdown_section import replace_section
from scripts.evidence.process_state import ProcessState, process_state
from scripts.gloo_ranks import run_ranks

__all__ = ["allowed_kib", "complaints", "judged", "main", "slope_kib", "soak", "unexplained_kib"]

_HIDDEN = (32, 64, 96, 128)
_HEAD = 16
_RANKS = 2
_CONSTANT = ("sockets", "threads", "in_flight", "handles", "lent", "tensors")


# ------------------------------------------------------------------ the training


class _Llama(torch.nn.Module):
    """Attention, MLP and output of this rank: its heads, its part of the features between."""

    def __init__(self, hidden: int, size: int) -> None:
        super().__init__()
        part = hidden // size

        def weight(outputs: int, inputs: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)

        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(hidden) for _ in range(2))
        self.qkv, self.proj = weight(3 * part, hidden), weight(hidden, part)
        self.up, self.down = weight(4 * part, hidden), weight(hidden, 2 * part)
        self.output = weight(8, hidden)

    def forward(self, x: torch.Tensor, link: Transport, options: LinearOptions) -> torch.Tensor:
        """``[s, B, H]``, this rank's part of the sequence, to ``[s, B, 8]``."""
        fused: dict[str, Any] = {"transport": link, "options": options}
        mixed = all_gather_linear(self.norms[0](x), self.qkv, **fused)
        q, k, v = (part.unflatten(-1, (-1, _HEAD)) for part in mixed.chunk(3, -1))
        x = x + attention_linear_reduce_scatter(q, k, v, self.proj, causal=True, **fused)
        gate, value = all_gather_linear(self.norms[1](x), self.up, **fused).chunk(2, -1)
        x = x + linear_reduce_scatter(F.silu(gate) * value, self.down, **fused)
        return linear_all_reduce(x, self.output, **fused)


@dataclass(frozen=True)
class _Drawn:
    """The shape of one iteration, the same on every rank."""

    hidden: int
    shard: int
    batch: int
    options: LinearOptions


def _draws(seed: int, lanes: int) -> Iterator[_Drawn]:
    dice = random.Random(seed)
    while True:
        schedule = Schedule(lanes=dice.randint(1, lanes), chunks=dice.randint(1, 6))
        yield _Drawn(
            hidden=dice.choice(_HIDDEN),
            shard=dice.randint(1, 64),
            batch=dice.randint(1, 3),
            options=LinearOptions(schedule, wgrad=dice.choice(("whole", "blocks"))),
        )


def soak(
    transport: Transport, iterations: int, every: int, seed: int
) -> Iterator[tuple[float, ProcessState]]:
    """Train; after every so many iterations the loss and what this process holds.

    Every rank of the transport's group calls it together.
    """
    torch.manual_seed(seed + transport.rank)
    models = {hidden: _Llama(hidden, transport.size) for hidden in _HIDDEN}
    parameters = [parameter for model in models.values() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # it makes its state of each parameter at the first step
    optimizer.zero_grad()
    del parameters
    draws = _draws(seed, transport.lanes)
    for iteration in range(1, iterations + 1):
        drawn = next(draws)
        x = torch.randn(drawn.shard, drawn.batch, drawn.hidden)
        loss = models[drawn.hidden](x, transport, drawn.options).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        reached = loss.item()
        del x, loss
        if iteration % every == 0:
            yield reached, process_state(iteration, transport)


# ------------------------------------------------------------------- the verdict


_WARM_UP = 0.3
"""The first part of a run is not judged: buffers of every length are made, and libraries load what
they need at first use."""

_AGREED_KIB = 1.0
"""What a transport remembers of one combination of operation, shape and options (tracemalloc)."""

_LIMIT_KIB = 16.0
"""Per iteration.  A shard of the input of the mean shape, the smallest tensor that an iteration
makes as often as it has layers, is 20 KiB: one of them that stays is more than this."""

_NOISE_KIB = 4096.0
"""In all.  What the allocator cannot give back, because something lives behind it, is more or less
from one sample to the next, by 2 MiB where it was measured."""


def unexplained_kib(state: ProcessState) -> float:
    """Resident memory without the idle buffers, whose sum is bounded, and without what was agreed.

    Ranks compare each new combination once and remember it.
    """
    return state.rss_kib - state.idle_kib - _AGREED_KIB * state.agreed


def slope_kib(states: Sequence[ProcessState]) -> float:
    """Growth of :func:`unexplained_kib` per iteration: a line through the samples."""
    iterations = [state.iteration for state in states]
    return statistics.linear_regression(iterations, [unexplained_kib(s) for s in states]).slope


def judged(states: Sequence[ProcessState]) -> Sequence[ProcessState]:
    """The samples after the warm-up; at least three."""
    return states[min(int(len(states) * _WARM_UP), len(states) - 3) :]


def allowed_kib(states: Sequence[ProcessState]) -> float:
    """What :func:`slope_kib` may be: less, the longer the run."""
    return _LIMIT_KIB + _NOISE_KIB / (states[-1].iteration - states[0].iteration)


def complaints(states: Sequence[ProcessState]) -> list[str]:
    """What grew on one rank after the warm-up, of three samples or more."""
    later = judged(states)
    found = []
    for name in _CONSTANT:
        values = [getattr(state, name) for state in later]
        if values[-1] > values[0]:
            found.append(f"{name} grew from {values[0]} to {values[-1]}")
    slope, allowed = slope_kib(later), allowed_kib(later)
    if slope > allowed:
        found.append(f"memory grew by {slope:.1f} KiB per iteration; {allowed:.1f} are allowed")
    return found


# ------------------------------------------------------------------- the command


_COLUMNS = {
    "iteration": "iteration",
    "rss_kib": "RSS, KiB",
    "idle_kib": "idle buffers, KiB",
    "sockets": "sockets",
    "threads": "threads",
    "in_flight": "in flight",
    "handles": "handles",
    "lent": "lent",
    "tensors": "tensors",
    "agreed": "agreed",
    "objects": "objects",
}


def _row(rank: int, state: ProcessState) -> str:
    return f"| {rank} | {' | '.join(str(getattr(state, name)) for name in _COLUMNS)} |"


def _heading() -> str:
    return f"| rank | {' | '.join(_COLUMNS.values())} |\n|{'---:|' * (len(_COLUMNS) + 1)}"


def _report(
    given: argparse.Namespace, seconds: float, ranks: Sequence[Sequence[ProcessState]]
) -> str:
    """The figures in Markdown: the first, the first judged and the last sample of each rank."""
    lines = [
        f"`python -m scripts.evidence soak --iterations {given.iterations} --seed {given.seed}`, "
        f"CPU and gloo, {_RANKS} ranks, {os.cpu_count()} cores, torch {torch.__version__}: "
        f"{seconds:.0f} s. The first sample, the first one that is judged, the last:",
        "",
        _heading(),
    ]
    for rank, states in enumerate(ranks):
        shown = dict.fromkeys((states[0], judged(states)[0], states[-1]))
        lines += [_row(rank, state) for state in shown]
    lines += [
        "",
        f"Judged from iteration {judged(ranks[0])[0].iteration} on: "
        f"{', '.join(_CONSTANT)} may not grow at all, memory without idle buffers and agreements "
        f"by {allowed_kib(judged(ranks[0])):.1f} KiB per iteration.",
        "",
    ]
    for rank, states in enumerate(ranks):
        grew = complaints(states)
        verdict = "; ".join(grew) if grew else "nothing grew"
        slope = slope_kib(judged(states))
        lines.append(f"- rank {rank}: {verdict}; memory {slope:+.2f} KiB per iteration")
    return "\n".join(lines)


def _rank(rank: int, given: argparse.Namespace) -> int:
    transport = Transport.create(lanes=3, timeout=timedelta(seconds=120))
    start = time.monotonic()
    history: list[list[ProcessState]] = [[] for _ in range(_RANKS)]
    if rank == 0:
        print(_heading(), flush=True)
    for loss, state in soak(transport, given.iterations, given.every, given.seed):
        for other, (their_loss, theirs) in enumerate(transport.share("soak", (loss, state))):
            if not math.isfinite(their_loss):
                raise RuntimeError(f"the loss of rank {other} is {their_loss}")
            history[other].append(theirs)
            if rank == 0:
                print(_row(other, theirs), flush=True)
    if rank == 0:
        text = _report(given, time.monotonic() - start, history)
        print(f"\n{text}", flush=True)
        if given.markdown is not None:
            replace_section(given.markdown, "soak", text)
    transport.close()
    return int(any(complaints(states) for states in history))


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=1000, help="default %(default)s")
    parser.add_argument(
        "--every", type=int, metavar="N", help="a sample each so many; by default 20 in all"
    )
    parser.add_argument("--seed", type=int, default=1, help="default %(default)s")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the figures into its section soak"
    )
    given = parser.parse_args(argv)
    if given.every is None:
        given.every = max(1, given.iterations // 20)
    if given.every < 1 or given.iterations // given.every < 3:
        parser.error(
            f"--iterations {given.iterations} with --every {given.every} are fewer than the 3 "
            "samples that a verdict needs; raise --iterations or lower --every"
        )
    return given


def main(argv: Sequence[str]) -> int:
    """Train, and say what grew; 1 if anything did."""
    return run_ranks(_rank, _RANKS, _arguments(argv))
