"""Calls of Megatron's linear layers that keep its own forward, and the lines of the page."""

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu.launch.refusals import UNSPLIT
from tests.distributed.ranks import on_ranks
from tests.docs.test_examples import blocks
from tests.megatron.models import Case, gpt, settings
from tests.megatron.training import launched, layout

CASE = Case(tensor=2, options={"add_bias_linear": True})
HIDDEN = 32
COLLECTIVES = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor",
               "reduce_scatter_single", "all_reduce")  # fmt: skip


def mlp(case: Case = CASE) -> Any:
    """The layers ``linear_fc1`` and ``linear_fc2`` of a model."""
    model: Any = gpt(case, settings(case))
    return model.decoder.layers[0].mlp


@on_ranks(2)
def test_what_keeps_a_layer_from_being_fused(rank: int) -> None:
    with layout(CASE), launched(CASE) as (wrappers, _):
        wrappers.min_rows = 33
        column, row = mlp().linear_fc1, mlp().linear_fc2

        def said(layer: Any, expected: str, *, length: int = 64, **call: Any) -> None:
            """The path of a call with two sequences contains ``expected``."""
            wrappers.calls.clear()
            features = HIDDEN if layer is column else row.input_size_per_partition
            wrap = "column_forward_wrapper" if layer is column else "row_forward_wrapper"
            forward = getattr(wrappers, wrap)(lambda layer, x, *_: (x, None))
            _, bias = forward(layer, torch.ones(length, 2, features), **call)
            ((_, path),) = wrappers.calls
            assert expected in path, path
            assert bias is (layer.bias if path == "fused" else None), "the caller adds it"

        with contextlib.ExitStack() as stack:
            spies = [
                stack.enter_context(mock.patch.object(dist, name, wraps=getattr(dist, name)))
                for name in COLLECTIVES
                if hasattr(dist, name)
            ]
            said(column, "fused")
            said(row, "fused")
        assert not any(spy.call_count for spy in spies)
        # A rank's block is of the column's input and of the row's output.
        for layer, length in ((column, 16), (row, 32)):
            said(layer, "a block has fewer than 33 rows", length=length)
            said(layer, "fused", length=length + 2)
        said(column, "gather_output needs the whole output", runtime_gather_output=True)
        for owner, name, value, reason in (
            (column, "is_expert", True, "expert layers are left to the token dispatcher"),
            (column, "explicit_expert_comm", True, "moe_shared_expert_overlap gathers"),
            (column, "tp_group", object(), "it transfers over another group than the tensor"),
            (column.config, "cpu_offloading", True, "cpu_offloading needs Transformer Engine's"),
        ):
            with mock.patch.object(owner, name, value, create=True):
                said(column, reason)
        column.config.defer_embedding_wgrad_compute = column.config.mla_up_proj_tp_overlap = True
        for name, reason in (
            ("output", "defer_embedding_wgrad_compute keeps the gradients for later"),
            ("kv_up", "mla_up_proj_tp_overlap gathers its input before the call"),
            ("fc1", "fused"),
        ):
            column.commfuse_layer = name
            said(column, reason)


@on_ranks(4)
def test_an_all_reduce_stays_megatrons(rank: int) -> None:
    """The same bits, forward and backward, where a fused sum has another order."""
    case = Case(tensor=4, launch="--commfuse-chunks 2", options={"sequence_parallel": False})
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(64, 2, 16, generator=generator, requires_grad=True)

    def run(layer: Any) -> list[torch.Tensor]:
        y, _ = layer(x)
        return [y, *torch.autograd.grad(y.square().sum(), (x, layer.weight))]

    with layout(case):
        own = mlp(case).linear_fc2
        with launched(case) as (wrappers, _):
            wrapped = mlp(case).linear_fc2
            wrapped.load_state_dict(own.state_dict())
            results = run(wrapped)
            assert set(wrappers.calls) == {("fc2", UNSPLIT)}
        assert all(map(torch.equal, results, run(own)))


@on_ranks(2)
def test_checks_of_megatrons_forward_stay(rank: int) -> None:
    """A layer that gets no weight, or another rank's share, and one whose input is not split."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    given: dict[str, Any] = {"init_method": torch.nn.init.normal_, "bias": False}
    with layout(CASE), launched(CASE) as (wrappers, _):
        config = settings(CASE)
        given |= {"config": config, "skip_bias_add": False}
        column = ColumnParallelLinear(HIDDEN, 64, skip_weight_param_allocation=True, **given)
        for weight, words in (
            (None, "weight was not supplied"),
            (torch.ones(64, HIDDEN), r"supplied weight's shape is \(64, 32\), not \(32, 32\)"),
        ):
            with pytest.raises(RuntimeError, match=words):
                column(torch.ones(4, 2, HIDDEN), weight=weight)
        row = RowParallelLinear(HIDDEN, 8, input_is_parallel=True, **given)
        row.input_is_parallel = False
        with pytest.raises(AssertionError):  # Megatron scatters no input that is split by rows
            row(torch.ones(4, 2, HIDDEN // 2))
        config.sequence_parallel = False
        row = RowParallelLinear(HIDDEN, 8, input_is_parallel=False, **given)
        x = torch.randn(4, 2, HIDDEN, generator=torch.Generator().manual_seed(1))
        part = x.chunk(2, dim=-1)[rank] @ row.weight.t()
        dist.all_reduce(part)
        assert torch.equal(row(x)[0], part)
        assert not any(path == "fused" for _, path in wrappers.calls)


@on_ranks(2)
def test_the_lines_of_the_page_fuse_a_model(rank: int) -> None:
    from megatron.core import parallel_state

    (lines,) = (block for block in blocks("docs/megatron.md") if "LinearWrappers" in block)
    names: dict[str, Any] = {"parallel_state": parallel_state}
    with layout(CASE):
        exec(lines, names)
        wrappers, layer = names["wrappers"], mlp().linear_fc1
        layer(torch.ones(4, 2, HIDDEN))
        assert wrappers.describe() == ["fc1: 1 forward calls fused"]
        wrappers.transport = None
        with pytest.raises(RuntimeError, match="after initialize_model_parallel and before"):
            layer(torch.ones(4, 2, HIDDEN))
        names["manager"].remove_patches()
        assert not hasattr(mlp().linear_fc1, "commfuse_layer"), "patches were not removed"
    with pytest.raises(ValueError, match="unknown layers fc3; choose from qkv, q_down, q_up, kv_"):
        type(wrappers)(layers=("fc1", "fc3"))
