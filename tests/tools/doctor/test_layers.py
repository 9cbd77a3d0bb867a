"""What a launch would fuse."""

from __future__ import annotations

import pytest

from commfuse_npu.plan import Schedule
from commfuse_npu.tools.doctor import Package, diagnose
from tests.tools.doctor.launches import FUSED, launch
from tests.tools.doctor.machines import machine, only


def test_what_a_launch_would_fuse() -> None:
    report = diagnose(machine(packages={"torch": Package("2.13.0")}), launch("--config"))
    assert report.ready
    assert report.plan.startswith("shifted, 7 lanes, 2 chunks")
    block = 1024 * 2 * 4096 * 2
    half = block // 2
    rows = {
        layer.layer: (
            layer.operator,
            layer.input_shape,
            layer.weight_shape,
            layer.output_shape,
            layer.transfers,
            layer.transfer_bytes,
            layer.longest,
        )
        for layer in report.layers
    }
    x, y = (1024, 2, 4096), 8192
    assert rows == {
        "qkv": ("all_gather_linear", x, (768, 4096), (y, 2, 768), 14, half, block),
        "proj": ("linear_reduce_scatter", (y, 2, 512), (4096, 512), x, 14, half, half),
        "fc1": ("all_gather_linear", x, (3584, 4096), (y, 2, 3584), 14, half, block),
        "fc2": ("linear_reduce_scatter", (y, 2, 1792), (4096, 1792), x, 14, half, half),
        "output": ("all_gather_linear", x, (16032, 4096), (y, 2, 16032), 14, half, block),
    }
    assert (
        "fc1    [1024, 2, 4096] x [3584, 4096] -> [8192, 2, 3584]: all_gather_linear, "
        "14 transfers of 8.00 MB (8388608 bytes)"
    ) in report.as_text()


def test_an_all_reduce_sends_twice() -> None:
    report = diagnose(machine(), launch(*FUSED.replace("--sequence-parallel", "").split()))
    sent = {layer.operator: layer.transfers for layer in report.layers if layer.operator}
    assert sent == {"linear_all_reduce": 2}


def test_chunks_and_lanes_are_those_asked_for() -> None:
    words = ("--commfuse-chunks", "4", "--commfuse-lanes", "3", "--commfuse-taper", "2")
    report = diagnose(machine(), launch("--config", *words))
    assert report.plan.startswith("shifted, 3 lanes, 4 chunks, tapered by 2")
    assert {layer.transfers for layer in report.layers} == {28}
    assert {layer.transfer_bytes for layer in report.layers} == {1024 * 2 * 4096 * 2 // 4}


def test_a_group_over_two_nodes_gets_two_levels() -> None:
    words = ("--nproc_per_node", "8", "--nnodes", "2", "--tensor-model-parallel-size", "16")
    found = launch("--config", *words, "--num-query-groups", "16")
    report = diagnose(machine(), found)
    assert report.plan.startswith("two_level, 2 lanes, 2 chunks")
    assert "8 ranks per node" in report.plan


def test_a_schedule_that_cannot_be_is_an_error() -> None:
    nodes = ("--nproc_per_node", "6", "--nnodes", "4", "--global-batch-size", "66")
    assert diagnose(machine(), launch("--config", *nodes)).plan.startswith("shifted")
    report = diagnose(machine(), launch("--config", *nodes, "--commfuse-schedule", "two_level"))
    found = only(report.findings, "--commfuse-schedule")
    assert found.level == "error"
    assert found.value.startswith("group size 8 is not a multiple of node_size 6")
    assert report.layers == ()


def test_a_layout_that_does_not_fit_is_an_error() -> None:
    found = launch("--config", "--tensor-model-parallel-size", "3")
    report = diagnose(machine(), found)
    assert not report.ready
    assert report.layers == ()
    layout = [finding.value for finding in report.findings if finding.what == "layout"]
    assert (
        "32 attention heads, 8 query groups, a feed-forward width of 14336 are not divisible by "
        "TP 3; choose TP from 1, 2, 4, 8" in layout
    )


ATTENTION = f"{FUSED} --commfuse-attention --attention-dropout 0.0"


def proj(*words: str) -> tuple[str | None, str, int, int]:
    report = diagnose(machine(), launch(*words))
    (layer,) = [layer for layer in report.layers if layer.layer == "proj"]
    return layer.operator, layer.reason, layer.transfers, layer.transfer_bytes


def test_attention_and_projection_are_one_op() -> None:
    half = 1024 * 2 * 4096 * 2 // 2
    words = ("--config", "--commfuse-attention")
    assert proj(*words) == ("attention_linear_reduce_scatter", "", 14, half)
    assert proj(*words, "--no-commfuse-attention") == ("linear_reduce_scatter", "", 14, half)
    report = diagnose(machine(packages={"torch": Package("2.13.0")}), launch(*words))
    assert report.ready
    assert (
        "proj   [8192, 2, 512] x [4096, 512] -> [1024, 2, 4096]: attention and projection as one "
        "op attention_linear_reduce_scatter, 14 transfers of 8.00 MB (8388608 bytes)"
    ) in report.as_text()
    others = [layer for layer in report.layers if layer.layer != "proj"]
    assert others == [
        layer for layer in diagnose(machine(), launch("--config")).layers if layer.layer != "proj"
    ]


@pytest.mark.parametrize("more", ["--recompute-activations", "--recompute-granularity selective"])
def test_attention_that_is_recomputed_by_itself_stays(more: str) -> None:
    assert proj(*f"{ATTENTION} {more}".split())[0] == "linear_reduce_scatter"
    assert proj(*f"{ATTENTION} --recompute-granularity full".split())[0] == (
        "attention_linear_reduce_scatter"
    )


def test_attention_stays_where_proj_stays() -> None:
    operator, reason, transfers, _ = proj(*f"{ATTENTION} --commfuse-min-rows 100".split())
    assert (operator, transfers) == (None, 0)
    assert reason == "a block has fewer rows than the 100 of --commfuse-min-rows"
    assert proj(*f"{ATTENTION} --commfuse-layers qkv".split())[:2] == (
        None,
        "proj is not in the list of layers to fuse",
    )
    unsplit = ATTENTION.replace("--sequence-parallel", "")
    assert proj(*unsplit.split())[0] == "linear_all_reduce"


@pytest.mark.parametrize("chunks", [1, 3, 5, 40])
def test_transfers_of_attention_are_those_of_its_schedule(chunks: int) -> None:
    """32 queries, of batch 3, in a group of two."""
    runs = Schedule(chunks=chunks).runs(32, "last")
    largest = max(run.stop - run.start for run in runs) * 3 * 64 * 2
    _, _, transfers, transfer_bytes = proj(*f"{ATTENTION} --commfuse-chunks {chunks}".split())
    assert (transfers, transfer_bytes) == (len(runs), largest)


def test_experts_are_left_alone() -> None:
    report = diagnose(machine(), launch(*FUSED.split(), "--num-experts", "8"))
    reasons = {layer.layer: layer.reason for layer in report.layers if layer.reason}
    said = "this model has experts or other layers in its place"
    assert reasons == {"fc1": said, "fc2": said}


def test_numbers_of_four_bytes_in_fp32() -> None:
    half = diagnose(machine(), launch(*FUSED.split()))
    full = diagnose(machine(), launch(*FUSED.replace("--bf16", "").split()))
    other = diagnose(machine(), launch(*FUSED.replace("--bf16", "--fp16").split()))
    bytes_of = [report.layers[0].transfer_bytes for report in (half, full, other)]
    assert bytes_of == [32 * 3 * 64 * 2, 32 * 3 * 64 * 4, 32 * 3 * 64 * 2]
