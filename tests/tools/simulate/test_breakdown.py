"""What a step consists of, and its FLOP."""

import pytest

from commfuse_npu.tools.plan.asked_launch import training_of
from commfuse_npu.tools.simulate.step import StepParts, TrainingStep
from commfuse_npu.tools.simulate.training import Training
from commfuse_npu.tools.simulate.variants import COMPUTE_ONLY, MEGATRON, Variant, forms
from tests.tools.plan.launches import EXPERTS, MODEL, SERVER, ULYSSES, asked

MANY = f"{MODEL} --npus-per-node 8 --global-batch-size 32"
TP = "--tensor-model-parallel-size 2 --sequence-parallel"
STAGES = "--pipeline-model-parallel-size 4"
KINDS = "tp", "cp", "ep", "dp", "pp"


def training(options: str) -> Training:
    return training_of(asked(f"{MANY} {options}"))


def parts(job: Training, form: Variant) -> StepParts:
    return TrainingStep(SERVER.launching(1e-6).machine(), job).breakdown(form)


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ("--npus-per-node 1", set()),
        ("", {"dp"}),
        (f"{TP} --context-parallel-size 4", {"tp", "cp", "dp"}),
        (f"{TP} {ULYSSES.replace('2', '4', 1)}", {"tp", "cp", "dp"}),
        (f"{EXPERTS} --moe-token-dispatcher-type alltoall", {"ep", "dp"}),
        (f"{TP} {STAGES} --npus-per-node 8", {"tp", "pp"}),
        (f"{STAGES} --npus-per-node 4 --recompute-granularity full --recompute-method uniform",
         {"pp"}),
    ],
)  # fmt: skip
def test_parts_are_those_of_the_groups(options: str, kinds: set[str]) -> None:
    job = training(options)
    found = parts(job, MEGATRON)
    assert {kind for kind in KINDS if getattr(found, kind) > 0} == kinds
    assert (found.bubble > 0) == ("pp" in kinds)
    assert min(found) >= 0


CHUNKS = f"{STAGES} --num-layers-per-virtual-pipeline-stage 1 --num-layers 8"


@pytest.mark.parametrize("stages", ["", STAGES, CHUNKS])
def test_parts_of_every_form_sum_to_its_time(stages: str) -> None:
    job = training(f"{TP} {stages}")
    host = []
    for launch_seconds in 1e-6, 1e-3:
        machine = SERVER.launching(launch_seconds).machine()
        step = TrainingStep(machine, job)
        found = {form: step.breakdown(form) for form in forms(machine, job)}
        for form, of_form in found.items():
            assert sum(of_form) == pytest.approx(step.time(form))
            assert of_form.computation == pytest.approx(found[MEGATRON].computation, rel=0.02)
        host.append([of_form.host for of_form in found.values()])
    assert max(host[0]) < 0.1 < min(host[1])


def test_a_bubble_is_that_of_equal_stages() -> None:
    """1F1B: (p - 1) of the m + p - 1 forwards and backwards."""
    job = training(f"{STAGES} --npus-per-node 4 --padded-vocab-size 1")
    found = parts(job, COMPUTE_ONLY)
    step = TrainingStep(SERVER.launching(1e-6).machine(), job)
    assert found.tp == found.cp == found.ep == found.dp == 0
    optimizer = step.machine.memory(job.parameters(0)[0] * 30)
    each = (found.computation - optimizer) / job.micro_batches
    assert found.bubble == pytest.approx(3 * each, rel=0.01)


def test_flops_are_those_of_the_published_formula() -> None:
    """Narayanan and others, 2021, without recomputation and with causal attention."""
    job = training("--vocab-size 1024")
    layers, h, s, v = 4, 4096, 8192, 1024
    assert job.tokens == 32 * s
    published = 72 * 32 * s * layers * h**2 * (1 + s / (12 * h) + v / (12 * layers * h))
    assert job.flops == pytest.approx(published)
    # Gated and grouped, 3 products of the feed-forward part; experts instead of it.
    grouped = "--swiglu --group-query-attention --num-query-groups 4 --ffn-hidden-size 8192"
    width = h * (1.5 * h + h) + s * h
    for more, layer in (
        ("", 3 * h * 8192),
        ("--num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 512 "
         "--moe-shared-expert-intermediate-size 256", 3 * h * (3 * 512 + 256)),
    ):  # fmt: skip
        found = training(f"--vocab-size 1024 {grouped} {more}")
        assert found.flops == pytest.approx(6 * found.tokens * (layers * (width + layer) + h * v))
    # Attention of 16 latent heads; a layer without operation has none.
    latent = (
        "--multi-latent-attention --kv-lora-rank 64 --qk-head-dim 128 --qk-pos-emb-head-dim 32 "
        "--v-head-dim 96 --noop-layers 0"
    )
    narrow = h * (16 * 160 + 64 + 32 + 16 * 96) + 64 * 16 * (128 + 96) + s * 16 * (160 + 96) / 2
    found = training(f"--vocab-size 1024 {latent}")
    assert found.flops == 6 * found.tokens * (3 * (narrow + 8 * h * h) + h * v)
