"""The report at the start, on real Megatron models: reasons, stages, buckets."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu.launch.refusals import IncompatibleOptionsError
from mindspeed_patches.start_report import StartReport
from tests.distributed.ranks import on_ranks
from tests.megatron.models import DISTRIBUTED, EXPERTS, Case
from tests.megatron.training import Trainer, launched, layout, told


class Alien(torch.nn.Module):
    """A tensor-parallel layer that is not Megatron's but has an attribute of its layers."""

    output_size_per_partition = 4


LAYERS = {"num_layers": 2}
TWO = Case(tensor=2, options=LAYERS)


@on_ranks(2)
def test_each_reason_comes_with_the_way_out(rank: int) -> None:
    case = replace(TWO, launch="--commfuse-attention --commfuse-layers qkv,fc1,fc2,output")
    unlisted = "proj is not in the list of layers to fuse (add proj to --commfuse-layers)"
    with layout(case), launched(case) as (_, report):
        lines = told(report, Trainer(case).models)
    expected = [
        "qkv: 2 of 2 fused",
        f"proj: 0 of 2 fused; 2 not: {unlisted}",
        "fc1: 2 of 2 fused",
        "fc2: 2 of 2 fused",
        "output: 1 of 1 fused",
        f"attention: 0 of 2 fused; 2 not: {unlisted}",
    ]
    assert lines == [f"CommFuse: {line}" for line in expected if rank == 0]


@pytest.mark.parametrize(
    ("case", "part", "line"),
    [
        (TWO, "mlp.linear_fc1", "linear_fc1: 0 of 1 fused; 1 not: Alien is not Megatron's linear"),
        (
            Case(context=2, launch="--commfuse-ulysses", options=LAYERS),
            "self_attention.core_attention",
            "ulysses: 1 of 2 fused; 1 not: Alien exchanges no heads",
        ),
    ],
)
@on_ranks(2)
def test_modules_of_unknown_classes_are_named(rank: int, case: Case, part: str, line: str) -> None:
    with layout(case), launched(case) as (_, report):
        models: Any = Trainer(case).models
        owner, _, name = part.partition(".")
        setattr(models[0].module.decoder.layers[1].get_submodule(owner), name, Alien())
        found = [said for said in told(report, models) if said.startswith(f"CommFuse: {line}")]
    assert len(found) == (rank == 0)


@on_ranks(2)
def test_where_nothing_is_fused_all_ranks_end(rank: int) -> None:
    with layout(TWO), launched(TWO) as (linears, report):
        models, linears.min_rows = Trainer(TWO).models, 17
        with pytest.raises(IncompatibleOptionsError) as caught:
            told(report, models)
        assert told(report, models) == []  # once
    first, *lines, last = str(caught.value).splitlines()
    reason = "0 of 2 fused; 2 not: a block has fewer than 17 rows"
    assert (first, last[:16]) == ("--use-commfuse would fuse nothing:", "change that, or ")
    for line, name in zip(lines, ("qkv", "proj", "fc1", "fc2"), strict=False):
        assert line.startswith(f"  {name}: {reason}, for which Megatron's own order is faster")


@on_ranks(2)
def test_stages_are_counted_together(rank: int) -> None:
    """The second of two stages fuses no layer: it must not exit alone."""
    linears: Any = SimpleNamespace(reported=set())
    report = StartReport(linears)
    layers = [[("qkv", ""), ("fc1", "why")], [("fc1", "why")]][rank]
    lines = ["CommFuse: qkv: 1 of 1 fused", "CommFuse: fc1: 0 of 2 fused; 2 not: why"]
    with layout(Case(stages=2)), mock.patch.object(report, "_count", return_value=layers):
        assert told(report, [torch.nn.Module()]) == ([] if rank else lines)
    assert ("fc1", "why") in linears.reported


@on_ranks(2)
def test_buckets_of_experts_are_told_apart(rank: int) -> None:
    case = Case(replicas=2, experts=2, launch="--commfuse-dp", options=EXPERTS | DISTRIBUTED)
    with layout(case), launched(case) as (_, report):
        lines = told(report, Trainer(case).models)
    alone = "1 of 2 fused; 1 not: a data-parallel group of one has nothing to transfer"
    names = ("gradients", "parameters") if rank == 0 else ()
    assert lines == [f"CommFuse: {name}: {alone}" for name in names]


def test_only_models_to_train_are_looked_at() -> None:
    report: Any = StartReport(SimpleNamespace())  # type: ignore[arg-type]
    report.tell = mock.Mock()
    get_model = report.get_model_wrapper(lambda *_, **__: ["chunk"])
    for arguments, calls in ((("type",), 1), (("type", False), 1)):
        assert get_model("provider", *arguments) == ["chunk"]
        assert report.tell.call_count == calls
    get_model("provider", wrap_with_ddp=False)
    get_model("provider", wrap_with_ddp=True)
    assert report.tell.call_args_list == [mock.call(["chunk"])] * 2
