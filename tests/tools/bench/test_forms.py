"""What the variants compute, and in which order they do it."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_npu import tuning
from commfuse_npu.tools.bench import baselines
from commfuse_npu.tools.bench.baselines import Blocking, MegatronOrder, Ring, Sliced
from commfuse_npu.tools.bench.carriers import (
    DirectExchange,
    NoTransfers,
    Pending,
    TorchCollectives,
)
from commfuse_npu.tools.bench.forms import TakingTurns
from commfuse_npu.tools.bench.shapes import Shape
from commfuse_npu.tools.bench.sleeping import SleepingGemms, modelled_seconds
from commfuse_npu.tools.bench.variants import COMMUNICATION, COMPUTE, Variant, of_group
from commfuse_npu.tools.bench.worker import FormsWorker as Worker
from tests.distributed.ranks import on_ranks
from tests.limits import LIMIT

_long = pytest.mark.long

# ------------------------------------------------------------------- on real ranks


def _shape(size: int) -> Shape:
    return Shape(16 * size, 16 * size, 32 * size, 2 * size, size, 16)


@pytest.mark.parametrize(
    ("size", "dtype", "works", "some"),
    [
        (2, "fp32", ("mlp",), "p2p|collective|2$|megatron|ring|wgrad"),
        (2, "fp32", ("layers",), "p2p|ours-c2$"),
        pytest.param(2, "bf16", ("all-gather", "reduce-scatter", "layer"), "", marks=_long),
        pytest.param(3, "fp32", ("all-gather", "reduce-scatter", "layer"), "", marks=_long),
    ],
)
@on_ranks()
def test_every_variant_computes_the_same(
    rank: int, dtype: str, works: tuple[str, ...], some: str
) -> None:
    worker, limit = Worker(), 1e-4 if dtype == "fp32" else 0.2
    for work in works:
        worker.set_up(work, _shape(worker.size), dtype, 7, None)
        # Fewer lanes change no number, and 8 pieces nothing that 4 do not.
        chosen = [
            variant
            for variant in of_group(worker.size)
            if variant.applies_to(work)
            and re.search(some, variant.name)
            and not ("-l" in variant.name or "8" in variant.name or variant.tuned)
        ]
        assert chosen
        for variant in chosen:
            check, name = worker.check(variant), variant.name
            where = f"{work}, {name}: {check}"
            assert check.max_difference <= limit, where
            # Whole GEMMs, the same additions: the same bits.
            assert check.equal or name not in ("p2p", "collective", "megatron-p2p"), where
            ours = name.startswith("ours")
            assert check.equal_same_gemms is (True if ours else None), where
    worker._transport.close()


def _turns(rank: int) -> Any:
    worker = Worker()
    worker.set_up("micro-batches", _shape(worker.size), "fp32", 7, None)
    (turns,) = (variant for variant in of_group(worker.size) if variant.kind == "turns")
    assert worker.tune(turns).equal
    form = worker._form(turns)
    assert isinstance(form, TakingTurns)
    assert worker.round([turns])[0].total > 0
    overlap = form.overlap
    worker.forget_tuning()
    assert worker._form(turns) is not form
    worker._transport.close()
    assert overlap.pairs == 2 * 7  # the first step of three is measured
    (order,) = overlap.orders.values()
    # Two layers: 8 transfers of a forward, 12 of a backward of which 8 end elsewhere; the ends.
    assert [len(side) for side in order] == [9, 21]
    return overlap.orders


def test_micro_batches_take_turns_with_megatrons_bits(ranks: Any) -> None:
    first, second = ranks(2).run(_turns, timeout=LIMIT)
    assert first == second


@pytest.mark.long
@on_ranks(2)
def test_tuning_happens_when_it_is_asked_for_and_not_while_the_clock_runs(rank: int) -> None:
    worker, trials, timed = Worker(), [], tuning._timed
    auto, other = (v for v in of_group(worker.size) if v.tuned and v.kind != "turns")
    worker.set_up("mlp", _shape(worker.size), "fp32", 7, 1e6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "_timed", lambda *args: (trials.append(1), timed(*args))[1])
        check = worker.tune(auto)
        first = len(trials)
        worker.tune(other)
        # Weight gradients made of blocks are another backward.
        with_blocks = len(trials)
        worker.round([auto, other])
        assert 0 < first < with_blocks == len(trials)
        worker.forget_tuning()
        worker.tune(auto)
        assert len(trials) > with_blocks, "forgotten, it is tried again"
    assert [text.split(":")[0] for text in check.chosen] == [
        *("column forward 32 x 64", "column backward 32 x 64"),
        *("row forward 32 x 32", "row backward 32 x 32"),
    ]
    worker._transport.close()


class _Counted(DirectExchange):
    """Knows how many buffers it lent."""

    lent = 0

    def take(self, *what: Any) -> torch.Tensor:
        self.lent += 1
        return super().take(*what)

    def give_back(self, *buffers: torch.Tensor) -> None:
        self.lent -= len(buffers)
        super().give_back(*buffers)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=_long)])
@on_ranks()
def test_a_ring_has_the_bits_of_the_collectives(rank: int) -> None:
    """And of the same GEMMs, block by block."""
    group, generator = dist.group.WORLD, torch.Generator().manual_seed(rank)
    assert group is not None
    size, carrier = group.size(), _Counted(group, {})
    around, whole = Ring(carrier), TorchCollectives(group, {})

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    def by_blocks(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cat([block @ b for block in a.chunk(size)])

    def scattered(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return whole.scatter(by_blocks(a, b), a.new_empty(len(a) // size, b.shape[1])).result()

    shard, grad, weight = drawn(4, 8), drawn(4 * size, 16), drawn(16, 8)
    gathered = whole.gather(shard).result()
    expected = {
        "gather_gemm": (by_blocks(gathered, weight.t()),),
        "gemm_scatter": (scattered(grad, weight),),
        "column_backward": (scattered(grad, weight), grad.t() @ gathered),
        "row_backward": (by_blocks(gathered, weight.t()), gathered.t() @ grad),
    }
    found = {
        "gather_gemm": (around.gather_gemm(shard, weight),),
        "gemm_scatter": (around.gemm_scatter(grad, weight.t().contiguous()),),
        "column_backward": around.column_backward(grad, shard, weight),
        "row_backward": around.row_backward(shard, grad, weight.t().contiguous()),
    }
    for name, results in found.items():
        assert all(map(torch.equal, results, expected[name])), name
    assert carrier.lent == 0
    assert around.blocked_seconds() > 0


@on_ranks(2)
def test_a_round_with_sleeping_gemms_gives_a_sample_per_variant(rank: int) -> None:
    worker = Worker()
    worker.set_up("mlp", _shape(2), "fp32", 7, 1e6)
    order = [
        Variant(COMPUTE, "compute"),
        Variant(COMMUNICATION, "communication"),
        Variant("p2p", "blocking"),
    ]
    samples = worker.round(order)
    assert all(s.total > 0 and s.cpu >= 0 and s.blocked <= s.total for s in samples), samples
    assert not samples[0].blocked
    assert samples[1].blocked
    worker._transport.close()


# ------------------------------------------------------------------- recorded order


class _Alone(NoTransfers):
    """Of one of ``size`` ranks, without a group."""

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.idle, self._wholes = 0, size, {}, {}
        self.blocked_seconds = 0.0


class _Recorded(_Alone):
    """A carrier that writes down what is asked of it; neighbours' blocks arrive when awaited."""

    def __init__(self, log: list[str], size: int, in_order: bool = True) -> None:
        super().__init__(size)
        self.log, self.in_order = log, in_order

    def _noted(self, what: str, pending: Pending) -> Any:
        self.log.append(what)
        noted = SimpleNamespace(
            result=lambda: (self.log.append(f"{what} is there"), pending.result())[1]
        )
        noted.begun = lambda: noted
        return noted

    def gather(self, shard: torch.Tensor) -> Any:
        return self._noted("gather", super().gather(shard))

    def scatter(self, full: torch.Tensor, out: torch.Tensor) -> Any:
        return self._noted("scatter", super().scatter(full, out))

    def swap(self, out: torch.Tensor, target: int, into: torch.Tensor, source: int) -> Any:
        return self._noted(f"to {target}", Pending(self, [], into.zero_()))


_GATHER_GEMM = "gather_gemm", (4, 3), (6, 3)
_GEMM_SCATTER = "gemm_scatter", (8, 3), (6, 3)
_BACKWARD = "column_backward", (8, 6), (4, 3), (6, 3)


@pytest.mark.parametrize(
    ("layers", "size", "in_order", "half", "expected"),
    [
        (Blocking, 2, True, _BACKWARD,
         "gemm 8, scatter, scatter is there, gather, gather is there"),
        # wgrad, which is no gemm_into, is after the scatter.
        (MegatronOrder, 2, True, _BACKWARD,
         "gather, gemm 8, gather is there, scatter, scatter is there"),
        (Sliced, 2, True, _BACKWARD,
         "gather, gemm 4, scatter, gemm 4, scatter, gather is there, scatter is there, "
         "scatter is there"),
        (Sliced, 2, False, _GATHER_GEMM,
         "gather, gather is there, gather, gemm 4, gather is there, gemm 4"),
        (Sliced, 2, True, _GATHER_GEMM,
         "gather, gather, gather is there, gemm 4, gather is there, gemm 4"),
        (Sliced, 2, True, _GEMM_SCATTER,
         "gemm 4, scatter, gemm 4, scatter, scatter is there, scatter is there"),
        (Sliced, 2, False, _GEMM_SCATTER,
         "gemm 4, scatter, gemm 4, scatter is there, scatter, scatter is there"),
        (Ring, 3, True, _GATHER_GEMM,
         "to 1, gemm 4, to 1 is there, to 1, gemm 4, to 1 is there, gemm 4"),
        (Ring, 3, True, ("gemm_scatter", (12, 3), (6, 3)),
         "gemm 4, to 2, gemm 4, to 2 is there, to 2, gemm 4, to 2 is there"),
        # The input goes up while the sums go down.
        (Ring, 3, True, ("column_backward", (12, 6), (4, 3), (6, 3)),
         "to 1, gemm 4, to 2, to 1 is there, to 1, gemm 4, to 2 is there, to 2, to 1 is there, "
         "gemm 4, to 2 is there"),
    ],
)  # fmt: skip
def test_what_is_under_way_while_what_is_computed(
    layers: Any,
    size: int,
    in_order: bool,
    half: tuple[Any, ...],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []

    def gemm(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        log.append(f"gemm {a.shape[0]}")
        torch.mm(a, b, out=out)

    monkeypatch.setattr(baselines, "gemm_into", gemm)
    carrier = _Recorded(log, size, in_order)
    made = layers(carrier, 2) if layers is Sliced else layers(carrier)
    name, *shapes = half
    getattr(made, name)(*map(torch.ones, shapes))
    assert ", ".join(log) == expected


# ------------------------------------------------------------------- sleeping GEMMs


class _Clock:
    """Time that passes in sleeps only, each of which ends late."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, late: float = 0.0) -> None:
        self.slept: list[float] = []
        self._now, self._late = 0.0, late
        monkeypatch.setattr("time.sleep", self._sleep)
        monkeypatch.setattr("time.perf_counter", lambda: self._now)

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self._now += seconds + self._late


def test_gemms_sleep_for_their_modelled_time(monkeypatch) -> None:
    clock = _Clock(monkeypatch)
    a, b = torch.ones(10, 20), torch.ones(20, 30)
    with SleepingGemms(1.0) as gemms:
        out = torch.full((10, 30), 5.0)
        assert torch.mm(a, b, out=out) is out
        assert (a @ b).shape == (10, 30)
        assert a.matmul(b).shape == (10, 30)
        assert torch.ones(4, 10, 20).matmul(b).shape == (4, 10, 30)
        assert out.addmm_(a, b) is out
        assert torch.addmm(out, a, b).shape == (10, 30)
        assert (a + a).sum() == 400
    assert gemms.products == 6
    one, four = (modelled_seconds(rows, 30, 20, 1.0) for rows in (10, 40))
    assert clock.slept == pytest.approx([one, one, one, four, one, one])
    assert torch.equal(out, torch.full((10, 30), 5.0))
    assert torch.equal(a @ b, torch.full((10, 30), 20.0)), "and real ones afterwards"


_ROUND = 24 * 128
"""Rows of a result of 256 columns whose tiles fill all cores once."""


def test_tiles_that_fill_all_cores_reach_the_speed_that_was_asked_for() -> None:
    launch = modelled_seconds(0, 256, 64, 60.0)
    assert launch > 0
    for rounds in (1, 2, 7):
        seconds = modelled_seconds(rounds * _ROUND, 256, 64, 60.0)
        assert seconds - launch == pytest.approx(2 * rounds * _ROUND * 256 * 64 / 60e9)


def test_a_gemm_that_stands_for_a_wider_one_loses_the_same_share() -> None:
    for rows in (500, 1500, 2500):
        as_it_is = modelled_seconds(4 * rows, 1024, 256, 60.0)
        narrower = modelled_seconds(rows, 256, 64, 60.0, scale=4.0)
        assert narrower == pytest.approx(as_it_is / 4**3)


@pytest.mark.parametrize(
    "pieces",
    [
        [(_ROUND // 3, 512)] * 3,  # a round each, of which a third is idle
        [(_ROUND, 256)] * 2,  # whole rounds: a launch
        [(_ROUND, 200), (_ROUND, 312)],  # tiles that are cut, too
    ],
)
def test_cutting_costs_by_rows_and_by_columns(pieces: list[tuple[int, int]]) -> None:
    whole = modelled_seconds(_ROUND, 512, 64, 60.0)
    assert sum(modelled_seconds(m, n, 64, 60.0) for m, n in pieces) > whole


def test_what_a_sleep_took_too_long_is_taken_off_the_next(monkeypatch) -> None:
    a, b = torch.ones(10, 20), torch.ones(20, 30)
    one = modelled_seconds(10, 30, 20, 1.0)
    clock = _Clock(monkeypatch, late=0.75 * one)
    with SleepingGemms(1.0):
        a @ b
        a @ b
        a @ b
    assert clock.slept == pytest.approx([one, 0.25 * one, 0.25 * one])
    clock = _Clock(monkeypatch, late=1.5 * one)
    with SleepingGemms(1.0) as gemms:
        a @ b
        a @ b  # no time is left for this one, and half of the next is gone
        a @ b
        assert clock.slept == pytest.approx([one, 0.5 * one])
        gemms.settle()
        a @ b
    assert clock.slept == pytest.approx([one, 0.5 * one, one])


def test_gemms_sleep_in_a_backward_too() -> None:
    x = torch.ones(4, 3, requires_grad=True)
    weight = torch.ones(6, 3, requires_grad=True)
    form = Blocking(_Alone(2))
    with SleepingGemms(1e9) as gemms:
        y = form.all_gather_linear(x, weight)
        assert gemms.products == 1
        grads = torch.autograd.grad(y, [x, weight], torch.ones_like(y))
    assert gemms.products == 3
    assert [grad.shape for grad in grads] == [x.shape, weight.shape]
