"""Megatron's linear layers with the wrappers, against the same layers without."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu import Schedule, Transport
from commfuse_npu.ops import LinearOptions
from mindspeed_patches import LinearWrappers
from tests.distributed.ranks import on_ranks
from tests.docs.test_examples import blocks
from tests.limits import PATIENT
from tests.megatron.in_ranks import NormColumn, megatron, patched

SIZES = {"hidden": 64, "ffn": 128, "length": 32, "batch": 2}


@dataclass(frozen=True)
class Knobs:
    """How a layer is built and called."""

    kind: str = "column"
    name: str | None = "fc1"
    dtype: torch.dtype = torch.float32
    bias: bool = True
    sequence_parallel: bool = True
    init: dict[str, Any] = field(default_factory=dict)
    external_weight: bool = False
    frozen: bool = False
    main_grad: torch.dtype | None = None
    flags: tuple[str, ...] = ()
    recompute: bool = False
    length: int = SIZES["length"]


def build(knobs: Knobs, column: type[torch.nn.Module] | None = None) -> Any:
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=SIZES["hidden"],
        num_attention_heads=4,
        tensor_model_parallel_size=dist.get_world_size(),
        sequence_parallel=knobs.sequence_parallel,
        use_cpu_initialization=True,
        params_dtype=knobs.dtype,
        gradient_accumulation_fusion=knobs.main_grad is not None,
    )
    kind, sizes = column or layers.ColumnParallelLinear, (SIZES["hidden"], SIZES["ffn"])
    options = {"skip_bias_add": False} | knobs.init
    if knobs.kind == "row":
        kind, sizes = layers.RowParallelLinear, sizes[::-1]
        options["input_is_parallel"] = True
    if knobs.name is not None:
        options["tp_comm_buffer_name"] = knobs.name
    torch.manual_seed(5)
    normal = torch.nn.init.normal_
    layer = kind(*sizes, config=config, init_method=normal, bias=knobs.bias, **options)
    if layer.bias is not None:
        normal(layer.bias)
    return layer.requires_grad_(not knobs.frozen)


def run(knobs: Knobs) -> dict[str, torch.Tensor]:
    """All results and gradients of a forward and a backward."""
    from megatron.core.tensor_parallel import checkpoint

    layer = build(knobs)
    rank, size = dist.get_rank(), dist.get_world_size()
    sharded = knobs.sequence_parallel and knobs.kind == "column"
    length = knobs.length // size if sharded else knobs.length
    features = SIZES["hidden"] if knobs.kind == "column" else SIZES["ffn"] // size
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(length, SIZES["batch"], features, generator=generator).to(knobs.dtype)
    x.requires_grad_()
    weight, call = layer.weight, {}
    if knobs.external_weight:
        weight = call["weight"] = torch.nn.Parameter(torch.randn_like(layer.weight))
    if knobs.main_grad is not None:
        weight.main_grad = torch.ones_like(weight, dtype=knobs.main_grad)
        for flag in knobs.flags:
            setattr(weight, flag, flag == "zero_out_wgrad")

    def forward(tensor: torch.Tensor) -> torch.Tensor:
        output, bias = layer(tensor, **call)
        assert bias is (layer.bias if layer.skip_bias_add else None)
        return output

    y = checkpoint(forward, False, x) if knobs.recompute else forward(x)
    generator = torch.Generator().manual_seed(200 + (0 if y.shape[0] > length else rank))
    y.backward(torch.randn(y.shape, generator=generator).to(knobs.dtype))
    results = {"y": y.detach(), "x.grad": x.grad}
    if "grad_added_to_main_grad" not in knobs.flags:
        results["weight.grad"] = weight.grad
    if layer.bias is not None:
        results["bias.grad"] = layer.bias.grad
    if knobs.main_grad is not None:
        results["main_grad"] = weight.main_grad
        results["flag"] = torch.tensor(getattr(weight, "grad_added_to_main_grad", False))
    return {name: value for name, value in results.items() if value is not None}


@lru_cache
def lanes(group: dist.ProcessGroup) -> Transport:
    return Transport.create(group, timeout=PATIENT)


@contextlib.contextmanager
def wrapped() -> Iterator[LinearWrappers]:
    """Applies the wrappers, over lanes."""
    from megatron.core import parallel_state

    wrappers = LinearWrappers(LinearOptions(Schedule(chunks=2)))
    wrappers.transport = lanes(parallel_state.get_tensor_model_parallel_group())
    with patched(wrappers.register):
        yield wrappers


COLLECTIVES = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor",
               "reduce_scatter_single", "all_reduce")  # fmt: skip


def compared(rank: int, cases: list[Knobs]) -> None:
    """Each case is fused without collectives, and gives the bits of Megatron's own layer."""
    with megatron(dist.get_world_size()):
        for knobs in cases:
            reference = run(knobs)
            with wrapped() as wrappers, contextlib.ExitStack() as stack:
                wrappers.transport.agree("before counting")
                spies = [
                    stack.enter_context(mock.patch.object(dist, name, wraps=getattr(dist, name)))
                    for name in COLLECTIVES
                    if hasattr(dist, name)
                ]
                ours = run(knobs)
            assert not any(spy.call_count for spy in spies), knobs
            name = knobs.name or "output"
            assert wrappers.calls == {(name, "fused"): 1 + knobs.recompute}, wrappers.calls
            assert ours.keys() == reference.keys(), knobs
            for key, value in ours.items():
                assert torch.equal(value, reference[key]), (knobs, key)


COLUMN = Knobs()
ROW = Knobs(kind="row", name="fc2")


FLAG = ("grad_added_to_main_grad",)
VARIANTS = [
    {},
    {"bias": False},
    {"init": {"skip_bias_add": True}},
    {"frozen": True},
    {"recompute": True},
    *(
        {"main_grad": dtype, **more}
        for dtype in (torch.float32, torch.bfloat16)
        for more in ({}, {"flags": FLAG}, {"flags": (*FLAG, "zero_out_wgrad")}, {"recompute": True})
    ),
]
OWN = {"name": None, "init": {"skip_weight_param_allocation": False}}
FUSED = [
    *(
        replace(base, dtype=dtype, **variant)
        for base in (COLUMN, ROW)
        for dtype in (torch.float32, torch.bfloat16)
        for variant in VARIANTS
    ),
    replace(COLUMN, external_weight=True),
    replace(COLUMN, external_weight=True, **OWN),
    replace(ROW, sequence_parallel=False),
    replace(ROW, sequence_parallel=False, init={"skip_bias_add": True}, length=30),
]


def test_fused_layers_equal_megatrons(ranks) -> None:
    """Also the bits of the unsplit GEMM and of gloo's all-reduce, on two ranks at these shapes."""
    ranks(2).run(compared, FUSED)


@on_ranks(2)
def test_what_keeps_a_layer_from_being_fused(rank: int) -> None:
    with megatron(2), wrapped() as wrappers:
        wrappers.min_rows = 33
        column, row = build(COLUMN), build(ROW)

        def said(layer: Any, expected: str, *, length: int = 64, **call: Any) -> None:
            """The path of a call with two sequences contains ``expected``."""
            wrappers.calls.clear()
            features = SIZES["hidden"] if layer is column else SIZES["ffn"] // 2
            wrap = "column_forward_wrapper" if layer is column else "row_forward_wrapper"
            forward = getattr(wrappers, wrap)(lambda layer, x, *_: (x, None))
            forward(layer, torch.ones(length, 2, features), **call)
            ((_, path),) = wrappers.calls
            assert expected in path, path

        said(column, "fused")
        said(row, "fused")
        # A rank's block is of the column's input and of the row's output.
        for layer, length in ((column, 16), (row, 32)):
            said(layer, "a block has fewer than 33 rows", length=length)
            said(layer, "fused", length=length + 2)
        said(row, "sequence length 65 is not divisible by 2", length=65)
        said(column, "gather_output needs the whole output", runtime_gather_output=True)
        for owner, name, value, reason in (
            (column, "is_expert", True, "expert layers are left to the token dispatcher"),
            (column.config, "cpu_offloading", True, "cpu_offloading needs Transformer Engine's"),
            (column, "explicit_expert_comm", True, "moe_shared_expert_overlap gathers"),
            (column, "disable_grad_reduce", True, "with disable_grad_reduce the layer does not"),
            (wrappers, "layers", {"qkv", "fc2"}, "fc1 is not in the list of layers to fuse"),
        ):
            with mock.patch.object(owner, name, value):
                said(column, reason)
        with mock.patch.object(row, "input_is_parallel", False):
            said(row, "the input has to be scattered first")
        column.config.defer_embedding_wgrad_compute = column.config.mla_up_proj_tp_overlap = True
        for name, reason in (
            ("output", "defer_embedding_wgrad_compute keeps the gradients for later"),
            ("kv_up", "mla_up_proj_tp_overlap gathers its input before the call"),
            ("fc1", "fused"),
        ):
            column.commfuse_layer = name
            said(column, reason)


@on_ranks(2)
def test_megatrons_own_errors_stay_and_lanes_have_to_exist(rank: int) -> None:
    x = torch.ones(4, 2, SIZES["hidden"])
    with megatron(2):
        with wrapped(), pytest.raises(RuntimeError, match="supplied weight"):
            build(COLUMN)(x, weight=torch.ones(3, 3))
        no_lanes = pytest.raises(RuntimeError, match="after initialize_model_parallel and before")
        with patched(LinearWrappers().register), no_lanes:
            build(COLUMN)(x)
    with pytest.raises(ValueError, match="unknown layers fc3; choose from qkv, q_down, q_up, kv_"):
        LinearWrappers(layers=("fc1", "fc3"))


@pytest.mark.parametrize(
    ("sequence_parallel", "path"),
    [(True, "fused"), (False, "without sequence parallelism the forward has no transfer")],
)
@on_ranks(2)
def test_the_layer_with_norm(rank: int, sequence_parallel: bool, path: str) -> None:
    knobs = replace(COLUMN, sequence_parallel=sequence_parallel)
    with megatron(2):
        results, wrappers = [], LinearWrappers()
        wrappers.transport = lanes(dist.group.WORLD)
        own = NormColumn.__init__
        for init in (own, wrappers.norm_column_init_wrapper(own)):
            with mock.patch.object(NormColumn, "__init__", init):
                layer = build(knobs, NormColumn)
            x = torch.randn(16, 2, 64, generator=torch.Generator().manual_seed(rank))
            x.requires_grad_()
            y, _ = layer(x)
            y.square().sum().backward()
            results.append([y, x.grad, *(p.grad for p in layer.parameters())])
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
        (((name, taken), count),) = wrappers.calls.items()
        assert (name, taken[: len(path)], count) == ("fc1", path, 1)


@on_ranks(2)
def test_aliases_and_subclasses_are_covered_and_checkpoints_unchanged(rank: int) -> None:
    from megatron.core import tensor_parallel

    with megatron(2):
        keys = build(COLUMN).sharded_state_dict().keys()
        with wrapped() as wrappers:
            layer = build(COLUMN)
            layer.__class__ = type("Subclass", (tensor_parallel.ColumnParallelLinear,), {})
            layer(torch.ones(4, 2, SIZES["hidden"]))
            assert wrappers.describe() == ["fc1: 1 forward calls fused"]
            assert layer.sharded_state_dict().keys() == keys
        assert not hasattr(build(COLUMN), "commfuse_layer"), "patches were not removed"


@on_ranks(2)
def test_the_lines_of_the_page_fuse_a_model(rank: int) -> None:
    from megatron.core import parallel_state

    (lines,) = (block for block in blocks("docs/megatron.md") if "LinearWrappers" in block)
    names: dict[str, Any] = {"parallel_state": parallel_state}
    with megatron(2):
        exec(lines, names)
        build(COLUMN)(torch.ones(4, 2, SIZES["hidden"]))
        names["manager"].remove_patches()
        assert names["wrappers"].describe() == ["fc1: 1 forward calls fused"]
