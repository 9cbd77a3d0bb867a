"""The hooks of the feature: what a launch needs, and what is registered."""

import argparse
import re
import sys
import types
from typing import Any
from unittest import mock

import pytest
import torch

from commfuse_npu.launch.refusals import IncompatibleOptionsError
from mindspeed_patches.fb_overlap import Overlapping
from mindspeed_patches.feature import CommFuseFeature
from mindspeed_patches.patching import PatchManager
from mindspeed_patches.training_options import LaunchSettings, register_wrappers
from tests.patches.launches import (
    DATA_PARALLEL,
    ULYSSES,
    Registered,
    early,
    real_arguments,
    registered,
)

ALONE = {"tensor_model_parallel_size": 1}
NO_CP = {"context_parallel_size": 1}
TP = "--tensor-model-parallel-size"
CP, DP = "--commfuse-ulysses", "--commfuse-dp"
UNFUSED = ALONE | DATA_PARALLEL | {"attention_dropout": 0.0}
UNUSED = {"use_commfuse": False, **ULYSSES, **DATA_PARALLEL}


@pytest.mark.parametrize(
    ("options", "others", "message"),
    [
        ("", ALONE, f"--use-commfuse needs {TP} of at least 2: .*; choose that, add --commfuse-dp"),
        (f"{DP} --commfuse-attention", UNFUSED, f"--commfuse-attention needs {TP} of at least 2"),
        (DP, {}, "--commfuse-dp needs --use-distributed-optimizer: .+; add it, or leave"),
        (CP, ULYSSES | NO_CP, "needs --context-parallel-size of at least 2"),
        (CP, ULYSSES | {"context_parallel_algo": "hybrid_cp_algo"}, "not hybrid_cp_algo: .+; cho"),
        (CP, ULYSSES | {"num_attention_heads": 12}, "choose sizes whose product divides 12"),
        (CP, ULYSSES | {"seq_length": 66}, "divisible by --context-parallel-size 4; choose 68"),
        (CP, UNUSED, f"{CP} needs --use-commfuse, .+; add"),
        (DP, UNUSED, f"{DP} needs --use-commfuse, .+; add"),
        ("--commfuse-attention", UNUSED, "--commfuse-attention needs --use-commfuse, .+; add"),
        ("--commfuse-wgrad blocks", {}, "-wgrad was removed: a weight gradient is one GEMM"),
        ("--commfuse-taper 0.5", {}, "-taper was removed: all chunks of a block have one length"),
        ("--commfuse-tuning on --commfuse-chunks 4", {}, "-chunks 4 .* leave one or the other out"),
        ("--commfuse-attention --commfuse-layers qkv,fc1", {}, "needs proj .* qkv,fc1: .*; add it"),
        ("--commfuse-lanes 0", {}, "argument --commfuse-lanes: '0' is not a whole number from 1"),
        ("--commfuse-layers qkv,fc3", {}, "-layers: 'fc3' is unknown; choose from"),
        ("--commfuse-layers ,", {}, "-layers: ',' is an empty list; give one word at least"),
    ],
)
def test_what_is_refused(options: str, others: dict[str, Any], message: str, capsys) -> None:
    with pytest.raises((IncompatibleOptionsError, ValueError, SystemExit)) as caught:
        CommFuseFeature().validate_args(real_arguments(*options.split(), **others))
    assert re.search(message, f"{caught.value}{capsys.readouterr().err}")


@pytest.mark.parametrize(("option", "others"), [(CP, ULYSSES), (DP, DATA_PARALLEL)])
def test_what_needs_no_tensor_parallelism(option: str, others: dict[str, Any]) -> None:
    CommFuseFeature().validate_args(real_arguments(option, **ALONE, **others))


def test_overlap_wraps_schedules_and_checkpoints_unless_refused() -> None:
    feature, manager, names = CommFuseFeature(), Registered(), argparse.Namespace
    parser = argparse.ArgumentParser()
    feature.register_args(parser)
    assert not feature.is_need_apply(parser.parse_args([]))
    args = parser.parse_args(["--commfuse-overlap", "--commfuse-order-log", "a folder"])
    assert feature.is_need_apply(args)
    with mock.patch("mindspeed_patches.feature.Overlapping", wraps=Overlapping) as made:
        feature.register_patches(manager, args)
    assert made.call_args.kwargs["order_log"] == "a folder"
    assert made.call_args.kwargs["alone"] is None
    pipeline = {"commfuse_overlap": True, "pipeline_model_parallel_size": 4}
    schedules = "megatron.core.pipeline_parallel.schedules"
    wrapped = {path.rpartition("tensor_parallel.")[2] for path in manager}
    assert wrapped == {
        *(f"{schedules}.{name}" for name in ("forward_step", "backward_step")),
        f"{schedules}.get_forward_backward_func",
        "random.CheckpointFunction.forward",
        "layers.RowParallelLinear.forward",
        "layers.LinearWithGradAccumulationAndAsyncCommunication.backward",
        "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup."
        "register_grad_ready",
    }
    for more in ({"commfuse_overlap_memory": 1}, {"virtual_pipeline_model_parallel_size": 2}):
        feature.validate_args(names(**pipeline, **more))
    with mock.patch("mindspeed_patches.feature.Overlapping") as made:
        feature.register_patches(manager, names(**pipeline, stage="dpo"))
    said = "--stage dpo: it has a pipeline schedule of its own"
    assert made.call_args.kwargs["alone"] == said
    with pytest.warns(FutureWarning, match="--commfuse-fb-overlap is now --commfuse-overlap"):
        assert parser.parse_args(["--commfuse-fb-overlap"]).commfuse_overlap
    for option, name, value in (
        ("--use-nanopipe", "use_nanopipe", True),
        ("--optimization-level", "optimization_level", 1),
    ):
        message = f"commfuse-overlap and {option} exclude"
        for refuse in (feature.validate_args, lambda args: feature.register_patches(manager, args)):
            with pytest.raises(IncompatibleOptionsError, match=message):
                refuse(names(**pipeline, **{name: value}))
        feature.validate_args(names(**{name: value}))


SIZES = {"seq_length": 8192, "micro_batch_size": 1, "hidden_size": 4096, "bf16": True}


def test_the_lanes_know_their_buffers_and_where_to_record() -> None:
    args = early("--commfuse-order-log", "a folder", **SIZES)
    _, (lanes,), _ = register_wrappers(PatchManager(), LaunchSettings(args))
    assert (lanes.buffer_megabytes, lanes.order_log) == (32, "a folder")


NORM_LAYERS = "mindspeed.te.pytorch.module.layernorm_column_parallel_linear"
NORM_COLUMN = "TELayerNormColumnParallelLinear"


@pytest.mark.parametrize(
    ("engine", "there", "layer"),
    [
        ("transformer_engine", True, f"MindSpeed{NORM_COLUMN}"),
        ("transformer_engine", True, NORM_COLUMN),  # MindSpeed's branch for Megatron core 0.16
        ("transformer_engine", True, ""),
        ("local", True, ""),
        ("local", False, ""),
    ],
)
def test_what_is_wrapped_where_its_modules_are(monkeypatch, engine, there, layer) -> None:
    """The layer with norm is wrapped with its engine, get_model where Megatron's training is."""
    layers = types.ModuleType(NORM_LAYERS)
    setattr(layers, layer or "Other", object)
    monkeypatch.setitem(sys.modules, NORM_LAYERS, layers)
    monkeypatch.setattr("mindspeed_patches.feature._has_module", lambda name: there)
    wrappers = registered(real_arguments(transformer_impl=engine))
    wrapped = [path for path in wrappers if path.startswith(NORM_LAYERS)]
    assert wrapped == ([f"{NORM_LAYERS}.{layer}.__init__"] if layer else [])
    assert ("megatron.training.training.get_model" in wrappers) == there


def test_mindspeeds_accumulation_is_handed_to_the_npu_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from commfuse_npu.kernels import npu, use_matmul_add

    calls: list[list[int]] = []
    ops = types.ModuleType("mindspeed.ops.npu_matmul_add")
    ops.npu_matmul_add_fp32 = lambda *tensors: calls.append(list(map(id, tensors)))
    monkeypatch.setitem(sys.modules, "mindspeed.ops.npu_matmul_add", ops)
    args = real_arguments(transformer_impl="local")
    x, grad = torch.ones(4, 3, dtype=torch.bfloat16), torch.ones(4, 2, dtype=torch.bfloat16)
    total = torch.zeros(2, 3)
    try:
        for folder in ("", "/usr/local/Ascend/nnal/atb"):
            assert not calls, "it could not be compiled"
            monkeypatch.setenv("ATB_HOME_PATH", folder)
            CommFuseFeature().register_patches(PatchManager(), args)
            npu.accumulate_weight_gradient(total, grad, x)
        assert "ATB_HOME_PATH is unset" in caplog.text
        # This MindSpeed has nothing for 16 bits.
        npu.accumulate_weight_gradient(total.bfloat16(), grad, x)
        # Input first, as in Megatron's extension.
        assert calls == [[id(x), id(grad), id(total)]]
    finally:
        use_matmul_add()
