"""Which linear layers a launch has, and what becomes of them, against the wrappers around them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from commfuse_npu.options import LAYERS
from commfuse_npu.tools.launch_script.options import Options
from commfuse_npu.tools.linear_layers import judge
from mindspeed_patches import wrappers

TP = "--tensor-model-parallel-size 4"
SP = f"{TP} --sequence-parallel"
DENSE = "qkv proj fc1 fc2 output"
EXPERTS = f"{SP} --num-experts 8 --moe-grouped-gemm --expert-model-parallel-size 4"
LATENT = f"{SP} --multi-latent-attention --spec mindspeed_llm.tasks.models.spec.deepseek_spec"


def layers(words: str, state: str, chosen: tuple[str, ...] = LAYERS) -> dict[str, str]:
    found = judge(Options(words.split()), chosen)
    return {one.layer: one.reason for one in found if one.state == state}


@pytest.mark.parametrize(
    ("words", "fused", "left", "silent"),
    [
        (SP, DENSE, "", ""),
        (TP, "proj fc2", "", "qkv fc1 output"),
        ("--sequence-parallel", "", "", DENSE),
        # Experts in each layer, no dense one.
        (EXPERTS, "qkv proj output", "", "experts"),
        (f"{EXPERTS} --first-k-dense-replace 0", "qkv proj output", "", "experts"),
        (f"{EXPERTS} --first-k-dense-replace 3", DENSE, "", "experts"),
        (f"{LATENT}", "q_up kv_up proj fc1 fc2 output", "", ""),
        (f"{LATENT} --mla-up-proj-tp-overlap", "proj fc1 fc2 output", "q_up kv_up", ""),
        (f"{SP} --mtp-num-layers 1", f"{DENSE} eh_proj", "", ""),
        (f"{SP} --cpu-offloading", "", DENSE, ""),
        (f"{SP} --defer-embedding-wgrad-compute", "qkv proj fc1 fc2", "output", ""),
        (
            f"{EXPERTS} --moe-shared-expert-intermediate-size 64",
            "qkv proj shared_fc1 shared_fc2 output",
            "",
            "experts",
        ),
        (
            f"{EXPERTS} --n-shared-experts 1 --moe-alltoall-overlap-comm",
            "qkv proj output",
            "shared_fc1 shared_fc2",
            "experts",
        ),
        (
            f"{SP} --full-attention-interval 4",
            "delta-net_in delta-net_out q,_k,_v_apart proj fc1 fc2 output",
            "",
            "",
        ),
        (f"{SP} --spec mindspeed_llm.spec.mamba_spec mamba", "mamba_in mamba_out output", "", ""),
        (
            f"{SP} --spec x.mamba_spec s --hybrid-attention-ratio 0.1 --hybrid-mlp-ratio 0.5",
            f"mamba_in mamba_out {DENSE}",
            "",
            "",
        ),
    ],
)
def test_layers_of_a_launch(words: str, fused: str, left: str, silent: str) -> None:
    found = [" ".join(name.replace(" ", "_") for name in layers(words, state)) for state in STATES]
    assert [sorted(names.split()) for names in found] == [
        sorted(names.split()) for names in (fused, left, silent)
    ]


STATES = ("fused", "left", "silent")

SHARED = " --num-experts 8 --moe-shared-expert-intermediate-size 64"
HAS = {
    **dict.fromkeys(("q_up", "kv_up"), " --multi-latent-attention"),
    **dict.fromkeys(("shared_fc1", "shared_fc2"), SHARED),
    "eh_proj": " --mtp-num-layers 1",
}
"""What gives a launch a layer that others do not have."""


@pytest.mark.parametrize(
    ("words", "state"),
    [
        ("--moe-grouped-gemm --expert-tensor-parallel-size 1", "silent"),
        ("--expert-tensor-parallel-size 1", "left"),
        ("", "silent"),
        ("--expert-tensor-parallel-size 1 --expert-model-parallel-size 2", "silent"),
        ("--expert-tensor-parallel-size 1 --moe-tp-extend-ep", "silent"),
    ],
)
def test_experts_whose_linear_layers_reduce_are_left(words: str, state: str) -> None:
    assert "experts" in layers(f"{SP} --num-experts 8 {words}", state)


def test_layers_that_are_not_chosen_are_left() -> None:
    said = {name: f"{name} is not in the list of layers to fuse" for name in ("qkv", "fc1", "fc2")}
    assert layers(SP, "left", ("proj", "output")) == said


@pytest.mark.parametrize("words", [SP, TP, f"{SP} --cpu-offloading", f"{EXPERTS} {TP}", "--bf16"])
@pytest.mark.parametrize("known_as", [name for name in LAYERS if not name.endswith("_down")])
def test_reasons_are_those_of_the_wrappers(monkeypatch, words: str, known_as: str) -> None:
    """For the layers that Megatron's GPTModel has; of latent attention those that transfer."""
    for name in ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce"):
        monkeypatch.setattr(wrappers, name, lambda x, *_, **__: x)
    chosen = [name for name in LAYERS if name != "fc1"]
    judged = {
        one.layer: one for one in judge(Options((words + HAS.get(known_as, "")).split()), chosen)
    }
    if known_as not in judged:
        assert words.startswith(EXPERTS)
        assert known_as in ("fc1", "fc2")
        return
    parallel, size = "--sequence-parallel" in words, 4 if TP in words else 1
    linears = wrappers.LinearWrappers(layers=chosen)
    linears.transport = SimpleNamespace(size=size)  # type: ignore[assignment]
    layer = SimpleNamespace(
        commfuse_layer=known_as,
        weight=torch.empty(8, 8),
        bias=None,
        skip_bias_add=False,
        sequence_parallel=parallel and size > 1,
        gather_output=False,
        input_is_parallel=True,
        is_expert=False,
        gradient_accumulation_fusion=False,
        output_size_per_partition=8,
        input_size=8,
        config=SimpleNamespace(
            defer_embedding_wgrad_compute=False, cpu_offloading="--cpu-offloading" in words
        ),
    )
    column = known_as not in ("proj", "fc2", "shared_fc2")
    wrap = linears.column_forward_wrapper if column else linears.row_forward_wrapper
    wrap(lambda layer, x, *_: (x, None))(layer, torch.empty(8, 1, 8))
    found = judged[known_as]
    assert list(linears.calls) == [(known_as, found.reason or "fused")]
