"""The reasons and operators of a launch's linear layers are those of Megatron's wrapped layers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from commfuse_npu.tools.plan.obstacles import obstacles
from mindspeed_patches import wrappers
from tests.tools.plan.launches import FUSED, LIMITED, asked

COLUMNS = ("qkv", "q_up", "kv_up", "fc1", "shared_fc1", "eh_proj", "output")
FLAGS = (
    *("skip_bias_add", "gather_output", "is_expert", "gradient_accumulation_fusion"),
    *("explicit_expert_comm", "disable_grad_reduce"),
)


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
def test_they_are_those_of_the_wrappers(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """Blocks have 96 rows: a sequence of 64 in batches of 3 over two ranks."""
    called: list[str] = []
    for name in ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce"):
        # In the place of an operator, one that only appends its name.
        monkeypatch.setattr(wrappers, name, lambda x, *_, op=name, **__: called.append(op) or x)
    launch = asked(line)
    size, stands = launch.config.tensor_model_parallel_size, obstacles(launch)
    parallel = launch.config.uses_sequence_parallel
    layers = [layer for layer in stands.layers if layer.layer != "experts"]  # no linear layer
    assert len(layers) > 3
    for name, reason, operator in layers:
        layer = SimpleNamespace(
            **dict.fromkeys(FLAGS, False),
            commfuse_layer=name,
            sequence_parallel=parallel,
            input_is_parallel=True,
            output_size_per_partition=64,
            input_size=64,
            bias=None,
            weight=torch.empty(64, 64, dtype=torch.bfloat16),
            config=SimpleNamespace(
                cpu_offloading="--cpu-offloading" in line, defer_embedding_wgrad_compute=False
            ),
        )
        linears = wrappers.LinearWrappers(layers=launch.fuse.commfuse_layers)
        linears.min_rows = stands.least
        linears.transport = SimpleNamespace(size=size)  # type: ignore[assignment]
        column = name in COLUMNS
        wrap = linears.column_forward_wrapper if column else linears.row_forward_wrapper
        rows = 64 // size if parallel and column else 64
        called.clear()
        wrap(lambda layer, x, *_: (x, None))(layer, torch.empty(rows, 3, 64, dtype=torch.bfloat16))
        assert list(linears.calls) == [(name, reason or "fused")]
        assert called == [operator] * bool(operator)
