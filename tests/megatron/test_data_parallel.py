"""Megatron's distributed optimizer with CommFuse's transfers of its buckets, or collectives."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu import MismatchError, Schedule, Transport, TransportError
from commfuse_npu.ops import LinearOptions
from mindspeed_patches import LinearWrappers
from mindspeed_patches.data_parallel import BucketWrappers
from mindspeed_patches.state_hashes import optimizer_hash, weight_hashes
from tests.distributed.ranks import on_ranks
from tests.limits import BRIEF, PATIENT
from tests.megatron.in_ranks import megatron, patched, replicas

IMPATIENT = 6 * BRIEF
"""Timeout of transports in tests where a rank waits in vain."""
ITERATIONS = 6


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        distributed: with the distributed optimizer.
        overlap: of gradients and parameters.
    """

    dtype: torch.dtype = torch.float32
    distributed: bool = True
    fp32_gradients: bool = True
    overlap: tuple[bool, bool] = (False, False)
    frozen: bool = False
    clip: float = 1.0
    microbatches: int = 1
    chunks: int = 1


def net(dtype: torch.dtype) -> torch.nn.Sequential:
    """Layers of uneven sizes: 2,300 parameters, which no bucket size divides."""
    sizes = itertools.pairwise((12, 40, 24, 18, 7))
    return torch.nn.Sequential(
        *(
            torch.nn.Sequential(torch.nn.Linear(i, o, dtype=dtype), torch.nn.Tanh())
            for i, o in sizes
        )
    )


@contextmanager
def wrapped(case: Case, *, fails: bool = False) -> Iterator[LinearWrappers]:
    """Applies the wrappers; with ``fails`` lanes are broken and not closed afterwards."""
    from megatron.core import parallel_state

    linears = LinearWrappers()
    buckets = BucketWrappers(linears, LinearOptions(Schedule(lanes=1, chunks=case.chunks)))
    group = parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=True
    )
    limit = IMPATIENT if fails else PATIENT
    for user in buckets.users.values():
        user.transport = Transport.create(group, lanes=1, timeout=limit)
    try:
        with patched(buckets.register):
            yield linears
    finally:
        for user in () if fails else buckets.users.values():
            user.lanes().close()


class Training:
    """A model, its optimizer, and iterations; every rank has its own data."""

    def __init__(self, case: Case) -> None:
        from megatron.core.transformer import TransformerConfig

        self.case = case
        torch.manual_seed(3)
        layers = net(case.dtype)
        layers[1].requires_grad_(not case.frozen)
        ddp = {
            "grad_reduce_in_fp32": case.fp32_gradients,
            "overlap_grad_reduce": case.overlap[0],
            "overlap_param_gather": case.overlap[1],
            "bucket_size": 300,
            "check_for_nan_in_grad": False,
            "use_distributed_optimizer": case.distributed,
        }
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        bf16 = case.dtype == torch.bfloat16
        (self.model,), self.optimizer = replicas(
            config, [layers], ddp, clip_grad=case.clip, bf16=bf16, params_dtype=case.dtype
        )
        self.data = torch.Generator().manual_seed(100 + dist.get_rank())
        self.steps = 0

    def iterate(self) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        for last in (*[False] * (self.case.microbatches - 1), True):
            with nullcontext() if last else self.model.no_sync():
                x = torch.randn(5, 12, generator=self.data).to(self.case.dtype)
                self.model(x).float().square().mean().backward()
        self.model.finish_grad_sync()
        self.optimizer.step()
        self.steps += 1

    def finish_parameters(self) -> None:
        if self.case.overlap[1]:
            self.model.disable_forward_pre_hook(param_sync=True)
            self.model.enable_forward_pre_hook()

    def sha256(self) -> str:
        """Hashes of parameters, main parameters and optimizer state of this rank."""
        weights = sorted(weight_hashes([self.model.module]).items())
        return f"{weights} {optimizer_hash(self.optimizer)}"


def train(case: Case) -> tuple[str, int]:
    """The bits at the end, and the number of buckets."""
    training = Training(case)
    start = training.sha256()
    for _ in range(ITERATIONS):
        training.iterate()
    training.finish_parameters()
    assert training.sha256() != start
    return training.sha256(), sum(len(group.buckets) for group in training.model.bucket_groups)


# --------------------------------------------------------------------------- the same bits


def compared(rank: int, cases: list[Case]) -> list[int]:
    counts = []
    for case in cases:
        with megatron():
            expected = train(case)
            with wrapped(case) as linears:
                assert train(case) == expected, case
            buckets = expected[1]
            # With overlap the gather of the last step comes at the end, and one more before the
            # first forward.
            gathers = ITERATIONS + case.overlap[1]
            assert linears.calls == {
                ("gradients", "fused"): buckets * ITERATIONS,
                ("parameters", "fused"): buckets * gathers,
            }, case
            counts.append(buckets)
    return counts


BOTH = {"overlap": (True, True)}
BF16 = {"dtype": torch.bfloat16}


def test_two_replicas_end_with_megatrons_bits(ranks) -> None:
    cases = [
        Case(),
        Case(**BF16),
        Case(overlap=(True, False)),
        Case(**BOTH),
        Case(**BOTH, **BF16),
        Case(**BF16, fp32_gradients=False),
        Case(**BOTH, **BF16, fp32_gradients=False, microbatches=2, clip=0.0),
        Case(**BOTH, frozen=True),
        Case(**BOTH, chunks=3),
    ]
    for counts in ranks(2).run(compared, cases):
        # Only with overlapped gradients does Megatron make more than one bucket.
        assert [count > 1 for count in counts] == [case.overlap[0] for case in cases]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
@on_ranks(2)
def test_ranks_that_began_something_else_change_no_weight(
    rank: int, distributed: bool, dtype: torch.dtype
) -> None:
    """Ranks compare the operations they began before Megatron's optimizers step."""
    transport = Transport.create(timeout=PATIENT)
    with megatron():
        training = Training(Case(dtype, distributed))
        start = training.sha256()
        transport.agree("layer", {"rows": 4})
        training.iterate()
        bits = training.sha256()
        assert bits != start
        transport.agree("layer", {"rows": 4 + rank})
        with pytest.raises(MismatchError, match=r"layer: rank .* rows: "):
            training.iterate()
        assert training.sha256() == bits


# ------------------------------------------------------------------- one rank that fails


class PlantedError(Exception):
    pass


def plant(training: Training, how: Callable[[], None]) -> None:
    """A failure before the second bucket group starts, or after all gradients are summed on every
    rank, so that only the exchange before the step can tell the others."""
    if how is die:
        group = training.model.bucket_groups[1]
        start = group.start_grad_sync
        group.start_grad_sync = lambda: (how(), start())
    else:
        group = training.model.bucket_groups[-1]
        finish = group.finish_grad_sync
        group.finish_grad_sync = lambda: (finish(), how())


def raise_it() -> None:
    raise PlantedError


def die() -> None:
    os._exit(1)


def failing(rank: int, how: Callable[[], None]) -> tuple[str, bool, int]:
    """Result of a rank: the type of its error, whether its bits are unchanged, the steps it made.

    Broken process groups are left behind; the ranks have to be ended.
    """
    minutes, case = IMPATIENT.total_seconds() / 60, Case(clip=0.0, **BOTH)
    with megatron(minutes=minutes), wrapped(case, fails=True):
        training = Training(case)
        for _ in range(2):
            training.iterate()
        training.finish_parameters()
        if rank == 1:
            plant(training, how)
        before, kind = training.sha256(), "none"
        try:
            training.iterate()
        except (PlantedError, TransportError, RuntimeError) as error:
            kind = type(error).__name__
        return kind, training.sha256() == before, training.steps


@pytest.mark.parametrize(("size", "how"), [(2, raise_it), (3, die)])
def test_a_rank_that_fails_keeps_the_others_from_their_step(ranks, size: int, how: Any) -> None:
    try:
        outcomes = ranks(size).outcomes(failing, how, may_die=how is die)
    finally:
        ranks(size).kill()
    own = outcomes.pop(1)
    if how is die:
        assert isinstance(own.error, BrokenProcessPool)
    else:
        assert own.value == ("PlantedError", True, 2), own
    for outcome in outcomes:
        assert outcome.value == ("TransportError", True, 2), outcomes
