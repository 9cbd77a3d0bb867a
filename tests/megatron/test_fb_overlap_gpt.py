"""Trainings of Megatron's GPT on core 0.12 to 0.16: the same weights as in its own order.

To check a version: ``pip install --no-deps megatron-core==0.16.1``, and these files::

    pytest tests/megatron/test_fb_overlap.py tests/megatron/test_fb_overlap_gpt.py
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from mindspeed_patches.fb_overlap import Overlapping
from mindspeed_patches.fb_overlap.core_versions import supported_keywords
from mindspeed_patches.fb_overlap.schedule import OverlappedSchedule
from scripts.cpu_pretraining.megatron_on_cpu import cuda_means_cpu
from tests.megatron.in_ranks import WITHOUT_KERNELS, gpt, language_loss, megatron, replicas

LENGTH, BATCH, VOCABULARY = 8, 2, 32


@dataclass(frozen=True)
class Training:
    """A layout and options of Megatron.

    Attributes:
        options: of the model's config.
        distributed: the distributed optimizer, with both of its overlaps.
        groups: pass the process groups, as later versions allow.
        typed: a model of MindSpeed-LLM's fine-tuning has no type.
    """

    tensor: int = 1
    stages: int = 1
    chunks: int = 1
    experts: int = 1
    replicas: int = 1
    microbatches: int = 4
    options: tuple[tuple[str, Any], ...] = ()
    distributed: bool = False
    groups: bool = False
    typed: bool = True

    @property
    def size(self) -> int:
        return self.tensor * self.stages * self.replicas

    @property
    def transfers(self) -> bool:
        """Whether a pair has something to hide."""
        return self.tensor > 1 or self.experts > 1


RECOMPUTED = (
    ("recompute_granularity", "full"),
    ("recompute_method", "uniform"),
    ("recompute_num_layers", 1),
)
SEQUENCE = (("sequence_parallel", True),)
DROPOUT = (("hidden_dropout", 0.1), ("attention_dropout", 0.1))
FREED = (("deallocate_pipeline_outputs", True),)
PARTLY = (("num_microbatches_with_partial_activation_checkpoints", 1),)
VPP = Training(stages=2, chunks=2)
TRAININGS = {
    "TP 2, no type": Training(tensor=2, typed=False),
    "TP 2, SP, recomputed dropout": Training(tensor=2, options=SEQUENCE + RECOMPUTED + DROPOUT),
    "EP 2, recomputed, distributed optimizer": Training(
        experts=2, replicas=2, options=RECOMPUTED, distributed=True
    ),
    "PP 2, partly checkpointed": Training(stages=2, microbatches=8, options=PARTLY),
    "PP 2, distributed optimizer": Training(stages=2, microbatches=2, distributed=True),
    "PP 2 x VPP 2, outputs freed": replace(VPP, options=FREED),
    "PP 2 x VPP 2, distributed optimizer": replace(VPP, distributed=True),
}
LONG = {
    "PP 2 x TP 2, SP, groups passed": Training(
        tensor=2, stages=2, options=SEQUENCE, microbatches=6, groups=True
    ),
    "PP 2 x VPP 2 x TP 2, SP": replace(VPP, tensor=2, options=SEQUENCE),
    "PP 2 x VPP 2, EP 2, distributed optimizer": replace(
        VPP, experts=2, replicas=2, distributed=True
    ),
}


class InOrder:
    """Runs the two sides of a pair one after the other."""

    def run(self, forward: Any, backward: Any, kind: Any) -> tuple[Any, Any]:
        result = backward()
        return forward(), result


def chunk_of(training: Training, config: Any, chunk: int) -> torch.nn.Module:
    """One model chunk of this rank."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    if training.chunks > 1 and not supported_keywords(GPTModel, vp_stage=chunk):
        parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    last = training.stages - 1, training.chunks - 1
    model = gpt(
        config,
        config.num_layers // (training.stages * training.chunks),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=(stage, chunk) == (0, 0),
        post_process=(stage, chunk) == last,
        **supported_keywords(GPTModel, vp_stage=chunk if training.chunks > 1 else None),
    )
    if not training.typed:
        model.model_type = None
    return model


def settings(training: Training) -> Any:
    from megatron.core.transformer import TransformerConfig

    experts: dict[str, Any] = {}
    if training.experts > 1:
        experts = {
            "num_moe_experts": 4,
            "expert_model_parallel_size": training.experts,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.01,
        }
    return TransformerConfig(
        num_layers=4,
        hidden_size=16,
        num_attention_heads=2,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=False,
        overlap_p2p_comm=training.chunks > 1,
        tensor_model_parallel_size=training.tensor,
        pipeline_model_parallel_size=training.stages,
        virtual_pipeline_model_parallel_size=training.chunks if training.chunks > 1 else None,
        **experts,
        **(WITHOUT_KERNELS | dict(training.options)),
    )


def trained(training: Training, steps: int = 3) -> tuple[list[torch.Tensor], list[str]]:
    """Losses, weights and random state after ``steps`` steps of the schedule that Megatron chooses,
    and a sorted list of its functions that were called."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    config, split = settings(training), training.distributed
    ddp = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": split,
        "overlap_grad_reduce": split,
        "overlap_param_gather": split,
    }
    chunks = [chunk_of(training, config, chunk) for chunk in range(training.chunks)]
    models, optimizer = replicas(config, chunks, ddp)
    virtual = training.chunks > 1
    calls: list[str] = []

    def noted(*functions: Callable[..., Any]) -> Any:
        """Functions that log their calls: a list for a virtual pipeline, else one."""

        def note(chunk: int, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                calls.append(f"{function.__name__} {chunk}")
                return function(*args, **kwargs)

            return call

        noting = [note(*item) for item in enumerate(functions)]
        return noting if virtual else noting[0]

    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = noted(*(model.no_sync for model in models))
    if split:
        config.grad_sync_func = noted(*(model.start_grad_sync for model in models))
    if split and virtual:
        config.param_sync_func = [model.start_param_sync for model in models]
    data = [tokens(parallel_state.get_data_parallel_rank()) for _ in models]
    losses: list[torch.Tensor] = []
    for _ in range(steps):
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        reduced = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data if virtual else data[0],
            model=models if virtual else models[0],
            num_microbatches=training.microbatches,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            **(passed_groups(config) if training.groups else {}),
        )
        losses += [loss["lm loss"] for loss in reduced]
        updated, _, _ = optimizer.step()
        assert updated
    for model in models if split else ():
        model.disable_forward_pre_hook(param_sync=True)
    weights = [weight.detach() for model in models for weight in model.parameters()]
    return [*losses, *weights, torch.get_rng_state()], sorted(calls)


def passed_groups(config: Any) -> dict[str, Any]:
    """Arguments of a caller with its own groups; empty if the version does not take them."""
    try:
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
        from megatron.core.process_groups_config import ProcessGroupCollection
    except ImportError:
        return {}
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return {"p2p_communicator": P2PCommunicator(groups.pp, config), "pg_collection": groups}


def tokens(replica: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(7 + replica)
    while True:
        yield torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def forward_step(iterator: Iterator[torch.Tensor], model: torch.nn.Module, *partly: bool) -> Any:
    batch = next(iterator)
    output = language_loss(model, batch[:, :-1], batch[:, 1:])

    def loss(output: torch.Tensor) -> Any:
        mean = output.float().mean()
        return mean, {"lm loss": mean.detach().clone()}

    return output, loss


class Event:
    """An event of the CPU, on which all work is complete when it returns."""

    def synchronize(self) -> None: ...


class Stream(Event):
    def record_event(self) -> Event:
        return Event()

    def wait_stream(self, other: Stream) -> None: ...


def to_host(counts: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return counts.numpy() if as_numpy and isinstance(counts, torch.Tensor) else counts


def in_layout(training: Training, work: Callable[[], Any]) -> Any:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    sizes = {
        "pipeline_model_parallel_size": training.stages,
        "virtual_pipeline_model_parallel_size": training.chunks if training.chunks > 1 else None,
        "expert_model_parallel_size": training.experts,
    }
    cuda = {"Event": Event, "Stream": Stream, "current_stream": Stream, "stream": nullcontext}
    with (
        # Dispatchers of experts copy counts to the host on a stream of their own.
        mock.patch.multiple(torch.cuda, **cuda),
        # They only copy tensors that are on a GPU.
        mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", to_host),
        # Core 0.16 reads it without having imported it, if there is no TransformerEngine.
        mock.patch.object(moe_utils, "te_general_gemm", None, create=True),
        megatron(training.tensor, **sizes),
        cuda_means_cpu(),
    ):
        return work()


def compare(
    rank: int, training: Training, steps: int = 3, clock: Sequence[float] = ()
) -> tuple[int, str]:
    """How many pairs ran, and the output; ``clock`` gives the times that the clock returns."""
    own_options = tuple(option for option in training.options if option not in FREED)

    def both() -> tuple[int, str]:
        # Megatron's interleaved schedule frees outputs while gloo still sends them.
        own = trained(replace(training, options=own_options), steps)
        printed, overlapping = io.StringIO(), Overlapping(plain_pipelines=True)
        overlapping.clock = iter(clock).__next__ if clock else None
        if training.transfers:
            overlapping.start()
        else:  # only the schedule: the sides of a pair run in order
            mock.patch(
                "megatron.core.pipeline_parallel.get_forward_backward_func",
                return_value=lambda **step: OverlappedSchedule(InOrder(), **step).run(),
            ).start()
        try:
            with redirect_stdout(printed):
                ours = trained(training, steps)
        finally:
            overlapping.stop()
            mock.patch.stopall()
        assert all(map(torch.equal, ours[0], own[0]))
        assert ours[1] == own[1]
        assert all(torch.isfinite(tensor).all() for tensor in own[0][:-1])
        overlap = overlapping.overlap
        return (0 if overlap is None else overlap.pairs), printed.getvalue()

    return in_layout(training, both)


@pytest.mark.parametrize(
    "training",
    [
        *(pytest.param(case, id=name) for name, case in TRAININGS.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.long) for name, case in LONG.items()),
    ],
)
def test_weights_of_megatrons_own_order(ranks: Any, training: Training) -> None:
    for pairs, printed in ranks(training.size).run(compare, training):
        assert (pairs > 0) is training.transfers, printed


@pytest.mark.parametrize(("overlapped", "pairs"), [(1.5, 3 * 3), (2.5, 0)])
def test_it_says_what_it_does_and_is_off_on_all_ranks_where_it_is_slower(
    ranks: Any, overlapped: float, pairs: int
) -> None:
    """Of five steps the 2nd takes 2 s in Megatron's order, the 4th ``overlapped`` s on rank 1."""
    first, second = ranks(2).run(timed, overlapped)
    assert first[0] == second[0] == pairs
    assert "3 of 4 forwards of stage 0 run beside a backward" in first[1]
    assert "the activations of at most 2 forwards, instead of 1\n" in first[1]
    figures = f"a step took {1000 * overlapped:.1f} ms, 2000.0 ms in Megatron's order"
    assert (f"off: {figures}" in first[1]) is (pairs == 0)
    assert figures in first[1]


def timed(rank: int, overlapped: float) -> tuple[int, str]:
    clock = [0.0, 2.0, 2.0, 9.0, 9.0, 9.0 + (overlapped if rank else 0.5)]
    return compare(rank, Training(tensor=2), 5, clock)
