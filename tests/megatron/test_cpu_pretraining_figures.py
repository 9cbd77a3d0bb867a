"""What is said about a training: exposed time, speeds, a verdict that can be False; stand-ins."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core import parallel_state
from megatron.core.tensor_parallel import layers

from commfuse_npu.runtime.collectives import all_gather_rows, all_to_all_rows, reduce_scatter_rows
from scripts.cpu_pretraining import compare
from scripts.cpu_pretraining.exposed_time import measure_exposed_time
from scripts.cpu_pretraining.megatron_on_cpu import REPLACEMENTS, cuda_means_cpu, megatron_on_cpu
from scripts.cpu_pretraining.metrics import Outcome, Speed, speed_of
from tests.tools.report.pages import read

NEXT = math.nextafter(2.5, 3.0)


@pytest.fixture
def tensor_parallel_group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield parallel_state.get_tensor_model_parallel_group()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.parametrize("collective", [all_gather_rows, reduce_scatter_rows, all_to_all_rows])
def test_collectives_of_the_layers_are_exposed(
    tensor_parallel_group: dist.ProcessGroup, collective: Callable[..., torch.Tensor]
) -> None:
    original = layers.dist_all_gather_func
    with measure_exposed_time() as counter:
        collective(torch.ones(4, 2), dist.group.WORLD)
        assert counter.seconds == 0.0
        collective(torch.ones(4, 2), parallel_state.get_context_parallel_group())
        one = counter.seconds
        assert one > 0.0
        collective(torch.ones(4, 2), tensor_parallel_group)
        assert counter.seconds > one
    assert layers.dist_all_gather_func is original


def test_waiting_for_megatrons_collectives_is_exposed(
    tensor_parallel_group: dist.ProcessGroup,
) -> None:
    with measure_exposed_time() as counter:
        dist.all_reduce(torch.ones(2), group=tensor_parallel_group)
        assert counter.seconds == 0.0
        as_megatron = {"__name__": "megatron.core", "dist": dist, "torch": torch}
        call = "dist.all_reduce(torch.ones(2), group=group, async_op=True)"
        work = eval(call, as_megatron, {"group": tensor_parallel_group})
        started = counter.seconds
        assert started > 0.0
        work.wait()
        assert counter.seconds > started


def test_stand_ins_are_undone() -> None:
    def current() -> list[object]:
        return [getattr(import_module(module), name, None) for module, name, _ in REPLACEMENTS]

    before = current()
    with megatron_on_cpu():
        assert current() == [stand_in for _, _, stand_in in REPLACEMENTS]
    assert all(one is other for one, other in zip(before, current(), strict=True))
    tensor = torch.ones(2)
    with cuda_means_cpu():
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        assert torch.zeros(1, device=torch.device("cuda", 0)).device.type == "cpu"
        assert tensor.cuda() is tensor
        assert tensor.to("cuda").device.type == "cpu"
        assert tensor.type() == "torch.cuda.FloatTensor"
        assert tensor.type(torch.int32).dtype == torch.int32
    assert tensor.type() == "torch.FloatTensor"


def test_speed_leaves_the_first_iterations_out() -> None:
    times = [9000.0, 8000.0, 7000.0, 500.0, 100.0, 200.0]
    entries = [
        {"iteration": number, "elapsed_ms": time, "exposed_ms": time / 2}
        for number, time in enumerate(times, start=11)
    ]
    found = speed_of(entries, 100, 20.0)
    assert found == Speed(
        (pytest.approx(0.15), 0.2, pytest.approx(0.35)), 0.1, 100, 14, 16, "links of 20 MB/s"
    )
    assert str(found) == (
        "500 over links of 20 MB/s (0.200 s per iteration, quartiles 0.150 and 0.350, of which "
        "0.100 s blocked in communication; medians of iterations 14 to 16)"
    )
    assert speed_of(entries[:3], 100, None) is None


def outcomes(fused: float = 2.5, weights: str = "a", overlap: str = "b") -> dict[str, Outcome]:
    found = {
        "plain": Outcome({1: 5.5, 2: 2.5}, "a"),
        "commfuse": Outcome({1: 5.5, 2: fused}, weights),
        "megatron": Outcome({1: 5.5, 2: 2.75}, "b"),
        "overlap": Outcome({1: 5.5, 2: 2.75}, overlap),
    }
    for one in found.values():
        one.iteration = 2
    return found


@pytest.mark.parametrize(
    ("found", "same"),
    [
        (outcomes(), True),
        (outcomes(fused=NEXT), False),
        (outcomes(weights="c"), False),
        (outcomes(overlap="c"), False),
    ],
)
def test_the_verdict_sees_one_bit(found: dict[str, Outcome], same: bool, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert", reason="pictures are optional")
    assert compare.identical(found) == same
    losses, differences = compare.pictures(found)
    assert losses.tables[0].rows[0] == ("1", "5.5", "5.5", "5.5", "5.5")
    assert (differences.tables[0].rows[1][1] == "0") == (found["commfuse"].losses[2] == 2.5)
    compare.page(tmp_path / "compare.html", ["--compare"], found)
    page = read(tmp_path / "compare.html")
    said = "are the same" if same else "are not the same"
    assert f"Plain and fused {said}, bit for bit" in page.text
    assert ["megatron", "2.75", "b"] in page.tables[-1][1]


@pytest.mark.parametrize("last", [12, 13])
def test_a_ratio_has_a_range_and_ten_iterations_behind_it(last: int) -> None:
    fused = Speed((0.8, 1.0, 1.25), 0.1, 100, 4, last, "loopback")
    other = Speed((1.5, 2.0, 2.4), 0.1, 100, 4, last, "loopback")
    losses = dict.fromkeys(range(1, last + 1), 1.0)
    speeds = {"plain": other, "commfuse": fused, "megatron": other}
    said = compare.remarks({mode: Outcome(losses, speed=speed) for mode, speed in speeds.items()})
    ratio = "2.000 (1.200 to 3.000 by the quartiles of 10 iterations)"
    assert said[1:] == (
        ["no ratio of tokens/s: give --train-iters 13 or more"]
        if last == 12
        else [f"tokens/s, commfuse / {mode}: {ratio}" for mode in ("plain", "megatron")]
    )
