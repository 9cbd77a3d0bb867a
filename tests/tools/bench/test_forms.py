"""What the variants compute, and in which order they do it."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_npu import tuning
from commfuse_npu.tools.bench import baselines, ring
from commfuse_npu.tools.bench.baselines import Blocking, MegatronOrder, Sliced
from commfuse_npu.tools.bench.carriers import (
    BufferPool,
    DirectExchange,
    NoTransfers,
    Pending,
    TorchCollectives,
)
from commfuse_npu.tools.bench.forms import Form
from commfuse_npu.tools.bench.ring import Ring
from commfuse_npu.tools.bench.shapes import Shape
from commfuse_npu.tools.bench.sleeping import SleepingGemms, modelled_seconds
from commfuse_npu.tools.bench.variants import COMMUNICATION, COMPUTE, Variant, applies_to, of_group
from commfuse_npu.tools.bench.worker import Worker

_long = pytest.mark.long

# ------------------------------------------------------------------- on real ranks


_LIMIT = 280.0
"""Seconds that ranks may take on a machine that does other things as well."""


def _shape(size: int) -> Shape:
    return Shape(16 * size, 16 * size, 32 * size, 2 * size, size, 16)


def _check(rank: int, dtype: str, works: tuple[str, ...], some: str) -> list[tuple[str, str, Any]]:
    worker = Worker()
    found = []
    for work in works:
        worker.set_up(work, _shape(worker.size), dtype, 7, None)
        for variant in of_group(worker.size):
            # Fewer lanes change no number, and 8 pieces nothing that 4 do not.
            skipped = "-l" in variant.name or "8" in variant.name or variant.tuned
            if applies_to(variant, work) and not skipped and re.search(some, variant.name):
                found.append((work, variant.name, worker.check(variant, memory=False)))
    worker._groups.transport.close()
    return found


@pytest.mark.parametrize(
    ("size", "dtype", "works", "some"),
    [
        (2, "fp32", ("mlp",), "p2p|collective|2$|megatron|ring|wgrad"),
        (2, "fp32", ("layers",), "p2p|ours-c2$"),
        pytest.param(2, "bf16", ("all-gather", "reduce-scatter", "layer"), "", marks=_long),
        pytest.param(3, "fp32", ("all-gather", "reduce-scatter", "layer"), "", marks=_long),
    ],
)
def test_every_variant_computes_the_same(
    ranks, size: int, dtype: str, works: tuple[str, ...], some: str
) -> None:
    limit = 1e-4 if dtype == "fp32" else 0.2
    for of_rank in ranks(size).run(_check, dtype, works, some, timeout=_LIMIT):
        assert {work for work, *_ in of_rank} == set(works)
        for work, name, check in of_rank:
            where = f"{work}, {name}: {check}"
            assert check.max_difference <= limit, where
            # Whole GEMMs, the same additions: the same bits.
            assert check.equal or name not in ("p2p", "collective", "megatron-p2p"), where
            ours = name.startswith("ours")
            assert check.equal_same_gemms is (True if ours else None), where


def _turns(rank: int) -> tuple[Any, int, Any]:
    worker = Worker()
    worker.set_up("micro-batches", _shape(worker.size), "fp32", 7, None)
    (turns,) = (variant for variant in of_group(worker.size) if variant.kind == "turns")
    check = worker.tune(turns)
    form = worker._form(turns)
    assert isinstance(form, Form)
    overlap = inspect.getclosurevars(form.pair).nonlocals["overlap"]
    samples = worker.round([turns])
    worker.forget_tuning()
    assert worker._form(turns) is not form
    worker._groups.transport.close()
    return check, overlap.pairs, (overlap.orders, samples[0].total > 0)


def test_micro_batches_take_turns_with_megatrons_bits(ranks: Any) -> None:
    first, second = ranks(2).run(_turns, timeout=_LIMIT)
    assert first[2] == second[2]
    check, pairs, (orders, _) = first
    assert check.equal
    assert pairs == 2 * 7  # the first step of three is measured
    (order,) = orders.values()
    # Two layers: 8 transfers of a forward, 12 of a backward of which 8 end elsewhere; the ends.
    assert [len(side) for side in order] == [9, 21]


def _tuned(rank: int) -> list[tuple[object, list[int]]]:
    worker = Worker()
    auto, other = (v for v in of_group(worker.size) if v.tuned and v.kind != "turns")
    found: list[tuple[object, list[int]]] = []
    trials: list[int] = []
    timed = tuning._timed

    def counted(*args: Any) -> float:
        trials.append(1)
        return timed(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "_timed", counted)
        for work, gflops in (("reduce-scatter", None), ("mlp", 1e6)):
            worker.set_up(work, _shape(worker.size), "fp32", 7, gflops)
            worker.forget_tuning()
            counts = []
            check = worker.tune(auto)
            counts.append(len(trials))
            worker.tune(other)
            worker.round([auto, other])
            counts.append(len(trials))
            worker.forget_tuning()
            worker.tune(auto)
            counts.append(len(trials))
            trials.clear()
            found.append((check, counts))
    worker._groups.transport.close()
    return found


@pytest.mark.long
def test_tuning_happens_when_it_is_asked_for_and_not_while_the_clock_runs(ranks) -> None:
    for of_rank in ranks(2).run(_tuned, timeout=_LIMIT):
        (layer, _), (mlp, _) = of_rank
        assert len(layer.chosen) == 1
        assert layer.chosen[0].startswith("row forward 32 x 32: ")
        assert [text.split(":")[0] for text in mlp.chosen] == [
            *("column forward 32 x 64", "column backward 32 x 64"),
            *("row forward 32 x 32", "row backward 32 x 32"),
        ]
        assert max(layer.max_difference, mlp.max_difference) <= 1e-4
        # Weight gradients made of blocks are another backward; of what two variants have in common
        # nothing is tried again, and nothing in a round.
        (_, (first, known, _)), (_, (of_mlp, with_blocks, _)) = of_rank
        assert first == known
        assert with_blocks > of_mlp
        for _, (tried, known, again) in of_rank:
            assert tried > 0
            assert again > known, "forgotten, it is tried again"


def _sums(rank: int) -> bool:
    group = dist.group.WORLD
    generator = torch.Generator().manual_seed(rank)
    full = torch.randn(12, 8, generator=generator).bfloat16()
    sums = [
        carrier(group, BufferPool()).scatter(full, full.new_empty(4, 8)).wait()
        for carrier in (DirectExchange, TorchCollectives)
    ]
    return torch.equal(*sums)


@pytest.mark.long
def test_direct_sums_of_three_have_the_bits_of_the_collective(ranks) -> None:
    assert ranks(3).run(_sums, timeout=_LIMIT) == [True] * 3


class _Counted(BufferPool):
    """Knows how many buffers it lent."""

    lent = 0

    def take(self, *what: Any) -> torch.Tensor:
        self.lent += 1
        return super().take(*what)

    def give_back(self, buffers: Any) -> None:
        self.lent -= len(buffers)
        super().give_back(buffers)


def _ring(rank: int) -> list[str]:
    """What of a ring has not the bits of collectives and the same GEMMs, block by block."""
    group, generator = dist.group.WORLD, torch.Generator().manual_seed(rank)
    assert group is not None
    size, pool = group.size(), _Counted()
    around, whole = Ring(DirectExchange(group, pool)), TorchCollectives(group, BufferPool())

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    def by_blocks(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cat([block @ b for block in a.chunk(size)])

    def scattered(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return whole.scatter(by_blocks(a, b), a.new_empty(len(a) // size, b.shape[1])).wait()

    shard, grad, weight = drawn(4, 8), drawn(4 * size, 16), drawn(16, 8)
    gathered = whole.gather(shard).wait()
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
    wrong = [
        name
        for name, results in found.items()
        if not all(map(torch.equal, results, expected[name]))
    ]
    if pool.lent or around.carrier.blocked_seconds <= 0:
        wrong.append(f"{pool.lent} buffers, {around.carrier.blocked_seconds} s")
    return wrong


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=_long)])
def test_a_ring_has_the_bits_of_the_collectives(ranks, size: int) -> None:
    assert ranks(size).run(_ring, timeout=_LIMIT) == [[]] * size


def _round(rank: int) -> list[str]:
    worker = Worker()
    worker.set_up("mlp", _shape(2), "fp32", 7, 1e6)
    order = [
        Variant(COMPUTE, "compute"),
        Variant(COMMUNICATION, "communication"),
        Variant("p2p", "blocking"),
    ]
    samples = worker.round(order)
    problems = [f"{s}" for s in samples if s.total <= 0 or s.cpu < 0 or s.blocked > s.total]
    if samples[0].blocked or not samples[1].blocked:
        problems.append(f"{samples}")
    worker._groups.transport.close()
    return problems


def test_a_round_with_sleeping_gemms_gives_a_sample_per_variant(ranks) -> None:
    assert ranks(2).run(_round, timeout=_LIMIT) == [[], []]


# ------------------------------------------------------------------- recorded order


class _Recorded(NoTransfers):
    """A carrier that writes down what is asked of it."""

    def __init__(self, log: list[str], in_order: bool = True) -> None:
        super().__init__(0, 2)
        self.log, self.in_order = log, in_order

    def _noted(self, what: str, pending):
        self.log.append(what)
        return SimpleNamespace(
            wait=lambda: (self.log.append(f"{what} is there"), pending.wait())[1]
        )

    def gather(self, shard):
        return self._noted("gather", super().gather(shard))

    def scatter(self, full, out):
        return self._noted("scatter", super().scatter(full, out))


@pytest.fixture
def log(monkeypatch) -> list[str]:
    log: list[str] = []

    def gemm(out, a, b):
        log.append(f"gemm of {a.shape[0]} rows")
        torch.mm(a, b, out=out)

    for module in (baselines, ring):
        monkeypatch.setattr(module, "gemm_into", gemm)
    return log


def _column_backward(form: Blocking) -> None:
    form.column_backward(torch.ones(8, 6), torch.ones(4, 3), torch.ones(6, 3))


def test_the_reference_hides_nothing(log) -> None:
    _column_backward(Blocking(_Recorded(log)))
    assert log == [
        *("gemm of 8 rows", "scatter", "scatter is there"),
        *("gather", "gather is there"),
    ]


def test_megatrons_order(log) -> None:
    _column_backward(MegatronOrder(_Recorded(log)))
    assert log == [
        *("gather", "gemm of 8 rows", "gather is there"),
        *("scatter", "scatter is there"),  # with wgrad, which is no gemm_into, in between
    ]


def test_slices_of_collectives_have_one_under_way_while_the_one_before_is_computed(log) -> None:
    Sliced(_Recorded(log, in_order=False), 2).gather_gemm(torch.ones(4, 3), torch.ones(6, 3))
    assert log == [
        *("gather", "gather is there", "gather", "gemm of 4 rows"),
        *("gather is there", "gemm of 4 rows"),
    ]


def test_slices_of_direct_exchanges_are_all_posted_ahead(log) -> None:
    Sliced(_Recorded(log), 2).gather_gemm(torch.ones(4, 3), torch.ones(6, 3))
    assert log[:2] == ["gather", "gather"]


def test_scattered_slices_travel_while_the_next_is_computed(log) -> None:
    Sliced(_Recorded(log), 2).gemm_scatter(torch.ones(8, 3), torch.ones(6, 3))
    assert log == [
        *("gemm of 4 rows", "scatter", "gemm of 4 rows", "scatter"),
        *("scatter is there", "scatter is there"),
    ]


class _Neighbours(_Recorded):
    """Rank 0 of three, whose neighbours' blocks arrive when they are waited for."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(log)
        self.size = 3

    def swap(self, out, target, into, source):
        return self._noted(f"to {target}", Pending(self, [], into.zero_()))


def test_blocks_are_passed_on_while_they_are_multiplied(log) -> None:
    Ring(_Neighbours(log)).gather_gemm(torch.ones(4, 3), torch.ones(6, 3))
    assert log == [
        *("to 1", "gemm of 4 rows", "to 1 is there"),
        *("to 1", "gemm of 4 rows", "to 1 is there", "gemm of 4 rows"),
    ]


def test_sums_are_passed_on_while_the_next_partial_is_made(log) -> None:
    Ring(_Neighbours(log)).gemm_scatter(torch.ones(12, 3), torch.ones(6, 3))
    assert log == [
        *("gemm of 4 rows", "to 2", "gemm of 4 rows", "to 2 is there"),
        *("to 2", "gemm of 4 rows", "to 2 is there"),
    ]


def test_the_input_goes_up_while_the_sums_go_down(log) -> None:
    Ring(_Neighbours(log)).column_backward(torch.ones(12, 6), torch.ones(4, 3), torch.ones(6, 3))
    assert log[:4] == ["to 1", "gemm of 4 rows", "to 2", "to 1 is there"]
    assert [log.count(f"to {rank}") for rank in (1, 2)] == [2, 2]


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
    form = Blocking(NoTransfers(0, 2))
    with SleepingGemms(1e9) as gemms:
        y = baselines.column_parallel(form, x, weight)
        assert gemms.products == 1
        grads = torch.autograd.grad(y, [x, weight], torch.ones_like(y))
    assert gemms.products == 3
    assert [grad.shape for grad in grads] == [x.shape, weight.shape]
