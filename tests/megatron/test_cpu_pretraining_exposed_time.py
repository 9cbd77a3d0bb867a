"""Which collectives count as exposed communication, on a tensor-parallel group of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core import parallel_state
from megatron.core.tensor_parallel import layers

from commfuse_npu.runtime.collectives import all_gather_rows, all_to_all_rows, reduce_scatter_rows
from scripts.cpu_pretraining.exposed_time import measure_exposed_time


@pytest.fixture
def tensor_parallel_group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield parallel_state.get_tensor_model_parallel_group()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.parametrize("collective", [all_gather_rows, reduce_scatter_rows])
def test_plain_layers_collectives_count(
    tensor_parallel_group: dist.ProcessGroup, collective: Callable[..., torch.Tensor]
) -> None:
    with measure_exposed_time() as counter:
        collective(torch.ones(4, 2), tensor_parallel_group)
        assert counter.seconds > 0.0
        before = counter.seconds
        collective(torch.ones(4, 2), dist.group.WORLD)
        assert counter.seconds == before


def test_exchanges_of_heads_count(tensor_parallel_group: dist.ProcessGroup) -> None:
    with measure_exposed_time() as counter:
        all_to_all_rows(torch.ones(4, 2), dist.group.WORLD)
        assert counter.seconds == 0.0
        all_to_all_rows(torch.ones(4, 2), parallel_state.get_context_parallel_group())
        assert counter.seconds > 0.0


def test_only_megatron_and_commfuse_callers_count(
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


def test_wrapped_functions_are_put_back() -> None:
    original = layers.dist_all_gather_func
    with measure_exposed_time():
        assert layers.dist_all_gather_func is not original
    assert layers.dist_all_gather_func is original
