"""The linear layers of a launch and whether they are fused, compared with the wrappers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commfuse_npu.tools.launch_script.options import Options
from commfuse_npu.tools.plan.obstacles import judge, obstacles
from mindspeed_patches import wrappers
from tests.tools.plan.launches import FUSED, LIMITED, asked

TP = "--tensor-model-parallel-size 4"
SP = f"{TP} --sequence-parallel"
DENSE = "qkv proj fc1 fc2 output"
EXPERTS = f"{SP} --num-experts 8 --moe-grouped-gemm --expert-model-parallel-size 4"
LATENT = f"{SP} --multi-latent-attention --spec mindspeed_llm.tasks.models.spec.deepseek_spec"


@pytest.mark.parametrize(
    ("words", "fused", "kept"),
    [
        (SP, DENSE, ""),
        (TP, "proj fc2", "qkv fc1 output"),
        ("--sequence-parallel", "", DENSE),
        # Experts in each layer, no dense one.
        (EXPERTS, "qkv proj output", "experts"),
        (f"{EXPERTS} --first-k-dense-replace 0", "qkv proj output", "experts"),
        (f"{EXPERTS} --first-k-dense-replace 3", DENSE, "experts"),
        (f"{EXPERTS} --moe-shared-expert-intermediate-size 64",
         "qkv proj shared_fc1 shared_fc2 output", "experts"),
        (f"{EXPERTS} --n-shared-experts 1 --moe-alltoall-overlap-comm",
         "qkv proj output", "shared_fc1 shared_fc2 experts"),
        (LATENT, "q_up kv_up proj fc1 fc2 output", ""),
        (f"{LATENT} --mla-up-proj-tp-overlap", "proj fc1 fc2 output", "q_up kv_up"),
        (f"{SP} --mtp-num-layers 1", f"{DENSE} eh_proj", ""),
        (f"{SP} --cpu-offloading", "", DENSE),
        (f"{SP} --defer-embedding-wgrad-compute", "qkv proj fc1 fc2", "output"),
        (f"{SP} --full-attention-interval 4",
         "delta-net_in delta-net_out q,_k,_v_apart proj fc1 fc2 output", ""),
        (f"{SP} --spec x.mamba_spec s --hybrid-attention-ratio 0.1 --hybrid-mlp-ratio 0.5",
         f"mamba_in mamba_out {DENSE}", ""),
        (f"{SP} --spec x.deepseek4_spec s", "fc1 fc2 output", "CSA's_q_up,_o_down CSA's_o_up"),
    ],
)  # fmt: skip
def test_layers_of_a_launch(words: str, fused: str, kept: str) -> None:
    layers = list(judge(Options(words.split())))
    for operates, names in ((True, fused), (False, kept)):
        listed = {
            layer.layer.replace(" ", "_") for layer in layers if operates == bool(layer.operator)
        }
        assert listed == set(names.split())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--expert-tensor-parallel-size 1", "expert layers are left to the token dispatcher"),
        ("", "no collective of the tensor-parallel group; tokens"),
        ("--expert-tensor-parallel-size 1 --moe-tp-extend-ep", "no collective of the tensor"),
        ("--moe-grouped-gemm", "grouped GEMMs, no tensor-parallel linear layer"),
    ],
)
def test_who_moves_the_tokens_of_experts(words: str, reason: str) -> None:
    layers = judge(Options(f"{SP} --num-experts 8 {words}".split()))
    (experts,) = (layer for layer in layers if layer.layer == "experts")
    assert experts.reason.startswith(reason)


# ------------------------------------------------------------------ the wrappers say the same

COLUMNS = ("qkv", "q_up", "kv_up", "fc1", "shared_fc1", "eh_proj", "output")


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators are replaced by ones that only append their name to this list."""
    operators: list[str] = []
    for name in ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce"):

        def operator(x: torch.Tensor, *_: torch.Tensor, op: str = name, **__: object):
            operators.append(op)
            return x

        monkeypatch.setattr(wrappers, name, operator)
    return operators


def counted(
    known_as: str,
    x: torch.Tensor,
    size: int,
    parallel: bool,
    chosen: tuple[str, ...],
    least: int,
    offloading: bool,
) -> Any:
    """The calls that the wrappers count in a forward of a layer in a group of this size."""
    flags = (
        "skip_bias_add gather_output is_expert gradient_accumulation_fusion explicit_expert_comm"
    )
    layer = SimpleNamespace(
        **dict.fromkeys([*flags.split(), "disable_grad_reduce"], False),
        commfuse_layer=known_as,
        sequence_parallel=parallel,
        input_is_parallel=True,
        output_size_per_partition=64,
        input_size=64,
        bias=None,
        weight=torch.empty(64, 64, dtype=torch.bfloat16),
        config=SimpleNamespace(cpu_offloading=offloading, defer_embedding_wgrad_compute=False),
    )
    linears = wrappers.LinearWrappers(layers=chosen)
    linears.min_rows = least
    linears.transport = SimpleNamespace(size=size)  # type: ignore[assignment]
    column = known_as in COLUMNS
    wrap = linears.column_forward_wrapper if column else linears.row_forward_wrapper
    wrap(lambda layer, x, *_: (x, None))(layer, x)
    return list(linears.calls)


@pytest.mark.parametrize(
    "line",
    [
        FUSED,
        FUSED.replace("--sequence-parallel", ""),
        LIMITED,
        f"{LIMITED} --commfuse-layers qkv,output",
        f"{FUSED} --tensor-model-parallel-size 1",
        f"{FUSED} --cpu-offloading",
        f"{FUSED} --commfuse-layers qkv,output",
        f"{FUSED} --multi-latent-attention --mtp-num-layers 1",
        f"{FUSED} --num-experts 8 --moe-shared-expert-intermediate-size 64",
    ],
)
def test_reasons_and_operators_are_those_of_the_wrappers(called: list[str], line: str) -> None:
    """Blocks have 96 rows: a sequence of 64 in batches of 3 over two ranks."""
    launch = asked(line)
    size, stands = launch.config.tensor_model_parallel_size, obstacles(launch)
    assert len(stands.layers) > 3
    for layer in stands.layers:
        if layer.layer == "experts":  # no linear layer of the tensor-parallel group
            continue
        called.clear()
        parallel = launch.config.uses_sequence_parallel
        gathers = parallel and layer.layer in COLUMNS
        x = torch.empty(64 // size if gathers else 64, 3, 64, dtype=torch.bfloat16)
        calls = counted(
            layer.layer,
            x,
            size,
            parallel,
            launch.fuse.commfuse_layers,
            stands.least,
            "--cpu-offloading" in line,
        )
        assert calls == [(layer.layer, layer.reason or "fused")]
        assert called == [layer.operator] * bool(layer.operator)
