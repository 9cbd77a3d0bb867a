"""Experts of a layer (Megatron core's ``MoELayer``), on one rank, with tokens dealt out evenly.

Tokens are sorted by expert, sent to the ranks that have the experts, sorted again there, go through
two products per expert, and all the way back::

    alltoall, alltoall_seq   all-to-all over EP, all-gather over expert TP | products |
                             reduce-scatter over expert TP, all-to-all over EP
    allgather                all-gather of all tokens over EP and expert TP | products |
                             reduce-scatter over both

Transfers are blocking, each played in a group of its own.  Left out: the device may wait for the
launches that follow where the host reads how many tokens go where.
"""

from __future__ import annotations

from dataclasses import dataclass

from commfuse_npu.hardware.machine import ITEM_BYTES, Machine
from commfuse_npu.tools.simulate.group import Group, collective_seconds
from commfuse_npu.tools.simulate.rank import Rank

__all__ = ["Experts"]

_BACKWARD = 0.6
"""Launches of a router's and dispatcher's backward, of those of its forward (22 of 36, counted)."""


@dataclass(frozen=True)
class Experts:
    """Experts, and how they are laid out.

    Attributes:
        number: of all ranks.
        each: experts that a token goes to.
        width: feed-forward width of one.
        shared: width of the shared experts together, which are linear layers as any other.
        parallel, tensor: ranks among which experts are dealt out (EP), and that share each of them
            (expert TP).
        gathers: whether all tokens are gathered in place of an all-to-all.
        grouped: whether one kernel makes the products of all of a rank's experts.
        halves: 2 if they are gated.
    """

    number: int
    each: int
    width: int
    shared: int
    parallel: int
    tensor: int
    gathers: bool = False
    grouped: bool = True
    halves: int = 2

    @property
    def local(self) -> int:
        """Experts of a rank."""
        return self.number // self.parallel

    def parameters(self, hidden: int) -> float:
        """Of one rank's experts."""
        return self.local * (self.halves + 1.0) * hidden * self.width / self.tensor

    def transfers(self, machine: Machine, tokens: int, hidden: int) -> float:
        """Seconds of one way, to the experts or back."""
        row = float(hidden * ITEM_BYTES)
        if self.gathers:
            return collective_seconds(Group(machine, self.parallel * self.tensor), tokens * row)
        sent = tokens * self.each / self.parallel * row
        dealt, shared = Group(machine, self.parallel, self.tensor), Group(machine, self.tensor)
        return collective_seconds(dealt, sent) + collective_seconds(
            shared, tokens * self.each * row
        )

    def forward(self, rank: Rank, tokens: int, hidden: int) -> None:
        """Add the forward, of so many tokens of this rank."""
        machine, made = rank.machine, tokens * self.each * self.tensor
        rank.compute(
            "router",
            machine.gemm(tokens, hidden, self.number),
            launches=round(machine.expert_launches),
        )
        self._exchange(rank, "dispatch", tokens, hidden)
        for name, inputs, outputs in self._layers(hidden):
            self._products(rank, name, made, inputs, outputs)
        self._activation(rank, made, self.halves + 1)
        self._exchange(rank, "combine", tokens, hidden)

    def backward(self, rank: Rank, tokens: int, hidden: int) -> None:
        """Add the backward."""
        machine, made = rank.machine, tokens * self.each * self.tensor
        self._exchange(rank, "combine backward", tokens, hidden)
        for name, inputs, outputs in reversed(self._layers(hidden)):
            self._products(rank, f"{name} backward", made, outputs, inputs)
            self._products(rank, f"{name} wgrad", made, inputs, outputs, wgrad=True)
        self._activation(rank, made, 2 * self.halves + 1)
        self._exchange(rank, "dispatch backward", tokens, hidden)
        seconds = 2 * machine.gemm(tokens, hidden, self.number)
        launches = round(_BACKWARD * machine.expert_launches)
        rank.compute("router backward", seconds, launches=launches)

    def _layers(self, hidden: int) -> tuple[tuple[str, int, int], ...]:
        """Name, inputs and outputs of each product of an expert."""
        width = self.width // self.tensor
        return ("experts 1", hidden, self.halves * width), ("experts 2", width, hidden)

    def _activation(self, rank: Rank, rows: int, widths: int) -> None:
        traffic = widths * rows * (self.width // self.tensor) * ITEM_BYTES
        rank.compute("experts activation", rank.machine.memory(traffic), launches=self._kernels)

    @property
    def _kernels(self) -> int:
        return 1 if self.grouped else self.local

    def _exchange(self, rank: Rank, name: str, tokens: int, hidden: int) -> None:
        """Sort and send; at the other end sort by expert."""
        moved = tokens * self.each * (1 + self.tensor * (self.local > 1))
        rank.compute(f"{name}: sort", rank.machine.memory(2.0 * moved * hidden * ITEM_BYTES))
        if rank.variant.kind != "compute":
            seconds = self.transfers(rank.machine, tokens, hidden)
            rank.need(rank.elsewhere(name, seconds))

    def _products(
        self, rank: Rank, name: str, rows: int, inputs: int, outputs: int, *, wgrad: bool = False
    ) -> None:
        """Of every expert of this rank with its share of the rows."""
        each, machine = rows / self.local, rank.machine
        sizes = (inputs, each, outputs) if wgrad else (each, inputs, outputs)
        one = machine.gemm(*sizes, start=not self.grouped)
        start = machine.gemm_start if self.grouped else 0.0
        launches = self._kernels * (2 if wgrad and not self.grouped else 1)
        rank.compute(name, start + self.local * one, launches=launches)
