"""Whole steps: pipelines, buckets, memory."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_npu.plan import Schedule
from commfuse_npu.tools.config_file import ConfigError
from commfuse_npu.tools.hardware.description import Hardware
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate import step as step_module
from commfuse_npu.tools.simulate.engine import Links
from commfuse_npu.tools.simulate.footprint import Footprint, footprint
from commfuse_npu.tools.simulate.pipeline import one_forward_one_backward
from commfuse_npu.tools.simulate.rank import collective_seconds
from commfuse_npu.tools.simulate.step import TrainingStep, buckets, exposed_end
from commfuse_npu.tools.simulate.training import Layout, training
from commfuse_npu.tools.simulate.variants import (
    COC,
    COMPUTE_ONLY,
    MEGATRON,
    OVERLAP,
    OVERLAP_MEMORY,
    REFERENCE,
    Variant,
    forms,
    fused,
)

CONFIGS = Path(__file__).parents[3] / "configs"
SERVER = Hardware.load(CONFIGS / "hardware" / "ascend_910b_server.yaml")
LLAMA = ModelConfig.load(CONFIGS / "llama3_70b.yaml")


times, few = st.floats(0.1, 10), st.integers(1, 4)


@settings(max_examples=25, deadline=None)
@given(f=times, b=times, stages=st.integers(2, 8), chunks=few, rounds=few)
def test_equal_stages_take_the_closed_form(f, b, stages: int, chunks: int, rounds: int) -> None:
    """Interleaved chunks divide the bubble."""
    places, batches = stages * chunks, stages * rounds
    parts = [f / chunks] * places, [b / chunks] * places
    ends = one_forward_one_backward(*parts, batches, chunks=chunks)
    assert max(ends) == ends[0] == pytest.approx((batches + (stages - 1) / chunks) * (f + b))
    # Every chunk is sent on: a micro-batch alone goes around the stages and back.
    apart = one_forward_one_backward(*parts, stages, 1.0, chunks)
    assert max(apart) >= max(one_forward_one_backward(*parts, stages, chunks=chunks))
    assert max(apart) >= f + b + 2 * (places - 1)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(times, times), min_size=1, max_size=6), st.integers(1, 12), st.floats(0, 2)
)
def test_a_pipeline_is_bounded_by_its_slowest_stage(stages, batches: int, transfer: float) -> None:
    forward, backward = zip(*stages, strict=True)
    time = max(one_forward_one_backward(forward, backward, batches, transfer))
    slowest = max(f + b for f, b in stages) * batches
    latency = sum(f + b for f, b in stages) + 2 * transfer * (len(stages) - 1)
    assert time >= max(slowest, latency) * (1 - 1e-9)
    if batches == 1:
        assert time == pytest.approx(latency)
    assert time >= max(one_forward_one_backward(forward, backward, batches))


def test_a_layout_that_does_not_fit_is_explained() -> None:
    uneven = replace(SERVER, npus_per_node=6)
    with pytest.raises(ConfigError, match=r"8192 is not divisible by TP\*CP = 8\*3 = 24"):
        training(LLAMA, Layout(8, 3, 1, 4), 8192, micro_batches=4)
    with pytest.raises(ValueError, match="of 8 spans nodes of 6 NPUs; choose at most 6"):
        forms(uneven.machine(), training(LLAMA, Layout(8, 1, 1, 4), 8192))


def test_only_the_last_bucket_is_exposed_when_the_link_keeps_up() -> None:
    layers = [(30e6, float(number), 0.0) for number in range(5)]
    for ranks, numbers in (4, [[4, 3], [2, 1], [0]]), (100, [[4, 3, 2, 1], [0]]):
        assert [[forward for _, forward, _ in b] for b in buckets(layers, ranks)] == numbers
    assert exposed_end([5.0] * 3, [3.0] * 3) == 3.0
    # A slow link: all transfers are exposed, less what the layers hide.
    assert exposed_end([1.0] * 3, [3.0] * 3) == 1 + 9 - 3


def test_the_tables_of_the_vocabulary_are_exchanged_too() -> None:
    tied = replace(LLAMA, untie_embeddings_and_output_weights=False)
    jobs = (
        training(model, Layout(8, 1, 2, 1), 8192, micro_batches=4)
        for model in (LLAMA, tied, replace(LLAMA, vocab_size=8))
    )
    free = {"launch_overhead": 0.0, "post_overhead": 0.0, "event_overhead": 0.0}
    machine = replace(SERVER.machine(), **free)
    steps = [TrainingStep(machine, replace(job, overlaps=(False, False))) for job in jobs]
    both, single, none = (step.breakdown(REFERENCE) for step in steps)
    # The output layer's table has a bucket of its own, of fp32 gradients and bf16 parameters.
    table = steps[0].training.table
    links = Links(machine, 2, stride=8)
    bucket = sum(collective_seconds(links, size * math.ceil(table / 2)) for size in (4, 2))
    assert both.dp - single.dp == pytest.approx(bucket)
    assert single.dp > none.dp
    # A rank's half of the output layer has moments of its own.
    assert both.computation - single.computation == pytest.approx(machine.memory(table / 2 * 30))


def test_a_host_ahead_lengthens_no_transfer_of_another_group() -> None:
    ulysses = replace(LLAMA, context_parallel_algo="ulysses_cp_algo")
    job = training(ulysses, Layout(8, 2, 1, 1), 8192, micro_batch=1, micro_batches=1)
    hosts = (SERVER.launching(seconds).machine() for seconds in (1e-7, 1e-6))
    assert len({TrainingStep(host, job).layer_time(MEGATRON) for host in hosts}) == 1


@pytest.mark.parametrize("form", [MEGATRON, OVERLAP], ids=lambda form: form.name)
def test_a_step_is_the_sum_of_its_parts(form: Variant) -> None:
    of_batch = partial(training, LLAMA2_7B, Layout(2, 1, 1, 1), 16384, micro_batch=1)
    steps = {n: TrainingStep(SERVER.machine(), of_batch(micro_batches=n)) for n in (1, 2, 4)}

    def more(form: Variant, many: int, few: int) -> float:
        """Seconds of more micro-batches."""
        return steps[many].time(form) - steps[few].time(form)

    layers, of_layer = steps[4].chunk(form, 0), steps[4].layer_time(MEGATRON)
    in_order = LAYERS * of_layer.seconds
    ends = more(MEGATRON, 2, 1) - in_order  # the embedding, the output layer and the loss
    assert ends > 0
    if form is MEGATRON:
        assert layers == (LAYERS * of_layer.forward, LAYERS * of_layer.backward, layers[1], None)
        assert more(form, 4, 1) == pytest.approx(3 * (in_order + ends))
    else:  # the first forward and the last backward are alone
        assert layers.pair is not None
        assert layers.pair < layers.forward + layers.backward < in_order
        assert more(form, 4, 1) == pytest.approx(3 * (layers.pair + ends))
        shorter = in_order - layers.forward - layers.backward
        assert steps[1].time(MEGATRON) - steps[1].time(form) == pytest.approx(shorter)


def test_gradients_reduced_in_the_last_backward_do_not_wait() -> None:
    job = training(LLAMA2_7B, Layout(2, 1, 2, 1), 16384, micro_batch=1, micro_batches=4)
    steps = [
        TrainingStep(SERVER.machine(), replace(job, overlaps=(on, False))) for on in (True, False)
    ]
    with mock.patch.object(step_module, "collective_seconds", return_value=0.0):
        late, early = (step.time(OVERLAP) for step in steps)
    last, backward = steps[0].layer_time(MEGATRON).backward, steps[1].chunk(OVERLAP, 0).backward
    assert late - early == pytest.approx(LAYERS * last - backward)
    assert late > early


def test_a_host_bound_launch_runs_in_megatrons_order() -> None:
    job = training(LLAMA2_7B, Layout(2, 1, 1, 1), 4096, micro_batches=4, recomputes=True)
    step = TrainingStep(SERVER.launching(1e-2).machine(), job)
    assert OVERLAP.alone is not None
    assert step.time(OVERLAP) == step.time(OVERLAP.alone) < step.time(MEGATRON)


def test_stage_transfers_and_recomputations_lengthen_a_pipeline() -> None:
    job = training(LLAMA2_7B, Layout(2, 1, 1, 4), 4096, micro_batch=1, micro_batches=4)
    step = TrainingStep(SERVER.machine(), job)
    inside = step.machine.inside
    assert step.breakdown(MEGATRON).pp == pytest.approx(
        2 * 3 * (inside.latency + 4096 / 2 * 2 * H / inside.rate)
    )
    full = replace(step, training=replace(job, recomputed=LAYERS))
    chain = (4 - 1 + 4) * LAYERS / 4  # the longest of stages and micro-batches
    more = full.time(COMPUTE_ONLY) - step.time(COMPUTE_ONLY)
    assert more == pytest.approx(chain * step.layer_time(COMPUTE_ONLY).forward)


# ------------------------------------------------------------------- its memory

LLAMA2_7B = ModelConfig.load(CONFIGS / "llama2_7b.yaml")
H, F, LAYERS, VOCABULARY = 4096, 11008, 32, 32000


def memory(
    layout: Layout,
    variant: Variant = REFERENCE,
    recomputes: bool = False,
    model: ModelConfig = LLAMA2_7B,
) -> Footprint:
    batch = {"micro_batch": 1, "micro_batches": 8}
    job = training(model, layout, 4096, recomputes=recomputes, **batch)
    return footprint(job, variant, SERVER)


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1), (8, 1, 1, 1), (1, 2, 1, 1), (1, 1, 8, 1), (1, 1, 1, 4), (2, 2, 2, 1)]
)
def test_every_size_divides_what_it_should(sizes: tuple[int, int, int, int]) -> None:
    tp, cp, dp, pp = sizes
    stored, full = (memory(Layout(*sizes), recomputes=choice) for choice in (False, True))
    # All ranks have the norms; the first of several stages has one table.
    of_layer, tables = (4 * H * H + 3 * H * F) / tp + 2 * H, (1 + (pp == 1)) * VOCABULARY * H / tp
    parameters = LAYERS / pp * of_layer + tables
    # 34 s b h with a GELU of 4 H (Korthikanti and others, 2022); here SwiGLU of 2.69 H.
    layer = 4096 * (2 * (5 * H + 3 * H + 3 * F) + 64 * 32) / (tp * cp)
    logits = (pp == 1) * 6 * 4096 * VOCABULARY / (tp * cp)
    # The first stage holds as many micro-batches as there are stages.
    held = LAYERS * layer + logits
    expected = 2 * parameters, 4 * parameters, 12 * parameters / (dp * cp), held
    assert stored[:4] == pytest.approx(expected)
    # Recomputation keeps inputs and one layer.
    kept = LAYERS * 4096 * 2 * H / (tp * cp) + layer + logits
    assert full.activations == pytest.approx(kept)
    assert stored.communication > 0 or max(sizes) == 1


def test_passes_hold_two_recomputed_layers() -> None:
    def more(recomputes: bool, form: Variant = OVERLAP, stages: int = 4) -> float:
        layout = Layout(8, 1, 1, stages)
        ours, plain = (memory(layout, of, recomputes) for of in (form, MEGATRON))
        return ours.activations - plain.activations

    # qkv, proj, fc1 and fc2; what is gathered has all rows.
    operands = 2 * 4096 * (4 * H + (3 * H + H + 3 * F) / 8)
    assert more(recomputes=False) == operands
    layer = 4096 * (2 * (5 * H + 3 * H + 3 * F) + 64 * 32) / 8
    assert more(recomputes=True) == pytest.approx(operands + layer)
    assert more(recomputes=True, stages=LAYERS) == pytest.approx(operands)
    # Of the first of four stages, 7 and a part of one more micro-batch instead of 4.
    in_flight = 4 * LAYERS / 4 * layer
    with_forwards = more(recomputes=False, form=OVERLAP_MEMORY)
    assert with_forwards == pytest.approx(operands + in_flight)


def test_the_fullest_stage_decides_on_memory() -> None:
    uneven = replace(LLAMA2_7B, pipeline_model_parallel_size=2, num_layer_list=(8, 24))
    assert memory(Layout(1, 1, 1, 2), model=uneven).weights > memory(Layout(1, 1, 1, 2)).weights


def test_lanes_and_gathered_tensors_take_communication_memory() -> None:
    def communication(schedule: Schedule) -> float:
        return memory(Layout(8, 1, 1, 1), fused(schedule)).communication

    # A lane is a communicator of two buffers, of the size of its messages, 16 MB at least.
    few, many = (communication(Schedule(lanes=n)) for n in (1, 7))
    assert many - few == 6 * 2 * 16 * 2**20
    rows, communicator = 4096 * H * 2, SERVER.typical("host.communicator_bytes")
    assert few == 3 * rows + communicator + 2 * 16 * 2**20
    # All rows are a message of a collective; the product of a chunk is copied.
    one, two = (communication(Schedule("collective", 1, chunks)) for chunks in (1, 2))
    assert one == 3 * rows + communicator + 2 * 32 * 2**20
    wide = replace(LLAMA2_7B, vocab_size=8 * VOCABULARY)
    more = memory(Layout(8, 1, 1, 1), fused(Schedule("collective", 1, 2)), model=wide)
    assert two == one
    assert more.communication - one == 4096 * 2 * VOCABULARY - 2 * rows
    assert memory(Layout(8, 1, 1, 1)).communication == 2 * rows + communicator
    # Slices have a copy that restores the order of rows.
    assert memory(Layout(8, 1, 1, 1), COC[0]).communication == 3 * rows + communicator
