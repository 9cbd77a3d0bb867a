"""The experts of a layer (Megatron core's ``MoELayer``) on one rank, with evenly routed tokens.

Tokens are sorted by expert, sent to the ranks of their experts, sorted again there, processed by
two products per expert, and sent back the same way::

    alltoall, alltoall_seq   all-to-all over EP, all-gather over expert TP | products |
                             reduce-scatter over expert TP, all-to-all over EP
    allgather                all-gather of all tokens over EP and expert TP | products |
                             reduce-scatter over both

Transfers are blocking, and each is simulated in its own group.  Not modeled: the host reads how
many tokens go to each rank, and the device may then wait for the next launches.
"""

from dataclasses import dataclass

from commfuse_npu.tools.hardware.machine import ITEM_BYTES, Machine
from commfuse_npu.tools.simulate.engine import Links
from commfuse_npu.tools.simulate.rank import Rank, collective_seconds

_BACKWARD = 0.6
"""Launches in the backward of router and dispatcher per launch in the forward (22/36, counted)."""


@dataclass(frozen=True)
class Experts:
    """Experts and their layout.

    Attributes:
        number: of all ranks.
        each: experts per token (top-k).
        width: feed-forward width of one expert.
        shared: total width of the shared experts, which are ordinary linear layers.
        parallel, tensor: ranks among which experts are distributed (EP), and ranks that split each
            expert (expert TP).
        gathers: whether all tokens are gathered instead of an all-to-all.
        grouped: whether one kernel computes the products of all experts of a rank.
        halves: 2 if the experts are gated, else 1.
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
        """Number of experts on a rank."""
        return self.number // self.parallel

    def transfers(self, machine: Machine, tokens: int, hidden: int) -> float:
        """Seconds of one direction, to the experts or back."""
        row = hidden * ITEM_BYTES
        if self.gathers:
            return collective_seconds(Links(machine, self.parallel * self.tensor), tokens * row)
        sent = tokens * self.each / self.parallel * row
        dealt = Links(machine, self.parallel, self.tensor)
        shared = Links(machine, self.tensor)
        return collective_seconds(dealt, sent) + collective_seconds(
            shared, tokens * self.each * row
        )

    def forward(self, rank: Rank, tokens: int, hidden: int) -> None:
        """Add the forward for ``tokens`` tokens of this rank."""
        launches = round(rank.machine.expert_launches)
        rank.gemm("router", tokens, hidden, self.number, launches=launches)
        self._exchange(rank, "dispatch", tokens, hidden)
        for name, inputs, outputs in self.layers(hidden):
            self._products(rank, name, tokens, inputs, outputs)
        self._activation(rank, tokens, self.halves + 1)
        self._exchange(rank, "combine", tokens, hidden)

    def backward(self, rank: Rank, tokens: int, hidden: int) -> None:
        """Add the backward for ``tokens`` tokens of this rank."""
        self._exchange(rank, "combine backward", tokens, hidden)
        for name, inputs, outputs in reversed(self.layers(hidden)):
            self._products(rank, f"{name} backward", tokens, outputs, inputs)
            if not rank.lora:
                self._products(rank, f"{name} wgrad", tokens, inputs, outputs, wgrad=True)
        self._activation(rank, tokens, 2 * self.halves + 1)
        self._exchange(rank, "dispatch backward", tokens, hidden)
        products = 1 if rank.lora else 2
        seconds = products * rank.machine.gemm(tokens, hidden, self.number)
        launches = round(_BACKWARD * rank.machine.expert_launches)
        rank.compute("router backward", seconds, launches=launches)

    def layers(self, hidden: int) -> tuple[tuple[str, int, int], ...]:
        """Name, input width and output width of each product of an expert on one rank."""
        width = self.width // self.tensor
        return ("fc1 of experts", hidden, self.halves * width), ("fc2 of experts", width, hidden)

    def _activation(self, rank: Rank, tokens: int, widths: int) -> None:
        elements = widths * tokens * self.each * self.tensor * (self.width // self.tensor)
        rank.elementwise("experts activation", elements, 1 if self.grouped else self.local)

    def _exchange(self, rank: Rank, name: str, tokens: int, hidden: int) -> None:
        """Sort and send tokens; the receiver sorts them by expert."""
        copies = 1 + self.tensor if self.local > 1 else 1
        moved = tokens * self.each * copies
        rank.elementwise(f"{name}: sort", 2 * moved * hidden)
        rank.need(rank.elsewhere(name, self.transfers(rank.machine, tokens, hidden)))

    def _products(
        self, rank: Rank, name: str, tokens: int, inputs: int, outputs: int, *, wgrad: bool = False
    ) -> None:
        """Add the products of every expert of this rank, each with its share of the rows."""
        each = tokens * self.each * self.tensor / self.local
        machine = rank.machine
        sizes = (inputs, each, outputs) if wgrad else (each, inputs, outputs)
        seconds = self.local * machine.gemm(*sizes, start=not self.grouped)
        if self.grouped:
            rank.compute(name, machine.gemm_start + seconds)
        else:
            rank.compute(name, seconds, launches=self.local * (1 + wgrad))
