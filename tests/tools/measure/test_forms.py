"""The results of the variants, and the order of their operations."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commfuse_npu import tuning
from commfuse_npu.config_file import find_config
from commfuse_npu.tools.measure import baselines
from commfuse_npu.tools.measure.baselines import Blocking, MegatronOrder, Sliced
from commfuse_npu.tools.measure.carriers import NoTransfers, Pending, TorchCollectives
from commfuse_npu.tools.measure.forms import TakingTurns
from commfuse_npu.tools.measure.forms_worker import FormsWorker as Worker
from commfuse_npu.tools.measure.sleeping import SleepingGemms, modelled_seconds
from commfuse_npu.tools.measure.steps import Scale
from commfuse_npu.tools.measure.variants import COMPUTE, Variant, variants
from commfuse_npu.tools.model_config import ModelConfig
from tests.distributed.ranks import on_ranks
from tests.limits import LIMIT

CONFIG = ModelConfig.load(find_config("llama3_8b"))

# ------------------------------------------------------------------- on real ranks


def _scale(size: int) -> Scale:
    """S, H and the MLP of 16, 32 and 48 per rank, two heads of 16 per rank and a key head."""
    wide = 4096 // (32 * size)
    config = replace(CONFIG, ffn_hidden_size=48 * size * wide, num_query_groups=size * wide)
    return Scale(
        replace(config, num_attention_heads=2 * size * wide), "cpu", size, 0, 16 * size, wide, 0, 1
    )


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
@on_ranks()
def test_every_form_computes_the_same(rank: int) -> None:
    worker = Worker()
    for work in ("mlp", "layers"):
        worker.set_up(work, _scale(worker.size), None)
        for form in variants(worker.size):
            # 8 pieces test nothing that 4 do not.
            if form.tuned or "8" in form.name:
                continue
            difference = worker.check(form)
            assert difference <= 1e-4, (work, form.name)
            # Whole GEMMs, the same additions: the same bits.
            assert not difference or form.name not in ("p2p", "megatron"), (work, form.name)
    worker._transport.close()


@on_ranks(2)
def test_collectives_of_torch_compute_the_same_and_what_is_no_number_differs(rank: int) -> None:
    worker = Worker()
    worker.set_up("mlp", _scale(2), None)
    (sliced,) = (form for form in variants(2) if form.slices == 4)
    assert worker.check(sliced) <= 1e-4
    # What a device uses.
    carrier = TorchCollectives(worker._transport.group)
    for form in (Blocking(carrier), MegatronOrder(carrier), Sliced(carrier, 4)):
        results = worker._work.run(form)
        assert all(map(torch.allclose, results, worker._reference)), form
    worker._reference[1][0, 0, 0] = math.nan
    assert worker.check(sliced) == math.inf
    worker._transport.close()


def _turns(rank: int) -> Any:
    worker = Worker()
    worker.set_up("micro-batches", _scale(worker.size), None)
    (turns,) = (form for form in variants(worker.size) if form.kind == "turns")
    assert worker.tune(turns) == 0
    form = worker._form(turns)
    assert isinstance(form, TakingTurns)
    assert worker.round([turns])[0].total > 0
    overlap = form.overlap
    worker.set_up("micro-batches", _scale(worker.size), None)
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
    auto, other = (v for v in variants(worker.size) if v.tuned and v.kind != "turns")
    worker.set_up("mlp", _scale(worker.size), 1e6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "_timed", lambda *args: (trials.append(1), timed(*args))[1])
        worker.tune(auto)
        first = len(trials)
        worker.tune(other)
        # Blockwise weight gradients have a backward of their own.
        with_blocks = len(trials)
        worker.round([auto, other])
        assert 0 < first < with_blocks == len(trials)
        worker.set_up("mlp", _scale(worker.size), 1e6)
        worker.tune(auto)
        assert len(trials) > with_blocks, "forgotten, it is tried again"
    worker._transport.close()


@on_ranks(2)
def test_a_round_with_sleeping_gemms_gives_a_sample_per_form(rank: int) -> None:
    worker = Worker()
    worker.set_up("mlp", _scale(2), 1e6)
    computing, waiting = worker.round([Variant(COMPUTE, "compute"), Variant("p2p", "blocking")])
    assert 0 == computing.blocked < computing.total
    assert 0 < waiting.blocked < waiting.total
    worker._transport.close()


# ------------------------------------------------------------------- recorded order


class _Recorded(NoTransfers):
    """A carrier that logs its calls; a neighbor's block arrives when it is awaited."""

    blocked_seconds = 0.0

    def __init__(self, log: list[str]) -> None:
        self.rank, self.size, self.idle, self._wholes = 0, 2, {}, {}
        self.log = log

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
    ("layers", "half", "expected"),
    [
        (Blocking, "column_backward",
         "gemm 8, scatter, scatter is there, gather, gather is there"),
        # wgrad follows the scatter; it is not a gemm_into.
        (MegatronOrder, "column_backward",
         "gather, gemm 8, gather is there, scatter, scatter is there"),
        (Sliced, "column_backward",
         "gather, gemm 4, scatter, gemm 4, scatter, gather is there, scatter is there, "
         "scatter is there"),
        (Sliced, "gather_gemm",
         "gather, gather, gather is there, gemm 4, gather is there, gemm 4"),
        (Sliced, "gemm_scatter",
         "gemm 4, scatter, gemm 4, scatter, scatter is there, scatter is there"),
    ],
)  # fmt: skip
def test_what_is_under_way_while_what_is_computed(
    layers: Any, half: str, expected: str, monkeypatch
) -> None:
    log: list[str] = []

    def gemm(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        log.append(f"gemm {a.shape[0]}")
        torch.mm(a, b, out=out)

    monkeypatch.setattr(baselines, "gemm_into", gemm)
    carrier = _Recorded(log)
    layer = layers(carrier, 2) if layers is Sliced else layers(carrier)
    shard, whole, weight = torch.ones(4, 3), torch.ones(8, 6), torch.ones(6, 3)
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
    with SleepingGemms(1.0):
        out = torch.full((10, 30), 5.0)
        with torch.no_grad():
            assert torch.mm(a, b, out=out) is out
            assert (a @ b).shape == (10, 30)
            assert torch.ones(4, 10, 20).matmul(b).shape == (4, 10, 30)
            assert out.addmm_(a, b) is out
            assert torch.addmm(out, a, b).shape == (10, 30)
        assert (a + a).sum() == 400
        a.matmul(b).sum().backward()
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
