"""What the options of a launch select, parsed or early, and which wrappers they register."""

import argparse
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commfuse_npu import Schedule
from commfuse_npu.launch.options import LAYERS
from commfuse_npu.ops import LinearOptions
from mindspeed_patches.patching import PatchManager
from mindspeed_patches.training_options import LaunchSettings, register_wrappers
from tests.patches.launches import DATA_PARALLEL, ULYSSES, early, real_arguments, registered

TP8 = {"tensor_model_parallel_size": 8, "micro_batch_size": 1}
LONG = {"seq_length": 32768, **TP8}
DP = {"world_size": 8, **DATA_PARALLEL}
PP = {"pipeline_model_parallel_size": 2, **DP}
MAPPED = {"use_tp_pp_dp_mapping": True, **PP, "world_size": 16}
CHUNKS, UNDER = "linear.schedule.chunks", "ulysses.schedule"
SCHEDULE, OVER, FP32 = "linear.schedule", "data_parallel", torch.float32
LIMITED = "wrappers._limited"


def buckets(shape: Any, lanes: int, node_size: int | None = None) -> LinearOptions:
    return LinearOptions(Schedule(shape, lanes=lanes, node_size=node_size))


CASES: list[tuple[str, dict[str, Any], int, dict[str, Any]]] = [
    # options, other arguments, processes of a node, what they select
    ("", {}, 8,
     {"wrappers.layers": {*LAYERS}, LIMITED: True, "linear.tuning": None,
      SCHEDULE: Schedule("shifted", lanes=1, chunks=1), "wrappers.order_log": None}),
     ("--commfuse-layers qkv,fc1 --commfuse-reduce-dtype float32 "
      "--commfuse-order-log folder", {}, 8,
      {"wrappers.layers": {"qkv", "fc1"}, "linear.reduce_dtype": FP32,
       "wrappers.order_log": "folder"}),
    # Lanes that nothing would use are not created.
    ("--commfuse-lanes 7 --commfuse-chunks 4",
     {"tensor_model_parallel_size": 4}, 8,
     {SCHEDULE: Schedule("shifted", lanes=3, chunks=4), LIMITED: False}),
    # Small blocks stay whole.
    ("", LONG, 8, {CHUNKS: 2, "linear.schedule.lanes": 1}),
    ("", {**LONG, "seq_length": 8192}, 8, {CHUNKS: 1}),
    ("", {**LONG, "seq_length": 8192, "hidden_size": 8192}, 8,
     {CHUNKS: 2, "wrappers._hidden": 8192}),
    ("", {**LONG, "context_parallel_size": 2}, 8, {CHUNKS: 2, "wrappers._rows": 2048}),
    # The machine decides which blocks stay Megatron's, unless chunks are given.
    ("", LONG, 8, {"wrappers._rows": 4096, LIMITED: True}),
    ("--commfuse-chunks 1", LONG, 8, {CHUNKS: 1, LIMITED: False}),
    # Two-level if a group has several ranks on each node, collectives unless lanes are given.
    ("", TP8, 8, {SCHEDULE: Schedule("collective", lanes=1)}),
    ("--commfuse-lanes 7", TP8, 8, {SCHEDULE: Schedule(lanes=7)}),
    ("--commfuse-attention", TP8, 8, {SCHEDULE: Schedule(lanes=7)}),
    ("--commfuse-tuning on", LONG, 8, {SCHEDULE: Schedule(lanes=7), LIMITED: False}),
    ("--commfuse-ulysses", ULYSSES, 8, {UNDER: Schedule(lanes=3)}),
    ("", TP8, 4, {"linear.schedule.shape": "two_level", "linear.schedule.node_size": 4}),
    ("", TP8, 3, {"linear.schedule.shape": "shifted", "linear.schedule.node_size": None}),
    # The ranks of a context-parallel group are as far apart as tensor parallelism is wide.
    ("--commfuse-ulysses --commfuse-lanes 7 --commfuse-chunks 2", ULYSSES, 8,
     {UNDER: Schedule("shifted", lanes=3, chunks=2)}),
    *(("--commfuse-ulysses", ULYSSES, local, {f"{UNDER}.node_size": size})
      for local, size in ((8, None), (4, 2), (2, None), (3, None))),
    # So are those of a data-parallel group, or as far as a whole pipeline is wide.
    ("--commfuse-dp", DP, 2, {OVER: buckets("shifted", 2)}),
    ("--commfuse-dp", DP, 4, {OVER: buckets("two_level", 2, 2)}),
    ("--commfuse-dp", PP, 8, {OVER: buckets("shifted", 1)}),
    ("--commfuse-dp", MAPPED, 8, {OVER: buckets("two_level", 2, 2)}),
    ("--commfuse-dp --commfuse-reduce-dtype float32", DP, 8, {f"{OVER}.reduce_dtype": None}),
    ("--commfuse-dp --commfuse-dp-reduce-dtype float32", DP, 8, {f"{OVER}.reduce_dtype": FP32}),
]  # fmt: skip


@pytest.mark.parametrize("parsed", [real_arguments, early])
@pytest.mark.parametrize(("options", "others", "local", "expected"), CASES)
def test_what_options_ask_for(monkeypatch, options, others, local, expected, parsed: Any) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    args = parsed(*options.split(), **others)
    settings = LaunchSettings(args)
    settings.check()
    chosen = SimpleNamespace(
        linear=settings.of_linear_layers(),
        ulysses=settings.of_ulysses(),
        data_parallel=settings.of_buckets(),
        wrappers=register_wrappers(PatchManager(), settings)[0],
    )
    assert {name: attrgetter(name)(chosen) for name in expected} == expected


def test_what_the_environment_says(monkeypatch) -> None:
    """The size of a job before its process group exists, and the user's cache."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    settings = LaunchSettings(early("--commfuse-dp", "--commfuse-tuning", "on", **DATA_PARALLEL))
    assert settings.of_buckets() == buckets("shifted", 2)
    tuning = settings.of_linear_layers().tuning
    assert tuning is not None
    assert tuning.folder == "/somewhere/commfuse_npu"


@pytest.mark.parametrize(
    ("options", "size", "users"),
    [
        ("", None, 1),
        ("--commfuse-attention", 2, 1),
        ("--commfuse-ulysses", 2, 2),
        ("--commfuse-ulysses", None, 1),
        # Lanes of layers, of gradients and of parameters.
        ("--commfuse-dp", 2, 3),
        ("--commfuse-dp", 1, 2),
    ],
)
def test_lanes_are_made_with_megatrons_groups(options: str, size: int | None, users: int) -> None:
    layout = ULYSSES if "ulysses" in options else {"attention_dropout": 0.0, **DATA_PARALLEL}
    sizes = layout | {"tensor_model_parallel_size": size}
    wrappers = registered(real_arguments(*options.split(), transformer_impl="local", **sizes))
    assert len(wrappers["megatron.core.parallel_state.initialize_model_parallel"]) == users


LLAMA3_8B = {"seq_length": 8192, "hidden_size": 4096, "bf16": True, **TP8}
TP2 = {"tensor_model_parallel_size": 2, "bf16": False}
CONTEXT = {"micro_batch_size": 16, "context_parallel_size": 2}
OVERLAPPED = {"overlap_grad_reduce": True}


@pytest.mark.parametrize(
    ("group", "change", "megabytes"),
    [
        ("tp", {}, 64),  # 8 blocks of 8 MB
        ("tp", {"commfuse_lanes": 7, "micro_batch_size": 5}, 64),  # 40 MB
        ("tp", TP2, 64),
        ("tp", {**TP2, "fp16": True}, 32),
        ("tp", {"micro_batch_size": 100}, 200),
        ("tp", {"hidden_size": None}, None),
        ("tp", {"seq_length": None}, None),
        ("cp", CONTEXT, 32),
        ("dp_cp", OVERLAPPED, 32),  # 40 million fp32 gradients over 8 ranks are 19 MiB
        ("dp_cp", {**OVERLAPPED, "ddp_bucket_size": 400_000_000}, 200),
        ("dp_cp", {**OVERLAPPED, "pipeline_model_parallel_size": 2}, 64),
        ("dp_cp", {**OVERLAPPED, "tensor_model_parallel_size": 64}, None),
        ("dp_cp", {}, None),  # all gradients are one bucket
    ],
)
def test_lanes_are_sized_to_their_messages(monkeypatch, group, change, megabytes) -> None:
    monkeypatch.setenv("WORLD_SIZE", "64")
    sizes = LaunchSettings(argparse.Namespace(**{**LLAMA3_8B, **change}))
    assert sizes.buffer_megabytes(group) == megabytes
