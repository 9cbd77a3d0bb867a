"""What the doctor says beforehand is what the code that runs later does."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from commfuse_npu.tools.doctor.fuse_options import FuseOptions, min_rows_of, schedule_of

from commfuse_npu.tools.doctor import Launch
from commfuse_npu.tools.doctor.launch_checks import check_launch
from commfuse_npu.tools.doctor.layers import (
    ATTENTION_OPERATOR,
    FusedLayer,
    fused_layers,
)
from commfuse_npu.tools.linear_layers import attention_obstacle
from commfuse_npu.tools.model_config import ModelConfig
from mindspeed_patches import refusals, wrappers
from mindspeed_patches.arguments import DEFAULTS, commfuse_options, schedule_for
from mindspeed_patches.attention import AttentionWrappers
from tests.tools.doctor.launches import FUSED, SIZES, launch
from tests.tools.doctor.machines import CONFIG, only


@pytest.mark.parametrize(
    ("words", "level"),
    [
        ("--use-distributed-optimizer --nproc_per_node 2", "note"),
        ("--use-distributed-optimizer --nproc_per_node 1", "warning"),
        ("--nproc_per_node 2", "error"),
    ],
)
def test_launches_are_refused_with_data_parallelism_as_by_features(words: str, level: str) -> None:
    given = argparse.Namespace(
        commfuse_dp=True,
        use_distributed_optimizer="--use-distributed-optimizer" in words,
    )
    with pytest.raises((AssertionError, ValueError)) if level == "error" else nullcontext():
        commfuse_options(given)
        refusals.check_data_parallel(given)
    alone = FUSED.replace("--sequence-parallel", "").replace("parallel-size 2", "parallel-size 1")
    whole = f"{alone} {words} --commfuse-dp"
    found = check_launch(launch(*whole.split()))
    assert only(found, "--commfuse-dp").level == level
    # A tensor-parallel group of one is fine then.
    assert not [f for f in found if f.what == "--tensor-model-parallel-size"]


@pytest.mark.parametrize(
    ("words", "level"),
    [
        ("", "error"),
        ("--commfuse-allow-nothing", "warning"),
        ("--commfuse-allow-nothing --commfuse-attention", "error"),
    ],
)
def test_a_group_of_one_is_refused_unless_nothing_is_allowed(words: str, level: str) -> None:
    alone = f"{FUSED} --tensor-model-parallel-size 1 {words}"
    found = only(check_launch(launch(*alone.split())), "--tensor-model-parallel-size")
    assert found.level == level
    assert "add --commfuse-dp" in found.action


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("--context-parallel-size 1 --context-parallel-algo ulysses_cp_algo", True),
        ("--context-parallel-size 2 --context-parallel-algo megatron_cp_algo", True),
        ("--context-parallel-size 2 --context-parallel-algo ulysses_cp_algo", False),
    ],
)
def test_layouts_are_refused_with_ulysses_as_by_features(words: str, refused: bool) -> None:
    size, algorithm = words.split()[1::2]
    given = argparse.Namespace(
        context_parallel_size=int(size), context_parallel_algo=algorithm, num_attention_heads=8
    )
    with pytest.raises(refusals.IncompatibleOptionsError) if refused else nullcontext():
        refusals.check_ulysses_layout(given)
    alone = f"{FUSED} --tensor-model-parallel-size 1 --attention-dropout 0.0"
    found = check_launch(launch(*f"{alone} {words} --commfuse-ulysses".split()))
    assert only(found, "--commfuse-ulysses").level == ("error" if refused else "note")
    # A tensor-parallel group of one is fine then.
    assert not [f for f in found if f.what == "--tensor-model-parallel-size"]


@pytest.mark.parametrize(
    ("words", "hides"),
    [
        ("", "all-to-alls hide behind attention and its projections;"),
        (
            "--group-query-attention --num-query-groups 1",
            "that of q, k and v does not: 1 query groups are not divisible by CP 2;",
        ),
        (
            "--tensor-model-parallel-size 2",
            "that of q, k and v does not: at TP 2 the weights of the projections are not whole;",
        ),
    ],
)
def test_what_hides_under_ulysses_depends_on_the_layout(words: str, hides: str) -> None:
    layout = "--context-parallel-size 2 --context-parallel-algo ulysses_cp_algo"
    options = f"{FUSED} --tensor-model-parallel-size 1 --attention-dropout 0.0 {layout} {words}"
    found = check_launch(launch(*f"{options} --commfuse-ulysses".split()))
    assert hides in only(found, "--commfuse-ulysses").action


def test_defaults_are_those_of_features() -> None:
    ours = vars(FuseOptions())
    known = {name: DEFAULTS.get(f"commfuse_{name}", DEFAULTS.get(name)) for name in ours}
    assert known == ours


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("--seq-length 256", False),
        ("--seq-length 252", True),
        ("--seq-length 256 --no-sequence-parallel", True),
        ("--seq-length 256 --tensor-model-parallel-size 1", True),
    ],
)
def test_layouts_are_refused_with_a_flow_as_by_features(words: str, refused: bool) -> None:
    size = 1 if "parallel-size" in words else 2
    parallel = "--no-" not in words and size > 1
    given = argparse.Namespace(
        seq_length=int(words.split()[1]),
        tensor_model_parallel_size=size,
        sequence_parallel=parallel,
    )
    with pytest.raises(refusals.IncompatibleOptionsError) if refused else nullcontext():
        refusals.check_flow_layout(given, 4)
    dense = "--attention-dropout 0.0 --hidden-dropout 0.0 --transformer-impl local"
    fused = FUSED if parallel else FUSED.replace("--sequence-parallel", "")
    words = words.replace("--no-sequence-parallel", "")
    found = check_launch(launch(*f"{fused} {dense} {words} --commfuse-flow 4".split()))
    assert only(found, "--commfuse-flow").level == ("error" if refused else "note")


def test_attention_without_proj_is_refused_by_features() -> None:
    given = argparse.Namespace(commfuse_attention=True, commfuse_layers=("qkv",))
    with pytest.raises(ValueError, match="--commfuse-attention needs proj among --commfuse-layers"):
        commfuse_options(given)
    found = check_launch(launch(*f"{FUSED} --commfuse-attention --commfuse-layers qkv".split()))
    assert only(found, "--commfuse-attention").level == "error"


@pytest.mark.parametrize("local", [2, 4, 8])
@pytest.mark.parametrize("schedule", ["auto", "shifted", "two_level"])
def test_schedules_are_those_of_features(monkeypatch, local: int, schedule: str) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    config = ModelConfig.load(CONFIG, ["--nproc_per_node", str(local)])
    for lanes in (1, 3, 16):
        words = f"--commfuse-schedule {schedule} --commfuse-lanes {lanes} --commfuse-chunks 2"
        options = FuseOptions.from_options(words.split())
        chosen = {"commfuse_schedule": schedule, "commfuse_lanes": lanes, "commfuse_chunks": 2}
        given = argparse.Namespace(**DEFAULTS | chosen)
        assert schedule_of(config, options) == schedule_for(given, 8)


def wrapped(monkeypatch, made: Launch) -> tuple[wrappers.LinearWrappers, list[tuple[object, ...]]]:
    """The wrappers of a launch, with operators that only say their name and what they are given."""
    called: list[tuple[object, ...]] = []
    for name in (
        *("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce"),
        "attention_linear_reduce_scatter",
    ):

        def operator(x: torch.Tensor, *others: torch.Tensor, op=name, **__: object):
            called.append((op, tuple(x.shape), tuple(others[0].shape)))
            return x

        monkeypatch.setattr(wrappers, name, operator)
    found = wrappers.LinearWrappers(
        layers=made.fuse.layers,
        min_rows=min_rows_of(
            made.config.tensor_model_parallel_size, made.config.hidden_size, made.fuse
        ),
    )
    tp = made.config.tensor_model_parallel_size
    found.transport = SimpleNamespace(size=tp)  # type: ignore[assignment]
    return found, called


def linear(made: Launch, found: FusedLayer, **others: object) -> SimpleNamespace:
    """A layer as it would arrive at the wrappers."""
    return SimpleNamespace(
        commfuse_layer=found.layer,
        weight=torch.empty(found.weight_shape, dtype=torch.bfloat16),
        bias=None,
        skip_bias_add=False,
        sequence_parallel=made.config.uses_sequence_parallel,
        gather_output=False,
        input_is_parallel=True,
        is_expert=False,
        explicit_expert_comm=False,
        disable_grad_reduce=False,
        gradient_accumulation_fusion=False,
        output_size_per_partition=found.weight_shape[0],
        input_size=found.weight_shape[1],
        config=SimpleNamespace(
            defer_embedding_wgrad_compute=False, cpu_offloading=False, attention_dropout=0.0
        ),
        **others,
    )


def own(layer: SimpleNamespace, x: torch.Tensor, *_: object) -> tuple[torch.Tensor, None]:
    return x, None


@pytest.mark.parametrize(
    "words",
    [
        FUSED,
        f"{SIZES} --use-commfuse --bf16 --commfuse-min-rows 0",
        f"{FUSED} --commfuse-min-rows auto",
        f"{FUSED} --commfuse-min-rows auto --commfuse-chunks 2",
        FUSED.replace("parallel-size 2", "parallel-size 1"),
        f"{FUSED} --commfuse-layers qkv,fc2",
        f"{FUSED} --commfuse-min-rows 97",
        f"{FUSED} --commfuse-min-rows 96",
        f"{SIZES} --use-commfuse --commfuse-layers fc2 --bf16 --commfuse-min-rows 0",
    ],
)
def test_reasons_and_shapes_are_those_of_the_wrappers(monkeypatch, words: str) -> None:
    made = launch(*words.split())
    linears, called = wrapped(monkeypatch, made)
    for found in fused_layers(made):
        called.clear()
        linears.calls.clear()
        column = found.layer in ("qkv", "fc1", "output")
        wrap = linears.column_forward_wrapper if column else linears.row_forward_wrapper
        wrap(own)(linear(made, found), torch.empty(found.input_shape, dtype=torch.bfloat16))
        assert list(linears.calls) == [(found.layer, found.reason or "fused")]
        expected = [(found.operator, found.input_shape, found.weight_shape)]
        assert called == (expected if found.operator else [])


@pytest.mark.parametrize(
    "change",
    [
        "",
        "--sequence-parallel",
        "--sequence-parallel --recompute-granularity selective",
        "--sequence-parallel --recompute-activations",
        "--sequence-parallel --recompute-granularity full",
        "--sequence-parallel --commfuse-min-rows 100",
    ],
)
def test_attention_waits_where_the_wrappers_let_it(monkeypatch, change: str) -> None:
    fused = "--use-commfuse --bf16 --commfuse-attention --commfuse-min-rows 0"
    made = launch(*f"{SIZES} {fused} {change}".split())
    linears, called = wrapped(monkeypatch, made)
    (found,) = [layer for layer in fused_layers(made) if layer.layer == "proj"]
    rows, batch, features = found.input_shape
    heads = made.config.num_attention_heads // made.config.tensor_model_parallel_size
    q = torch.zeros(rows, batch, heads, features // heads, dtype=torch.bfloat16)

    def attend(q: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return q.flatten(2)

    # The attention and its projection in one, as Megatron's arguments would have them.
    layer = linear(
        made,
        found,
        core_attention=SimpleNamespace(forward=attend),
        attn_mask_type="causal",
        checkpoint_core_attention="selective" in change or "activations" in change,
        training=True,
    )
    AttentionWrappers(linears).self_attention_init_wrapper(lambda layer: None)(layer)
    attended = layer.core_attention.forward(q, q, q, None)
    linears.row_forward_wrapper(own)(layer, attended)

    assert [operator for operator, *_ in called] == ([found.operator] if found.operator else [])
    together = found.operator == ATTENTION_OPERATOR
    said = attention_obstacle(made.options) or found.reason or "fused"
    assert linears.calls["attention", said] == 1
    assert together == (said == "fused")
