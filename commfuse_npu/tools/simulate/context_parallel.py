"""Attention under context parallelism, forward and backward, simulated separately.

With a ring, keys and values circulate while attention uses them.  With Ulysses, a rank has some
rows of the sequence for all heads, and attends with some heads over the full sequence; one
all-to-all precedes attention and another follows it.  Unfused, both are fully exposed.  Fused
(``--commfuse-ulysses``, :mod:`commfuse_npu.ops.ulysses`), including the projections if tensor
parallelism does not split their weights::

    forward   project heads of r+1, .. | wait | attend rows of r+1, .., own | project own, r-1, ..
              -> heads                        -> rows
    backward  dgrad heads of r+1, .., own | wgrad | attend own, r-1, .. | dgrad own, r-1, .. | wgrad
              -> heads                                                  -> rows

Under tensor parallelism the projections are not fused, so the all-to-all of queries, keys and
values is exposed.

Legend: ``N`` ranks, ``block`` rows per rank, of ``N * block`` rows of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from commfuse_npu.hardware.machine import ITEM_BYTES, SUM_BYTES, Machine
from commfuse_npu.plan import Schedule
from commfuse_npu.plan.instructions import Compute
from commfuse_npu.plan.rules import exchange
from commfuse_npu.tools.simulate.group import Group
from commfuse_npu.tools.simulate.llama import (
    BACKWARD_ATTENTION,
    Attended,
    LayerShape,
    Queries,
    rows_of,
    run_of,
)
from commfuse_npu.tools.simulate.rank import EVENTS, Rank, Width
from commfuse_npu.tools.simulate.variants import COMPUTE_ONLY, REFERENCE, Variant

__all__ = ["Attention", "ContextParallel"]

Attention = tuple[Attended, Attended] | None
"""Forward and backward; ``None`` if a layer has no context parallelism."""


_ROUND = 6, 10
"""Launches per round of the ring, forward and backward: slices, attention, and the merge with the
results of earlier rounds (MindSpeed 26.1.0, counted by hand with its fused update)."""
_HOST_OF_EXCHANGES = 13, 0, 4 * EVENTS
"""Launches, posts and events of attention between exchanges of queries, keys, values and outputs:
a copy before and after each exchange (MindSpeed 26.1.0, counted by hand)."""


@dataclass(frozen=True)
class ContextParallel:
    """A context-parallel group and its attention.

    Attributes:
        shape: the layer, for one tensor-parallel group.
        size: number of ranks.
        key_value: width of all keys, or of all values.
        groups: query groups of the model.
        ulysses: whether heads are exchanged instead of circulating keys.
        fuses: whether CommFuse's variants fuse these exchanges.
    """

    shape: LayerShape
    size: int
    key_value: int
    groups: int
    ulysses: bool
    fuses: bool

    def attended(self, machine: Machine, variant: Variant) -> Attention:
        """Forward and backward attention of a layer in a variant."""
        free = variant.kind == COMPUTE_ONLY.kind
        schedule = variant.schedule if self.fuses else None
        return _attended(machine, self, COMPUTE_ONLY if free else self.exchanges(machine, schedule))

    def group(self, machine: Machine) -> Group:
        return Group(machine, self.size, stride=self.shape.ranks)

    def exchanges(self, machine: Machine, schedule: Schedule | None) -> Variant:
        """The variant that exchanges heads: fused with a schedule, else the reference."""
        if schedule is None:
            return REFERENCE
        # The schedule options of tensor parallelism apply here, too; attention has even chunks.
        lanes = min(schedule.lanes_for(self.size), self.size - 1)
        direct = self.group(machine).direct
        return Variant("ulysses", "fused", replace(direct, lanes=lanes, chunks=schedule.chunks))

    @property
    def _repeats(self) -> float:
        """How often each key head is sent: once, unless there are fewer key heads than ranks."""
        return max(1.0, self.shape.ranks * self.size / self.groups)

    def projects(self, variant: Variant) -> bool:
        """Whether the projections are fused; not if key heads are repeated before them."""
        return variant.kind == "fused" and self.shape.ranks == 1 and self._repeats == 1

    def forward(self, rank: Rank) -> None:
        """Add the forward with Ulysses to a rank's launches."""
        block, machine, hidden = self.shape.rows, rank.machine, self.shape.hidden
        projects = self.projects(rank.variant)
        heads, out = self._heads(rank), self._out(rank)
        attend = self._attend(rank)

        def project(instruction: Compute, _: Width) -> float:
            return machine.gemm(rows_of(instruction), hidden, heads)

        def join(instruction: Compute, _: Width) -> float:
            """The GEMM of a part of the inner dimension, added to a sum; nothing if not fused."""
            if not projects:
                return 0.0
            return machine.gemm(rows_of(instruction), out, hidden, result_bytes=2 * SUM_BYTES)

        if projects:
            program = exchange(rank.spec("qkv"), block, heads, "made", False, True, False)
            rank.run("qkv", program, {"received": heads}, {"make": project})
        else:
            rank.need(rank.collective("qkv", block * heads * ITEM_BYTES))
        if rank.variant.kind != "fused":
            rank.compute("attention", attend(slice(0, rank.size * block)))
            rank.need(rank.collective("out", block * out * ITEM_BYTES))
            return
        spec = rank.spec("attention", causal=True)
        program = exchange(spec, block, out, "made and kept", True, projects, False)
        works = {"make": lambda work, _: attend(run_of(work)), "use": join}
        rank.run("attention", program, {"blocks": out, "received": out}, works)

    def backward(self, rank: Rank) -> None:
        """Add the backward with Ulysses to a rank's launches."""
        block, machine, hidden = self.shape.rows, rank.machine, self.shape.hidden
        projects = self.projects(rank.variant)
        heads, out = self._heads(rank), self._out(rank)
        attend = self._attend(rank, BACKWARD_ATTENTION)

        def project(instruction: Compute, _: Width) -> float:
            return machine.gemm(rows_of(instruction), hidden, out)

        def wgrad(_: Compute, __: Width) -> float:
            return machine.gemm(hidden, block, hidden)

        def dgrad(instruction: Compute, _: Width) -> float:
            return machine.gemm(rows_of(instruction), heads, hidden, result_bytes=2 * SUM_BYTES)

        works = {"make": project, "wgrad": wgrad, "use": lambda work, _: attend(run_of(work))}
        if rank.variant.kind != "fused":
            rank.need(rank.collective("out", block * out * ITEM_BYTES))
            rank.compute("attention", attend(slice(0, rank.size * block)))
        elif projects:
            name = "proj and attention"
            program = exchange(rank.spec(name), block, out, "made", True, False, True)
            rank.run(name, program, {}, works)
        else:
            spec = rank.spec("attention", causal=True)
            program = exchange(spec, block, out, "given", True, False, False)
            rank.run("attention", program, {"blocks": out}, works)
        if not projects:
            rank.need(rank.collective("qkv", block * heads * ITEM_BYTES))
            return
        program = exchange(rank.spec("qkv"), block, heads, "given", True, True, False)
        rank.run("qkv", program, {"blocks": heads, "received": heads}, {"use": dgrad})
        rank.compute("qkv wgrad", machine.gemm(self.shape.qkv, block, hidden))

    def _heads(self, rank: Rank) -> int:
        """Width of the queries, keys and values of one rank's heads."""
        width = self.shape.qkv + 2 * self.key_value * (self._repeats - 1)
        return round(width / self.shape.ranks / rank.size)

    def _out(self, rank: Rank) -> int:
        """Width of the attention output of one rank's heads."""
        return self.shape.hidden // self.shape.ranks // rank.size

    def _attend(self, rank: Rank, factor: float = 1.0) -> Queries:
        """Seconds of attention of some rows of the full sequence, with this rank's heads."""
        shape = self.shape
        whole = replace(shape, sequence=shape.attended, ranks=shape.ranks * rank.size)
        return whole.attention(rank.machine, factor)


@lru_cache(4096)
def _attended(machine: Machine, context: ContextParallel, variant: Variant) -> Attention:
    group, pair = context.group(machine), []
    if context.ulysses:
        for build in (context.forward, context.backward):
            result = group.simulate(variant, build)
            projects = context.projects(variant)
            pair.append(Attended(result.seconds, result.waiting, projects, *_HOST_OF_EXCHANGES))
        return pair[0], pair[1]
    shape = context.shape
    kv = shape.rows * 2 * context.key_value / shape.ranks * ITEM_BYTES
    for factor, passed in ((1.0, 1), (BACKWARD_ATTENTION, 2)):
        whole = shape.attention(machine, factor)(slice(0, shape.rows))

        def around(rank: Rank, seconds: float = whole, size: float = kv * passed) -> None:
            waits: tuple[int, ...] = ()
            for remaining in reversed(range(rank.size)):
                before = waits
                if remaining:
                    waits = rank.pass_on("keys and values", size, after=before)
                rank.compute("attention", seconds / rank.size, before)

        if variant.kind == "compute":
            pair.append(Attended(whole))
        else:
            # On a ring over several nodes only some of the ranks send to another node.
            differ = 1 < group.members_per_node < group.size
            result = group.simulate(variant, around, whole=differ)
            host = (context.size * count for count in (_ROUND[passed - 1], passed, EVENTS * passed))
            pair.append(Attended(result.seconds, result.waiting, False, *host))
    return pair[0], pair[1]
