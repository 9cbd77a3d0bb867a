"""Overlapped schedules against Megatron's own, on the real megatron-core: the same bits."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from mindspeed_patches.fb_overlap import Overlapping
from mindspeed_patches.fb_overlap.core_versions import obstacle
from mindspeed_patches.fb_overlap.schedule import OverlappedSchedule
from scripts.cpu_pretraining.megatron_on_cpu import cuda_means_cpu
from tests.megatron.in_ranks import megatron

LENGTH, BATCH, HIDDEN = 4, 2, 8


@dataclass(frozen=True)
class Case:
    """A pipeline: its layout and what is asked of the schedule."""

    tensor: int = 1
    stages: int = 1
    chunks: int = 1
    microbatches: int = 4
    dropout: float = 0.0
    recompute: bool = False
    grad_sync: bool = False
    deallocate: bool = False
    partly: int | None = None
    typed: bool = True

    @property
    def size(self) -> int:
        return self.tensor * self.stages


class Summed(torch.autograd.Function):
    """The sum over the tensor-parallel ranks, blocking in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        from megatron.core import parallel_state

        total = x.clone()
        dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return Summed.forward(ctx, grad)


class Chunk(torch.nn.Module):
    """Some layers of a model, as Megatron's schedules want one."""

    model_type: Any = None

    def __init__(self, config: Any, number: int, case: Case) -> None:
        super().__init__()
        from megatron.core.enums import ModelType

        self.config, self.number, self.case = config, number, case
        self.model_type = ModelType.encoder_or_decoder if case.typed else None
        torch.manual_seed(100 * number + dist.get_rank() % case.tensor)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.received: torch.Tensor | None = None

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        self.received = tensors[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.received is None else self.received
        for layer in self.layers:
            if self.case.recompute:
                x = torch.utils.checkpoint.checkpoint(self._layer, layer, x, use_reentrant=False)
            else:
                x = self._layer(layer, x)
        return x

    def _layer(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.dropout(torch.tanh(layer(Summed.apply(x))), self.case.dropout)
        return x + 1


def batches(case: Case) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    while True:
        yield torch.randn(LENGTH, BATCH, HIDDEN, generator=generator)


def forward_step(iterator: Iterator[torch.Tensor], model: Chunk, *partly: bool) -> Any:
    output = model(next(iterator))

    def loss(output: torch.Tensor) -> Any:
        mean = output.float().pow(2).mean()
        return mean, {"lm loss": mean.detach().clone()}

    return output, loss


class InOrder:
    """A pair, one after the other."""

    def run(
        self, forward: Callable[[], Any], backward: Callable[[], Any], kind: Any
    ) -> tuple[Any, Any]:
        result = backward()
        return forward(), result


def train(
    case: Case, overlapped: bool, steps: int = 3, clock: Sequence[float] = ()
) -> dict[str, Any]:
    """Gradients, losses and the order of calls of so many steps."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer import TransformerConfig

    virtual = case.chunks > 1
    calls: list[str] = []
    config = TransformerConfig(
        num_layers=2 * case.stages * case.chunks,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        tensor_model_parallel_size=case.tensor,
        pipeline_model_parallel_size=case.stages,
        virtual_pipeline_model_parallel_size=case.chunks if virtual else None,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=case.deallocate,
        batch_p2p_comm=False,
        overlap_p2p_comm=virtual,
        num_microbatches_with_partial_activation_checkpoints=case.partly,
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    models = [Chunk(config, chunk * case.stages + stage, case) for chunk in range(case.chunks)]

    @contextmanager
    def no_sync() -> Iterator[None]:
        calls.append("no_sync")
        yield
        calls.append("sync")

    config.no_sync_func = no_sync
    if case.grad_sync:

        def reduce(number: int) -> Callable[[Any], None]:
            return lambda _: calls.append(f"reduce chunk {number}")

        functions = [reduce(number) for number in range(case.chunks)]
        config.grad_sync_func = functions if virtual else functions[0]
    config.finalize_model_grads_func = lambda chunks, _, **__: calls.append(
        f"finalize {len(chunks)}"
    )
    wrapped = Overlapping(plain_pipelines=True) if overlapped and case.tensor > 1 else None
    choose = schedules.get_forward_backward_func
    if wrapped is not None:
        wrapped.clock = iter(clock).__next__ if clock else None
        choose = wrapped.get_forward_backward_func_wrapper(choose)
    elif overlapped:  # without transfers the schedule by itself
        choose = lambda: lambda **step: OverlappedSchedule(InOrder(), **step).run()  # noqa: E731
    torch.manual_seed(3)
    data = [batches(case) for _ in models]
    losses = []
    for _ in range(steps):
        reduced = choose()(
            forward_step_func=forward_step,
            data_iterator=data if virtual else data[0],
            model=models if virtual else models[0],
            num_microbatches=case.microbatches,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
        )
        losses.append([one["lm loss"] for one in reduced])
    overlap = None if wrapped is None else wrapped.overlap
    return {
        "gradients": [p.grad for model in models for p in model.parameters()],
        "losses": losses,
        "calls": calls,
        "random": torch.get_rng_state(),
        "pairs": 0 if overlap is None else overlap.pairs,
    }


@contextmanager
def layout(case: Case) -> Iterator[None]:
    sizes = {
        "pipeline_model_parallel_size": case.stages,
        "virtual_pipeline_model_parallel_size": case.chunks if case.chunks > 1 else None,
    }
    with megatron(case.tensor, **sizes), cuda_means_cpu():
        yield


def compare(rank: int, case: Case) -> int:
    """The same as Megatron's; how many pairs ran."""
    with layout(case):
        # Megatron's interleaved schedule frees outputs while gloo still sends them.
        ours, own = train(case, True), train(replace(case, deallocate=False), False)
    for mine, theirs in zip(ours["gradients"], own["gradients"], strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(ours["losses"], own["losses"], strict=True):
        assert all(map(torch.equal, mine, theirs))
    assert sorted(ours["calls"]) == sorted(own["calls"])
    if case.recompute or not case.dropout:
        assert torch.equal(ours["random"], own["random"])
    pairs: int = ours["pairs"]
    return pairs


CASES = {
    "no pipeline": (Case(tensor=2), 2 * 3),
    "fine-tuning, whose models have no type": (Case(tensor=2, typed=False), 2 * 3),
    "recomputed dropout": (Case(tensor=2, dropout=0.3, recompute=True), 2 * 3),
    "pipeline": (Case(stages=2, microbatches=8), 0),
    "virtual pipeline": (Case(stages=2, chunks=2, microbatches=8), 0),
    "outputs freed": (Case(stages=2, chunks=2, deallocate=True), 0),
    "gradients reduced by chunk": (Case(stages=2, chunks=2, grad_sync=True), 0),
    "gradients reduced at the end": (Case(stages=2, grad_sync=True), 0),
    "fewer micro-batches than stages": (Case(stages=2, microbatches=2), 0),
    "partly checkpointed": (Case(stages=2, microbatches=8, partly=1), 0),
}


@pytest.mark.parametrize("name", CASES)
def test_bits_and_calls_of_megatrons_schedule(ranks: Any, name: str) -> None:
    case, pairs = CASES[name]
    assert ranks(case.size).run(compare, case) == [pairs] * case.size


def tried(rank: int, overlapped: float) -> tuple[int, str]:
    """Five steps; the second takes 2 s in Megatron's order, the fourth so long on rank 1."""
    case, said = Case(tensor=2), io.StringIO()
    clock = [0.0, 2.0, 2.0, 9.0, 9.0, 9.0 + (overlapped if rank else 0.5)]
    with layout(case), redirect_stdout(said):
        ours, own = train(case, True, 5, clock), train(case, False, 5)
    assert all(map(torch.equal, ours["gradients"], own["gradients"]))
    return ours["pairs"], said.getvalue()


@pytest.mark.parametrize(("overlapped", "pairs"), [(1.5, 3 * 3), (2.5, 0)])
def test_it_says_what_it_does_and_is_off_on_all_ranks_where_it_is_slower(
    ranks: Any, overlapped: float, pairs: int
) -> None:
    first, second = ranks(2).run(tried, overlapped)
    assert first[0] == second[0] == pairs
    assert "3 of 4 forwards of stage 0 run beside a backward" in first[1]
    assert "the activations of at most 2 forwards, of 1 without it\n" in first[1]
    assert re.search(r"a hand-over takes \d+ us \(measured\)\n", first[1])
    assert re.search(
        r"chunks \(0, 0\): 3 transfers; the forward hands over at \d of 2 places, the backward at "
        r"\d of 1; estimated from the first step \d+\.\d ms",
        first[1],
    )
    figures = f"a step took {1000 * overlapped:.1f} ms, 2000.0 ms in Megatron's order"
    assert (f"off: {figures}" in first[1]) is (pairs == 0)
    assert figures in first[1]


NAMED = {
    "overlap_moe_expert_parallel_comm": True,
    "delay_wgrad_compute": True,
    "hybrid_context_parallel": True,
    "enable_cuda_graph": True,
    "cuda_graph_impl": "local",
    "cpu_offloading": True,
    "fine_grained_activation_offloading": True,
    "tp_comm_overlap": True,
    "symmetric_ar_type": "one_shot",
}


@pytest.mark.parametrize("name", NAMED)
def test_settings_that_exclude_it_are_named(name: str) -> None:
    assert str(obstacle({}, [], SimpleNamespace(**{name: NAMED[name]}))).startswith(f"{name}: ")
    off = dict.fromkeys(NAMED, False) | {"cuda_graph_impl": "none", "fp8": "hybrid"}
    assert obstacle({}, [], SimpleNamespace(**off)) is None


class TransformerEngines(torch.nn.Linear):
    __module__ = "transformer_engine.pytorch"


@pytest.mark.parametrize("name", ["fp8", "fp4"])
def test_low_precision_of_transformer_engine_is_named(name: str) -> None:
    model = torch.nn.Sequential(TransformerEngines(1, 1))
    assert obstacle({}, [model], SimpleNamespace()) is None
    found = obstacle({}, [model], SimpleNamespace(**{name: "hybrid"}))
    assert str(found).startswith(f"{name}: ")


def of_pipelines(rank: int, case: Case) -> str | None:
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer import TransformerConfig

    with layout(case):
        config = TransformerConfig(num_layers=4, hidden_size=HIDDEN, num_attention_heads=2)
        config.microbatch_group_size_per_vp_stage = case.stages
        models = [Chunk(config, number, case) for number in range(case.chunks)]
        step = {"model": models, "num_microbatches": case.microbatches}
        return Overlapping()._obstacle(schedules.get_forward_backward_func(), step)


def test_pipelines_that_cannot_be_overlapped_are_named(ranks: Any) -> None:
    plain = ranks(2).run(of_pipelines, Case(stages=2))
    assert all("up to 3 micro-batches" in one and "plain_pipelines=True" in one for one in plain)
    odd = ranks(2).run(of_pipelines, Case(stages=2, chunks=2, microbatches=5))
    assert all("5 micro-batches are not a multiple of the 2 stages" in one for one in odd)
    assert ranks(2).run(of_pipelines, Case(stages=2, chunks=2)) == [None, None]
