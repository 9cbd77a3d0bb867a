"""Megatron's distributed optimizer with CommFuse's transfers of its buckets, or collectives."""

import os
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu import MismatchError, Transport, TransportError
from tests.distributed.ranks import on_ranks
from tests.limits import BRIEF, PATIENT
from tests.megatron.models import BF16, DISTRIBUTED, Case
from tests.megatron.training import Trainer, launched, layout

IMPATIENT = BRIEF.total_seconds() / 10
"""Timeout in minutes of transports in tests where a rank waits in vain."""
STEPS = 4
BUCKETS = {"bucket_size": 3000, "check_for_nan_in_grad": False}
PLAIN = BUCKETS | {"overlap_grad_reduce": False, "overlap_param_gather": False}
GATHERED_LATE = PLAIN | {"overlap_grad_reduce": True}
HALF_SUMS = {"grad_reduce_in_fp32": False}
UNCLIPPED = {"clip_grad": 0.0}
BOTH = Case(replicas=2, launch="--commfuse-dp", options=DISTRIBUTED | BUCKETS)
NEITHER = BOTH.but(PLAIN)


def compared(rank: int, cases: list[Case]) -> list[int]:
    counts = []
    with layout(cases[0]):
        for case in cases:
            expected = Trainer(case).run(STEPS)
            with launched(case) as (linears, _):
                trainer = Trainer(case)
                assert trainer.run(STEPS) == expected, case
            buckets = sum(len(group.buckets) for group in trainer.models[0].bucket_groups)
            # With overlap the gather of the last step comes at the end, and one more before the
            # first forward.
            assert linears.calls == {
                ("gradients", "fused"): buckets * STEPS,
                ("parameters", "fused"): buckets * (STEPS + (case.options["overlap_param_gather"])),
            }, case
            counts.append(buckets)
    return counts


def test_two_replicas_end_with_megatrons_bits(ranks) -> None:
    cases = [
        NEITHER,
        NEITHER.but(BF16),
        NEITHER.but(BF16 | HALF_SUMS),
        BOTH.but(GATHERED_LATE),
        BOTH,
        BOTH.but(BF16),
        BOTH.but(BF16 | UNCLIPPED, microbatches=2),
        replace(BOTH, frozen="fc1"),
        replace(BOTH, launch="--commfuse-dp --commfuse-chunks 3"),
    ]
    for counts in ranks(2).run(compared, cases):
        # Only with overlapped gradients does Megatron make more than one bucket.
        assert [count > 1 for count in counts] == [False] * 3 + [True] * 6


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
@on_ranks(2)
def test_ranks_that_began_something_else_change_no_weight(
    rank: int, distributed: bool, bf16: bool
) -> None:
    """Ranks compare the operations they began before Megatron's optimizers step."""
    transport = Transport.create(timeout=PATIENT)
    case = NEITHER.but({"bf16": bf16, "use_distributed_optimizer": distributed})
    with layout(case):
        trainer = Trainer(case)
        transport.agree("layer", {"rows": 4})
        trainer.run(1)
        bits = trainer.sha256()
        transport.agree("layer", {"rows": 4 + rank})
        with pytest.raises(MismatchError, match=r"layer: rank .* rows: "):
            trainer.step()
        assert trainer.sha256() == bits


class PlantedError(Exception):
    pass


def plant(trainer: Trainer, how: Callable[[], None]) -> None:
    """A failure before the second bucket group starts, or after all gradients are summed on every
    rank, so that only the exchange before the step can tell the others."""
    if how is die:
        group = trainer.models[0].bucket_groups[1]
        start = group.start_grad_sync
        group.start_grad_sync = lambda: (how(), start())
    else:
        group = trainer.models[0].bucket_groups[-1]
        finish = group.finish_grad_sync
        group.finish_grad_sync = lambda: (finish(), how())


def raise_it() -> None:
    raise PlantedError


def die() -> None:
    os._exit(1)


def failing(rank: int, how: Callable[[], None]) -> tuple[str, bool]:
    """Result of a rank: the type of its error, and whether its bits are unchanged.

    Broken process groups are left behind; the ranks have to be ended.
    """
    case = BOTH.but(UNCLIPPED | {"distributed_timeout_minutes": IMPATIENT})
    with layout(case), launched(case):
        trainer = Trainer(case)
        trainer.run(2)
        if rank == 1:
            plant(trainer, how)
        before, kind = trainer.sha256(), "none"
        try:
            trainer.step()
        except (PlantedError, TransportError, RuntimeError) as error:
            kind = type(error).__name__
        return kind, trainer.sha256() == before


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
        assert own.value == ("PlantedError", True), own
    for outcome in outcomes:
        assert outcome.value == ("TransportError", True), outcomes
