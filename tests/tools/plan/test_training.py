"""The simulator's training that corresponds to the options of a launch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from commfuse_npu.tools.plan.launch import ask_about
from commfuse_npu.tools.plan.training import NotSimulated, form_of, training_of
from commfuse_npu.tools.simulate.experts import Experts
from commfuse_npu.tools.simulate.footprint import footprint
from commfuse_npu.tools.simulate.step import Step
from commfuse_npu.tools.simulate.training import Training
from commfuse_npu.tools.simulate.variants import MEGATRON, REFERENCE
from tests.tools.plan.launches import MODEL, SERVER, TP, asked, script

SIZES = f"--nproc_per_node 8 {MODEL} {TP} --swiglu --bf16 --global-batch-size 16"
DENSE = {"dense": 2}
FULL = "--recompute-granularity full --recompute-method"


def training(options: str = "") -> Training:
    return training_of(asked(f"{SIZES} {options}"))


def milliseconds(of: Training) -> float:
    return 1e3 * Step(SERVER.machine(), of).time(MEGATRON)


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ("", [{"dense": 4}]),
        ("--pipeline-model-parallel-size 2", [DENSE, DENSE]),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
         [{"dense": 1}] * 4),
        ("--noop-layers 0,3 --pipeline-model-parallel-size 2", [{"none": 1, "dense": 1}] * 2),
        ("--num-experts 4", [{"experts": 4}]),
        ("--num-experts 4 --first-k-dense-replace 1 --moe-layer-freq 1",
         [{"dense": 1, "experts": 3}]),
        ("--num-experts 4 --moe-layer-freq 2", [{"experts": 2, "dense": 2}]),
        ("--num-experts 4 --moe-layer-freq -1 --first-k-dense-replace -1", [{"experts": 4}]),
    ],
)  # fmt: skip
def test_layers_of_every_chunk(options: str, places: list[dict[str, int]]) -> None:
    assert list(training(options).places) == places


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ("", 0),
        (f"{FULL} uniform --recompute-num-layers 1", 1),
        (f"{FULL} block --recompute-num-layers 1", 1 / 2),
        (f"{FULL} block --recompute-num-layers 1 --num-layers-per-virtual-pipeline-stage 1", 1),
        (f"{FULL} block --recompute-num-layers 1 --num-layers-per-virtual-pipeline-stage 1 "
         "--enable-recompute-layers-per-pp-rank", 1 / 2),
        ("--recompute-granularity selective", 0),
    ],
)  # fmt: skip
def test_how_many_forwards_are_run_again(options: str, share: float) -> None:
    job = training(f"--pipeline-model-parallel-size 2 {options}")
    assert {job.recomputed_share(place) for place in range(len(job.places))} == {share}


def test_experts_take_the_options_of_megatron() -> None:
    line = (
        "--num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 96 --n-shared-experts 2 "
        "--expert-model-parallel-size 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall"
    )
    own = training(f"{line} --expert-tensor-parallel-size 1")
    for tensor, job in ((4, training(line)), (1, own)):
        expected = Experts(8, 3, 96, 192, 2, tensor, grouped=True, gathers=False, halves=2)
        assert job.shape.experts == expected
    assert (own.expert_replicas, own.expert_stride) == (4, 2)
    assert training("--num-experts 8").shape.experts.gathers  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--tp-2d", "--tp-2d: linear layers cut in two dimensions is not simulated"),
        ("--stage dpo", "--stage dpo: "),
        ("--spec mindspeed_llm.tasks.models.spec.mamba_spec layer_spec", "--spec: state-space"),
        ("--num-experts 8 --expert-model-parallel-size 4", "16 ranks of experts, which do not"),
        ("--context-parallel-size 2 --context-parallel-algo hybrid_cp_algo", "hybrid_cp_algo"),
        ("--context-parallel-size 2 --multi-latent-attention --kv-lora-rank 8 --qk-head-dim 8 "
         "--qk-pos-emb-head-dim 8 --v-head-dim 8", "latent attention with context"),
    ],
)  # fmt: skip
def test_what_is_not_simulated_is_named(options: str, said: str) -> None:
    with pytest.raises(NotSimulated, match=said):
        training(options)


def test_time_and_memory_follow_the_options() -> None:
    plain, noop, full = (
        training(options) for options in ("", "--noop-layers 3", f"{FULL} uniform")
    )
    assert milliseconds(noop) < milliseconds(plain) < milliseconds(full)
    each = training("--no-sequence-parallel").parameters_of("dense")[0]

    def bytes_of(of: Training) -> tuple[float, ...]:
        return tuple(footprint(of, MEGATRON, SERVER))[:4]

    weights, gradients, adam, activations = bytes_of(plain)
    assert weights - bytes_of(noop)[0] == 2 * each
    assert gradients == 2 * weights
    assert bytes_of(full)[3] < activations
    assert bytes_of(replace(plain, distributed=False))[2] == adam * plain.layout.dp
    assert bytes_of(replace(plain, reuses=True))[2] == adam * 10 / 12
    assert bytes_of(training("--fp16"))[:2] == (weights, weights)
    needs = footprint(plain, MEGATRON, SERVER)
    state = needs.weights + needs.gradients
    assert needs.first_step == state + max(needs.optimizer / 3 + needs.activations, needs.optimizer)


def test_gradients_that_do_not_overlap_are_exposed() -> None:
    both = training("--overlap-grad-reduce --overlap-param-gather")
    none = replace(both, overlaps=(False, False))
    forms = both, replace(both, overlaps=(False, True)), none, replace(none, distributed=False)
    steps = [Step(SERVER.machine(), form) for form in forms]
    times = [step.time(REFERENCE) - step._optimizer for step in steps]
    assert times == sorted(set(times)), "longer each time"


@pytest.mark.parametrize(
    ("flags", "form"),
    [
        ("", "megatron"),
        ("--use-ascend-mc2", "mc2"),
        ("--use-ascend-coc", "megatron"),  # one slice, MindSpeed's default
        ("--use-ascend-coc --coc-parallel-num 4", "coc-4"),
        ("--use-ascend-coc --coc-fused-kernel", "coc-fused"),
        ("--commfuse-fb-overlap", "commfuse-fb"),
    ],
)
def test_the_form_in_which_a_launch_runs(flags: str, form: str) -> None:
    assert form_of(asked(f"{SIZES} {flags}").options).name == form


def test_variables_of_the_shell_reach_the_script(tmp_path: Path) -> None:
    path = tmp_path / "launch.sh"
    path.write_text(script(f"{MODEL} {TP} --num-layers ${{DEPTH:-4}}"), "utf-8")
    launches = [ask_about(None, [str(path)], variables) for variables in ({}, {"DEPTH": "6"})]
    assert [launch.config.num_layers for launch in launches] == [4, 6]


DEEPSEEK_V3 = (
    "--nproc_per_node 1 --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 "
    "--num-attention-heads 128 --vocab-size 129280 --seq-length 4096 --swiglu --bf16 "
    "--micro-batch-size 1 --global-batch-size 1 --max-position-embeddings 4096 "
    "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
    "--qk-pos-emb-head-dim 64 --v-head-dim 128 --num-experts 256 --moe-router-topk 8 "
    "--moe-ffn-hidden-size 2048 --n-shared-experts 1 --first-k-dense-replace 3 --moe-layer-freq 1 "
    "--moe-grouped-gemm --moe-token-dispatcher-type alltoall"
)


def test_deepseek_v3_has_671_billion() -> None:
    """Latent attention, experts and shared experts; 671 B in arXiv 2412.19437, with embeddings."""
    job = training_of(asked(DEEPSEEK_V3))
    embeddings = 2 * job.model.padded_vocab_size * job.model.hidden_size
    assert sum(job.of_layers(0)) + embeddings == pytest.approx(671e9, rel=1e-3)
