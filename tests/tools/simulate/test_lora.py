"""LoRA: frozen weights and their adapters, beside autograd's products and published memory."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from commfuse_npu.tools.hardware.machine import ITEM_BYTES
from commfuse_npu.tools.plan.asked_launch import roughly, training_of
from commfuse_npu.tools.simulate import llama
from commfuse_npu.tools.simulate.attention_layers import Latent
from commfuse_npu.tools.simulate.engine import Links, Operation
from commfuse_npu.tools.simulate.experts import Experts
from commfuse_npu.tools.simulate.footprint import footprint
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.lora import Lora
from commfuse_npu.tools.simulate.passes import Layers, take_turns
from commfuse_npu.tools.simulate.rank import Rank, simulate
from commfuse_npu.tools.simulate.step import TrainingStep
from commfuse_npu.tools.simulate.training import Training
from commfuse_npu.tools.simulate.variants import COC, COMPUTE_ONLY, MC2, MEGATRON, OVERLAP
from tests.tools.plan.launches import SERVER, asked
from tests.tools.simulate.machines import ideal, sent

TOKENS, HIDDEN, WIDTH, R = 64, 32, 48, 2
NAMES = "qkv", "proj", "fc1", "fc2"
ALL = frozenset(f"linear_{name}" for name in NAMES)
SHAPE = LayerShape(TOKENS, TOKENS, 1, HIDDEN, WIDTH, 3 * HIDDEN, 128, 1, halves=1)
EXPERTS = Experts(number=8, each=2, width=24, shared=0, parallel=4, tensor=1, halves=1)
PASSES = llama.forward, llama.backward


def flops(shape: LayerShape) -> list[float]:
    """FLOP of a layer without attention, forward and backward."""
    links = Links(ideal(attention_efficiency=math.inf), shape.ranks)
    builds = (partial(part, shape=shape) for part in PASSES)
    return [simulate(links, COMPUTE_ONLY, build).device for build in builds]


def more(shape: LayerShape, than: LayerShape) -> list[float]:
    """Further FLOP of a layer, forward and backward."""
    return [ours - theirs for ours, theirs in zip(flops(shape), flops(than), strict=True)]


def operations(shape: LayerShape, part: Callable[[Rank, LayerShape], None]) -> list[Operation]:
    rank = Rank(Links(ideal(), shape.ranks), 0, MEGATRON)
    part(rank, shape)
    return rank.finish()


def autograd(names: frozenset[str]) -> list[int]:
    """FLOP that torch counts in the layers' forward and backward, weights frozen."""
    sizes = {"qkv": (HIDDEN, 3 * HIDDEN), "proj": (HIDDEN, HIDDEN),
             "fc1": (HIDDEN, WIDTH), "fc2": (WIDTH, HIDDEN)}  # fmt: skip
    counted = [0, 0]
    for name, (inputs, outputs) in sizes.items():
        x = torch.randn(TOKENS, inputs, requires_grad=True)
        weight = torch.randn(outputs, inputs)
        a = torch.randn(R, inputs, requires_grad=True)
        b = torch.randn(outputs, R, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            y = x @ weight.t()
            if f"linear_{name}" in names:
                y = y + x @ a.t() @ b.t()
        counted[0] += counter.get_total_flops()
        with FlopCounterMode(display=False) as counter:
            y.sum().backward()
        counted[1] += counter.get_total_flops()
    return counted


@pytest.mark.parametrize("targets", [ALL, frozenset(), frozenset({"linear_qkv", "linear_fc2"})])
def test_products_are_those_of_autograd(targets: frozenset[str]) -> None:
    assert flops(replace(SHAPE, lora=Lora(R, targets))) == autograd(targets)


def test_many_rows_are_multiplied_by_one_merged_weight() -> None:
    lora = Lora(R, frozenset({"linear_fc1"}), fused=True)
    shape = replace(SHAPE, lora=lora)
    frozen = Lora(R, frozenset())
    weight = HIDDEN * WIDTH
    # x A^T and B A; then B's dgrad, the gradients of B and A, and B A again.
    merged = [TOKENS * HIDDEN + weight, TOKENS * (2 * WIDTH + HIDDEN) + weight]
    assert more(shape, replace(shape, lora=frozen)) == [2 * R * size for size in merged]
    # With fewer rows than inputs, and with weights of 4 bits, two products are added.
    few = replace(shape, sequence=HIDDEN // 2)
    quantized = replace(shape, lora=replace(lora, quantized=True))
    for added in few, quantized:
        size = 2 * added.rows * R * (HIDDEN + WIDTH)
        assert more(added, replace(added, lora=frozen)) == [size, 2 * size]


NARROW = Latent(heads=8, queries=12, keys=10, own=4, rotary=2, value=4)


@pytest.mark.parametrize(
    ("shape", "widths"),
    [
        # qkv and proj; fc1 and fc2 of two experts for each token.
        (replace(SHAPE, experts=EXPERTS), 6 * HIDDEN + 2 * 2 * (HIDDEN + 24)),
        # The narrow product, proj, and the feed-forward part.
        (replace(SHAPE, latent=NARROW), HIDDEN + 24 + 2 * HIDDEN + 2 * (HIDDEN + WIDTH)),
    ],
)
def test_experts_and_latent_attention_have_adapters(shape: LayerShape, widths: int) -> None:
    frozen, adapted = (replace(shape, lora=Lora(R, of)) for of in (frozenset(), ALL))
    size = 2 * TOKENS * R * widths
    assert more(adapted, frozen) == [size, 2 * size]
    saved = more(shape, frozen)
    assert saved[0] == 0 < saved[1]
    assert not [o.name for o in operations(adapted, llama.backward) if "wgrad" in o.name]


@pytest.mark.parametrize("fused", [False, True])
def test_a_backward_gathers_narrow_columns_only(fused: bool) -> None:
    split = replace(SHAPE, ranks=4, lora=Lora(R, ALL, fused))
    block = TOKENS // 4 * ITEM_BYTES * 3  # of a column, to each other rank
    # Gathers of proj and fc2 and sums of qkv and fc1; both of the adapters of qkv and fc1.
    assert sent(operations(split, llama.backward)) == 4 * HIDDEN * block + 4 * R * block


@pytest.mark.parametrize("fused", [False, True])
def test_fused_rows_transfer_inside_of_mc2s_kernels(fused: bool) -> None:
    shape = LayerShape(TOKENS, TOKENS, 1, 1024, 2048, 3072, 128, 4, lora=Lora(R, ALL, fused))
    wide = 1024 * TOKENS // 4 * ITEM_BYTES * 3
    # Of qkv, proj, fc1 and fc2, each way; in a kernel no other pass takes over.
    rank = Rank(Links(ideal(), 4), 0, OVERLAP)
    take_turns(rank, [Layers(shape, 1)], True, True)
    narrow = 8 * R * TOKENS // 4 * ITEM_BYTES * 3
    assert sent(rank.operations) == (4 if fused else 8) * wide + narrow
    names = {o.name for part in PASSES for o in operations(shape, part) if o.sends}
    assert ("fc2 scatter" in names) != fused
    # Kernels of one function cost the host less than operations of their own.
    host = {
        of: sum(o.launches for o in operations(replace(shape, lora=Lora(R, ALL, of)), PASSES[0]))
        for of in (False, True)
    }
    assert host[True] < host[False]


# ------------------------------------------------------------------- launches

LLAMA2 = (
    "--nproc_per_node 1 --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 "
    "--num-attention-heads 32 --seq-length 4096 --micro-batch-size 4 --global-batch-size 32 "
    "--vocab-size 32000 --make-vocab-size-divisible-by 1 --untie-embeddings-and-output-weights "
    "--swiglu --bf16 --stage sft --lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2"
)
QWEN3 = (
    "--nproc_per_node 2 --num-layers 1 --hidden-size 4096 --ffn-hidden-size 12288 "
    "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128 "
    "--seq-length 4096 --micro-batch-size 1 --global-batch-size 8 --padded-vocab-size 151936 "
    "--untie-embeddings-and-output-weights --tensor-model-parallel-size 2 --sequence-parallel "
    "--swiglu --bf16 --lora-r 8 --lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2"
)
MIXTRAL = (
    "--nproc_per_node 8 --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 "
    "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --num-experts 8 "
    "--moe-router-topk 1 --moe-token-dispatcher-type alltoall_seq --seq-length 32768 "
    "--micro-batch-size 1 --global-batch-size 8 --padded-vocab-size 32000 "
    "--untie-embeddings-and-output-weights --tensor-model-parallel-size 2 --sequence-parallel "
    "--pipeline-model-parallel-size 2 --use-distributed-optimizer --swiglu --bf16 --lora-r 8 "
    "--lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2"
)


def state(job: Training) -> float:
    """MiB of weights, gradients and optimizer states."""
    return sum(footprint(job, MEGATRON, SERVER)[:3]) / 2**20


@pytest.mark.parametrize(
    ("launch", "reported", "tolerance"),
    [
        (LLAMA2, 13431.6, 1e-3),
        (QWEN3, 1376.5, 1e-2),
        (MIXTRAL, 22639.4, 1e-2),
        (f"{LLAMA2} --qlora", 4360.6, 3e-2),
    ],
)
def test_memory_is_what_npus_reported(launch: str, reported: float, tolerance: float) -> None:
    """MiB after a step in MindSpeed-LLM's own tests (tune_*lora*.json)."""
    assert state(training_of(asked(launch))) == pytest.approx(reported, rel=tolerance)


def test_a_launch_trains_adapters_only() -> None:
    job = training_of(asked(f"{LLAMA2} --lora-r 8 --lora-fusion"))
    assert job.shape.lora == Lora(8, ALL, fused=True)
    # A and B of qkv, proj, fc1 and fc2.
    each = 8 * (4 * 4096 + 2 * 4096 + (4096 + 2 * 11008) + (11008 + 4096))
    assert job.parameters(0, trained=True) == (32 * each, 0)
    assert not roughly(asked(LLAMA2).options)
    full = replace(job, shape=replace(job.shape, lora=None))
    assert full.parameters(0, trained=True) == full.parameters(0) == job.parameters(0)
    # No weight gradient waits in a queue.
    waits = [
        footprint(of, OVERLAP, SERVER).activations - footprint(of, MEGATRON, SERVER).activations
        for of in (full, job)
    ]
    h, f, rows = 4096, 11008, 4 * 4096
    assert waits[0] - waits[1] == 2 * rows * (4 * h + 2 * h + h + 2 * f + f + h)


def test_frozen_gradients_are_neither_reduced_nor_stepped() -> None:
    replicas = LLAMA2.replace("node 1", "node 8")
    job = training_of(asked(f"{replicas} --lora-fusion --use-distributed-optimizer"))
    full = replace(job, shape=replace(job.shape, lora=None))
    machine = SERVER.machine()
    ours, theirs = (TrainingStep(machine, of).breakdown(MEGATRON) for of in (job, full))
    assert 0 < ours.dp < 0.05 * theirs.dp
    assert ours.computation < 0.85 * theirs.computation


@pytest.mark.parametrize("fused", [False, True])
def test_fused_adapters_leave_other_forms_no_effect(fused: bool) -> None:
    """Their function takes the weight, and does not call the layer."""
    job = training_of(asked(f"{QWEN3} {'--lora-fusion' if fused else ''}"))
    step = TrainingStep(SERVER.machine(), job)
    plain, *others = (step.layer_time(form).seconds for form in (MEGATRON, *COC, MC2))
    assert (set(others) == {plain}) == fused


def test_the_host_prepares_samples_while_the_device_waits() -> None:
    stages = f"{LLAMA2} --nproc_per_node 4 --pipeline-model-parallel-size 4".replace(
        " 1 ", " 4 ", 1
    )
    padded, unpadded, plain = (
        training_of(asked(line))
        for line in (
            stages,
            f"{stages} --no-pad-to-seq-lengths",
            stages.replace("--stage sft", ""),
        )
    )
    machine = SERVER.machine()
    steps = [TrainingStep(machine, of).time(MEGATRON) for of in (plain, padded, unpadded)]
    assert steps == sorted(set(steps))
    # Four stages and seven more micro-batches, one after the other.
    assert steps[1] - steps[0] == pytest.approx((4 + 7) * 13 * machine.launch_overhead)
    free = replace(machine, launch_overhead=0.0)
    without = [TrainingStep(free, of).time(MEGATRON) for of in (plain, padded)]
    assert without[0] == without[1]
