"""Chunks that flow through layers: the launches are those of the ops, and nothing waits."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from commfuse_npu.ops.flow import Arriving, Flow, Leaving, Stage, transfers
from commfuse_npu.tools.config_file import find_config
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate import flow
from commfuse_npu.tools.simulate.footprint import buffers, communicators
from commfuse_npu.tools.simulate.group import Group
from commfuse_npu.tools.simulate.hardware import Hardware
from commfuse_npu.tools.simulate.launches import Chunk
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.rank import Rank
from commfuse_npu.tools.simulate.step import Step
from commfuse_npu.tools.simulate.sweep import Layout, Options, training
from commfuse_npu.tools.simulate.variants import COMPUTE_ONLY, REFERENCE, Variant, flowing
from tests.tools.simulate.machines import IDEAL

SERVER = Hardware.load(find_config("ascend_910b_server", "hardware"))
LLAMA3_8B = ModelConfig.load(find_config("llama3_8b"))
RANKS, LAYERS = 2, 2
SHAPE = LayerShape(
    sequence=48, attended=48, batch=1, hidden=8, feed_forward=12, qkv=24, vocabulary=32, ranks=RANKS
)
Event = tuple[str, frozenset[int]]
"""What is launched, and which transfers it waits for, by their number."""


# ------------------------------------------------------------------- as recorded


@dataclass
class Record:
    """What one rank launches, with transfers that bring any numbers at once.

    Attributes:
        held: tensors of a chunk of all ranks that transfers read or wrote.
        most: how many of them were there at once.
    """

    events: list[Event] = field(default_factory=list)
    begun: int = 0
    waits: set[int] = field(default_factory=set)
    held: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    most: int = 0

    def work(self, name: str) -> None:
        # What leaves a part and enters the next one is one piece of work.
        if self.waits or name != "norm" or not self.events or self.events[-1][0] != name:
            self.events.append((name, frozenset(self.waits)))
        self.waits.clear()
        self.most = max(self.most, sum(ref() is not None for ref in self.held))

    def begin(self, name: str, whole: torch.Tensor, result: torch.Tensor) -> tuple[Any, Any]:
        self.held.append(weakref.ref(whole))
        # The work that follows needs them, too.
        self.events.append((name, frozenset(self.waits)))
        self.begun += 1
        return result, self.begun - 1

    def gather(self, shard: torch.Tensor, _: object) -> tuple[Any, Any]:
        whole = torch.cat([shard] * RANKS)
        return self.begin("gather", whole, whole)

    def scatter(self, full: torch.Tensor, _: object) -> tuple[Any, Any]:
        return self.begin("scatter", full, full[: full.shape[0] // RANKS].clone())


class _Noted(torch.autograd.Function):
    """Notes when it runs forward, and when backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, note: Any, name: str) -> torch.Tensor:
        ctx.note, ctx.name = note, name
        note(name)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.note(ctx.name)
        return grad.clone(), None, None


class FakePart:
    """Attention or MLP of a layer, as :mod:`mindspeed_patches.flow` has them."""

    def __init__(self, work: Callable[[str], None], attention: bool) -> None:
        h, f, qkv = SHAPE.hidden, SHAPE.feed_forward // RANKS, SHAPE.qkv // RANKS
        sizes = ((qkv, h), (h, h // RANKS)) if attention else ((2 * f, h), (h, f))
        self.name = "attention" if attention else "MLP"
        self.between = ("rotary", "attention") if attention else ("SwiGLU",)
        self.weights = [(torch.ones(size, requires_grad=True), False) for size in sizes]
        self._work = work

    def _note(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return cast(torch.Tensor, _Noted.apply(x, self._work, name))

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._note(hidden, "norm")

    def work(self, flow: Flow, arriving: Arriving, weights: Any, chunk: int) -> Leaving:
        y = flow.column(arriving, weights[0])
        for name in self.between:
            y = self._note(y, name)
        inner = self.weights[1][0].shape[1]
        return flow.row(y[..., :inner], weights[1], self.name, arriving)

    def leave(self, y: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self._note(y + hidden, "norm")


def recorded(monkeypatch: pytest.MonkeyPatch, chunks: int) -> tuple[Record, Record]:
    """Forward and backward of two layers by the ops themselves."""
    forward, backward = Record(), Record()
    now = [forward]
    matmul, add = torch.matmul, transfers.WeightGradient.add

    def noted_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        now[0].work("gemm")
        return matmul(x, weight)

    def noted_add(self: Any, grad: torch.Tensor, x: torch.Tensor) -> None:
        now[0].work("wgrad")
        add(self, grad, x)

    monkeypatch.setattr(torch, "matmul", noted_matmul)
    monkeypatch.setattr(transfers.WeightGradient, "add", noted_add)
    monkeypatch.setattr(transfers, "begin_all_gather", lambda *given: now[0].gather(*given))
    monkeypatch.setattr(transfers, "begin_reduce_scatter", lambda *given: now[0].scatter(*given))
    transport = SimpleNamespace(
        size=RANKS, group=None, broken=False, remembered={}, blocked_seconds=0.0, trace=None,
        order_log=None,
        agree=lambda *_, **__: None, wait_for=lambda number: now[0].waits.add(number),
    )  # fmt: skip

    parts = [
        FakePart(lambda name: now[0].work(name), attention)
        for _ in range(LAYERS)
        for attention in (True, False)
    ]
    hidden = torch.ones(SHAPE.block, 1, SHAPE.hidden, requires_grad=True)
    stage = Stage(Flow(cast(Any, transport), chunks), hidden, parts[0])
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        stage.run(part, following)
    y = stage.end()
    now[0] = backward
    y.sum().backward()
    return forward, backward


# ------------------------------------------------------------------- as simulated


def launched(build: Any, chunks: int) -> list[Event]:
    """The same of the simulator, by the same names."""
    rank = Rank(IDEAL, 0, RANKS, RANKS, flowing(chunks))
    build(rank, SHAPE, chunks, LAYERS)
    numbers: dict[int, int] = {}
    found: list[Event] = []
    for index, one in enumerate(rank.finish().operations):
        waits = frozenset(numbers[other] for other in one.after if other in numbers)
        if one.sends:
            numbers[index] = len(numbers)
        kinds = {"qkv": "gemm", "proj": "gemm", "fc1": "gemm", "fc2": "gemm", "re-gather": "gather",
                 "dgrad": "gemm", "residual, norm": "norm"}  # fmt: skip
        name = one.name.removesuffix(" backward")
        linear, _, what = name.rpartition(" ")
        name = what if linear.split(" ")[0] in kinds else name
        found.append((kinds.get(name, name), waits))
    return found


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_the_launches_are_those_of_the_ops(monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    for record, build in zip(
        recorded(monkeypatch, chunks), (flow.forward, flow.backward), strict=True
    ):
        assert record.events == launched(build, chunks)
        assert not record.waits


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_buffers_are_what_transfers_hold_at_most(
    monkeypatch: pytest.MonkeyPatch, chunks: int
) -> None:
    forward, backward = recorded(monkeypatch, chunks)
    assert forward.most <= backward.most == chunks + 2


# ------------------------------------------------------------------- what it costs


def names(build: Any, chunks: int, layers: int, variant: Variant | None = None) -> Counter[str]:
    rank = Rank(IDEAL, 0, RANKS, RANKS, variant or flowing(chunks))
    build(rank, SHAPE, chunks, layers)
    return Counter(one.name for one in rank.finish().operations if one.sends)


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_a_collective_per_chunk_and_transfer(chunks: int) -> None:
    for layers in (1, 2):
        forward = "qkv gather", "proj scatter", "fc1 gather", "fc2 scatter"
        backward = (f"{rows} backward gather" for rows in ("fc2", "proj"))
        again = (f"{name} backward {what}" for name in ("fc1", "qkv")
                 for what in ("re-gather", "scatter"))  # fmt: skip
        each = chunks * layers
        assert names(flow.forward, chunks, layers) == dict.fromkeys(forward, each)
        assert names(flow.backward, chunks, layers) == dict.fromkeys((*backward, *again), each)
        for build in (flow.forward, flow.backward):
            assert not names(build, chunks, layers, COMPUTE_ONLY)


def test_chunks_have_to_divide() -> None:
    with pytest.raises(ValueError, match="24 tokens per rank cannot be cut into 5 equal chunks"):
        names(flow.forward, 5, 1)
    assert flow.divides(SHAPE, 3)
    assert not flow.divides(SHAPE, 5)
    # Sequences are cut one by one, whatever a micro-batch has of them.
    assert not flow.divides(replace(SHAPE, batch=5), 5)


def step(hardware: Hardware = SERVER, **options: Any) -> Step:
    given = Options(micro_batch=1, micro_batches=1, **options)
    return Step(hardware.machine(), training(LLAMA3_8B, Layout(8, 1, 1, 1), 8192, given))


def test_work_is_that_of_a_plain_layer() -> None:
    ours, plain = (
        sum(
            one.seconds
            for part in ("forward", "backward")
            for one in step().layer(variant, cast(Any, part)).launches[0].operations
        )
        for variant in (flowing(2), REFERENCE)
    )
    # Three layers, in halves, which costs the GEMMs something.
    assert 1 < ours / (3 * plain) < 1.1


def test_transfers_are_hidden() -> None:
    at = step()
    plain, flows, ours = (at.layer_time(one) for one in (REFERENCE, flowing(4), COMPUTE_ONLY))
    assert flows.waiting - ours.waiting < 0.03 * (plain.waiting - ours.waiting)
    assert ours.seconds < flows.seconds < plain.seconds
    # Two chunks have none to hide the last gather behind.
    assert at.layer_time(flowing(2)).waiting > 10 * flows.waiting


def test_a_stage_is_its_layers_and_its_ends() -> None:
    at = step()
    found = at.layer_time(flowing(4))
    three = Group(at.machine, 8).play(
        flowing(4), lambda rank: flow.forward(rank, at.training.shape, 4, 3), steady=True
    )
    assert three.seconds == pytest.approx(3 * found.forward + found.ends[0])
    assert found.ends[0] > 0, "the first gathers, and the last scatter"


def test_one_of_many_layers_takes_what_a_layer_adds() -> None:
    at = step()
    time = at.layer_time(flowing(4))
    parts = [at.layer(flowing(4), cast(Any, part)) for part in ("forward", "backward")]
    assert [one.seconds for one in parts] == pytest.approx([time.forward, time.backward], rel=1e-3)
    assert sum(one.waiting for one in parts) == pytest.approx(time.waiting, abs=1e-3 * time.seconds)
    for one in parts:
        chunks = [op.origin for span in one.timeline.spans if (op := span.operation).seconds]
        layers = Counter(chunk.layer for chunk in chunks if isinstance(chunk, Chunk))
        # A few chunks of those before and after it are still on their way, or are already.
        assert layers[2] > 0.9 * sum(layers.values())
        assert len(layers) > 1
    slow = replace(at.machine, launch_overhead=1e-3)
    launches = replace(at, machine=slow).layer(flowing(4), "forward")
    assert launches.seconds == launches.host > parts[0].seconds


def test_recomputed_layers_are_drained_one_by_one() -> None:
    whole, alone = (step(recompute=how).layer_time(flowing(4)) for how in ("none", "full"))
    assert alone.ends == (0.0, 0.0)
    assert alone.forward > whole.forward
    assert alone.backward > whole.backward


def test_sums_in_an_order_take_longer() -> None:
    slow = step(replace(SERVER, deterministic=True))
    first, ordered = (
        sum(
            message.size
            for one in at.layer(flowing(4), "forward").launches[0].operations
            if one.name.endswith(" scatter")
            for message in one.sends
        )
        for at in (step(), slow)
    )
    assert ordered == pytest.approx(first * slow.machine.summed(8))
    assert ordered > first


def test_memory_of_a_flow() -> None:
    at, flows = step(), flowing(4)
    h, f = LLAMA3_8B.hidden_size, LLAMA3_8B.ffn_hidden_size
    # Six quarters of the hidden states; fc1's and fc2's gradients in fp32.
    assert buffers(flows, at) == 6 / 4 * 8192 * h * 2 + 4 * 3 * h * f / 8
    # A lane per peer for the output layer, sized to its blocks of 8 MB.
    assert communicators(flows, at, SERVER) == 7 * 2 * 16 * 2**20


def test_keys_and_values_are_gathered_and_their_gradients_summed() -> None:
    """12 rows in each of 4 chunks, keys and values of 8 features on a rank, a byte a second."""
    shape = replace(SHAPE, qkv=2 * (4 + 8))
    machine = replace(IDEAL, attention_efficiency=math.inf, hbm_bandwidth=1.0)
    summed = [(10 * seen + 6 * 12 + zeroed) * 8 for seen, zeroed in
              ((48, 4 * 48), (36, 0), (24, 0), (12, 0))]  # fmt: skip
    for build, name, wanted in (
        (flow.forward, "attention", [2 * 2 * 12 * 8] * 4),
        (flow.backward, "attention backward", summed),
    ):
        rank = Rank(machine, 0, RANKS, RANKS, flowing(4))
        build(rank, shape, 4, 1)
        found = [one.seconds for one in rank.finish().operations if one.name == name]
        assert found == pytest.approx(wanted)
