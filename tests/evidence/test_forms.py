"""The results of the forms, and the order of their operations."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commfuse_npu.kernels import cpu
from commfuse_npu.ops import all_gather_linear, linear_reduce_scatter
from commfuse_npu.ops.call import WeightGradient
from commfuse_npu.ops.tuning import decisions
from commfuse_npu.tools.config_file import find_config
from commfuse_npu.tools.measure.measuring_steps import Scale
from commfuse_npu.tools.model_config import ModelConfig
from scripts.evidence.measured import forms_worker
from scripts.evidence.measured.baselines import Baseline
from scripts.evidence.measured.sleeping import SleepingGemms, modeled_seconds
from scripts.evidence.measured.works import NAMES, TUNED
from tests.distributed.ranks import on_ranks

CONFIG = ModelConfig.load(find_config("llama3_8b"))

# ------------------------------------------------------------------- on real ranks


def _scale(size: int) -> Scale:
    """S, H and the MLP of 16, 32 and 48 per rank, two heads of 16 per rank and a key head."""
    wide = 4096 // (32 * size)
    config = replace(CONFIG, ffn_hidden_size=48 * size * wide, num_query_groups=size * wide)
    config = replace(config, num_attention_heads=2 * size * wide)
    return Scale(config, size, rows=16 * size, shrink=wide, message=0, calls=1)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
@on_ranks()
def test_every_form_computes_the_same(rank: int) -> None:
    worker: Any = forms_worker.FormsWorker()
    for work in ("layers", "mlp"):
        worker.set_up(work, _scale(worker.size), None)
        # 8 pieces test nothing that 4 do not.
        for form in (form for form in NAMES if form != TUNED and "8" not in form):
            difference = worker.check(form)
            assert difference <= 1e-4, (work, form)
            # Whole GEMMs, the same additions: the same bits.
            assert not difference or form not in ("p2p", "megatron"), (work, form)
    with mock.patch.object(cpu, "gemm_into", lambda out, a, b: out.fill_(math.nan)):
        assert worker.check("slices-4") == math.inf
    # With GEMMs that sleep.
    worker.set_up("mlp", _scale(worker.size), 1e6)
    computing, waiting = worker.round(["compute", "p2p"])
    assert 0 == computing.blocked < computing.total
    assert 0 < waiting.blocked < waiting.total
    # What is tuned at one rate of the links is tried again at the next.
    with mock.patch.object(forms_worker, "SleepingGemms", wraps=SleepingGemms) as sleeping:
        worker.check("auto")
    sleeping.assert_called_once()  # it tunes itself beside GEMMs that sleep
    tuned = decisions(worker.transport)
    assert tuned
    worker.set_up("mlp", _scale(worker.size), 1e6)
    assert not tuned
    worker.transport.close()


# ------------------------------------------------------------------- recorded order


class _Recorded(Baseline):
    """A baseline of two ranks without transfers that logs its calls."""

    def __init__(self, log: list[str], *of: Any) -> None:
        super().__init__(*of)
        self.log = log

    def _posted(self, what: str, async_op: bool) -> Any:
        def wait() -> None:
            self.log.append(f"{what} is there")

        self.log.append(what)
        return SimpleNamespace(wait=wait) if async_op else wait()

    def all_gather(self, out: Any, shard: Any, group: Any, async_op: bool) -> Any:
        return self._posted("gather", async_op)

    def reduce_scatter(self, out: Any, full: Any, group: Any, async_op: bool) -> Any:
        return self._posted("scatter", async_op)


@pytest.mark.parametrize(
    ("name", "layer", "expected"),
    [
        ("p2p", "column",
         "gather, gather is there, gemm 8; "
         "gather, gather is there, gemm 8, scatter, scatter is there, wgrad"),
        ("megatron", "column",
         "gather, gather is there, gemm 8; "
         "gather, gemm 8, gather is there, scatter, wgrad, scatter is there"),
        ("megatron", "row",
         "gemm 8, scatter, scatter is there; gather, gather is there, gemm 8, wgrad"),
        ("slices-2", "column",
         "gather, gather, gather is there, gemm 4, gather is there, gemm 4; "
         "gather, gemm 4, scatter, gemm 4, scatter, gather is there, wgrad, scatter is there, "
         "scatter is there"),
        ("slices-2", "row",
         "gemm 4, scatter, gemm 4, scatter, scatter is there, scatter is there; "
         "gather, gather, gather is there, gemm 4, gather is there, gemm 4, wgrad"),
        ("compute", "column", "gemm 8; gemm 8, wgrad"),
    ],
)  # fmt: skip
def test_what_is_under_way_while_what_is_computed(
    name: str, layer: str, expected: str, monkeypatch
) -> None:
    log: list[str] = []

    def gemm(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        log.append(f"gemm {a.shape[0]}")
        torch.mm(a, b, out=out)

    def wgrad(self: WeightGradient, grad: torch.Tensor, x: torch.Tensor) -> None:
        log.append("wgrad")

    monkeypatch.setattr(cpu, "gemm_into", gemm)
    monkeypatch.setattr(WeightGradient, "add", wgrad)
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    monkeypatch.setattr(forms_worker, "Baseline", partial(_Recorded, log))
    form = forms_worker.form_of(name, SimpleNamespace(group=group, lane_groups=()))
    layers = {"column": all_gather_linear, "row": linear_reduce_scatter}
    x = torch.ones(4 if layer == "column" else 8, 6, requires_grad=True)
    y = layers[layer](x, torch.ones(6, 6, requires_grad=True), **form.of)
    log.append(";")
    y.sum().backward()
    assert ", ".join(log).replace(", ;,", ";") == expected


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


def test_gemms_sleep_for_their_modeled_time_in_a_backward_too(monkeypatch) -> None:
    slept = _clock(monkeypatch, 0.0)
    a, b = torch.ones(10, 20), torch.ones(20, 30, requires_grad=True)
    with SleepingGemms(1.0):
        out = torch.full((10, 30), 5.0)
        with torch.no_grad():
            assert torch.mm(a, b, out=out) is out
            assert (a @ b).shape == (10, 30)
            assert torch.bmm(a.expand(4, -1, -1), b.expand(4, -1, -1)).shape == (4, 10, 30)
            assert out.addmm_(a, b) is out
        assert (a + a).sum() == 400
        a.matmul(b).sum().backward()
    single, four = (modeled_seconds(10, 30, 20, 1.0, batch=batch) for batch in (1, 4))
    of_weight = modeled_seconds(20, 30, 10, 1.0)
    assert slept == pytest.approx([single, single, four, single, single, of_weight])
    assert torch.equal(out, torch.full((10, 30), 5.0))
    assert torch.equal(a @ b, torch.full((10, 30), 20.0)), "and real ones afterwards"


def test_a_gemm_is_whole_rounds_of_tiles_after_a_launch() -> None:
    rows = 24 * 128  # of a result of 256 columns whose tiles fill all cores once
    launch = modeled_seconds(0, 256, 64, 60.0)
    assert launch > 0
    for m, n, rounds in ((rows, 256, 1), (1, 1, 1), (rows + 1, 256, 2), (rows, 512, 2)):
        seconds = modeled_seconds(m, n, 64, 60.0)
        assert seconds - launch == pytest.approx(2 * rounds * rows * 256 * 64 / 60e9)
    # A GEMM that stands for a wider one loses the same share.
    narrow = modeled_seconds(375, 256, 64, 60.0, scale=4.0)
    assert narrow == pytest.approx(modeled_seconds(1500, 1024, 256, 60.0) / 4**3)


def test_what_a_sleep_took_too_long_is_taken_off_the_next(monkeypatch) -> None:
    a, b = torch.ones(10, 20), torch.ones(20, 30)
    duration = modeled_seconds(10, 30, 20, 1.0)
    slept = _clock(monkeypatch, 1.5 * duration)
    with SleepingGemms(1.0):
        a @ b
        a @ b  # no time is left for this one, and half of the next is gone
        a @ b
    assert slept == pytest.approx([duration, 0.5 * duration])
