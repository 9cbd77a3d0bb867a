"""The results of the variants, and the order of their operations."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commfuse_npu import tuning
from commfuse_npu.tools.bench import baselines
from commfuse_npu.tools.bench.baselines import Blocking, MegatronOrder, Sliced
from commfuse_npu.tools.bench.carriers import (
    NoTransfers,
    Pending,
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
        (2, "fp32", ("mlp",), "p2p|collective|2$|megatron|wgrad"),
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
        # Fewer lanes change no result, and 8 pieces test nothing that 4 do not.
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
    # Two layers: 8 transfers forward; 12 backward, of which 8 end elsewhere; and the end of each.
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
        # Blockwise weight gradients have a backward of their own.
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


class _Recorded(NoTransfers):
    """A carrier that logs its calls; a neighbor's block arrives when it is awaited."""

    blocked_seconds = 0.0

    def __init__(self, log: list[str], size: int, in_order: bool) -> None:
        self.rank, self.size, self.idle, self._wholes = 0, size, {}, {}
        self.log, self.in_order = log, in_order

    def _noted(self, what: str, pending: Pending) -> Any:
        self.log.append(what)

        def result() -> torch.Tensor:
            self.log.append(f"{what} is there")
            return pending.result()

        noted = SimpleNamespace(result=result, overlapping=lambda: noted)
        return noted

    def gather(self, shard: torch.Tensor) -> Any:
        return self._noted("gather", super().gather(shard))

    def scatter(self, full: torch.Tensor, out: torch.Tensor) -> Any:
        return self._noted("scatter", super().scatter(full, out))


@pytest.mark.parametrize(
    ("layers", "size", "in_order", "half", "expected"),
    [
        (Blocking, 2, True, "column_backward",
         "gemm 8, scatter, scatter is there, gather, gather is there"),
        # wgrad follows the scatter; it is not a gemm_into.
        (MegatronOrder, 2, True, "column_backward",
         "gather, gemm 8, gather is there, scatter, scatter is there"),
        (Sliced, 2, True, "column_backward",
         "gather, gemm 4, scatter, gemm 4, scatter, gather is there, scatter is there, "
         "scatter is there"),
        (Sliced, 2, False, "gather_gemm",
         "gather, gather is there, gather, gemm 4, gather is there, gemm 4"),
        (Sliced, 2, True, "gather_gemm",
         "gather, gather, gather is there, gemm 4, gather is there, gemm 4"),
        (Sliced, 2, False, "gemm_scatter",
         "gemm 4, scatter, gemm 4, scatter is there, scatter, scatter is there"),
    ],
)  # fmt: skip
def test_what_is_under_way_while_what_is_computed(
    layers: Any, size: int, in_order: bool, half: str, expected: str, monkeypatch
) -> None:
    log: list[str] = []

    def gemm(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        log.append(f"gemm {a.shape[0]}")
        torch.mm(a, b, out=out)

    monkeypatch.setattr(baselines, "gemm_into", gemm)
    carrier = _Recorded(log, size, in_order)
    layer = layers(carrier, 2) if layers is Sliced else layers(carrier)
    shard, whole, weight = torch.ones(4, 3), torch.ones(4 * size, 6), torch.ones(6, 3)
    operands = {
        "gather_gemm": (shard, weight),
        "gemm_scatter": (whole, weight.t().contiguous()),
        "column_backward": (whole, shard, weight),
    }
    getattr(layer, half)(*operands[half])
    assert ", ".join(log) == expected


# ------------------------------------------------------------------- sleeping GEMMs


def _clock(patch: pytest.MonkeyPatch, late: float) -> list[float]:
    """A clock that only sleeps advance, each ``late`` seconds too long; returns the sleeps."""
    now, slept = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds + late

    patch.setattr("time.sleep", sleep)
    patch.setattr("time.perf_counter", lambda: now[0])
    return slept


def test_gemms_sleep_for_their_modelled_time_in_a_backward_too(monkeypatch) -> None:
    slept = _clock(monkeypatch, 0.0)
    a, b = torch.ones(10, 20), torch.ones(20, 30, requires_grad=True)
    with SleepingGemms(1.0) as gemms:
        out = torch.full((10, 30), 5.0)
        with torch.no_grad():
            assert torch.mm(a, b, out=out) is out
            assert (a @ b).shape == (10, 30)
            assert torch.ones(4, 10, 20).matmul(b).shape == (4, 10, 30)
            assert out.addmm_(a, b) is out
            assert torch.addmm(out, a, b).shape == (10, 30)
        assert (a + a).sum() == 400
        a.matmul(b).sum().backward()
    assert gemms.products == 7
    single, four = (modelled_seconds(rows, 30, 20, 1.0) for rows in (10, 40))
    of_weight = modelled_seconds(20, 30, 10, 1.0)
    assert slept == pytest.approx([single, single, four, single, single, single, of_weight])
    assert torch.equal(out, torch.full((10, 30), 5.0))
    assert torch.equal(a @ b, torch.full((10, 30), 20.0)), "and real ones afterwards"


def test_a_gemm_is_whole_rounds_of_tiles_after_a_launch() -> None:
    rows = 24 * 128  # of a result of 256 columns whose tiles fill all cores once
    launch = modelled_seconds(0, 256, 64, 60.0)
    assert launch > 0
    for m, n, rounds in ((rows, 256, 1), (1, 1, 1), (rows + 1, 256, 2), (rows, 512, 2)):
        seconds = modelled_seconds(m, n, 64, 60.0)
        assert seconds - launch == pytest.approx(2 * rounds * rows * 256 * 64 / 60e9)
    # A GEMM that stands for a wider one loses the same share.
    narrow = modelled_seconds(375, 256, 64, 60.0, scale=4.0)
    assert narrow == pytest.approx(modelled_seconds(1500, 1024, 256, 60.0) / 4**3)


def test_what_a_sleep_took_too_long_is_taken_off_the_next(monkeypatch) -> None:
    a, b = torch.ones(10, 20), torch.ones(20, 30)
    duration = modelled_seconds(10, 30, 20, 1.0)
    slept = _clock(monkeypatch, 1.5 * duration)
    with SleepingGemms(1.0) as gemms:
        a @ b
        a @ b  # no time is left for this one, and half of the next is gone
        a @ b
        assert slept == pytest.approx([duration, 0.5 * duration])
        gemms.settle()
        a @ b
    assert slept == pytest.approx([duration, 0.5 * duration, duration])
