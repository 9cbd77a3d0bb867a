"""Megatron's distributed optimizer with CommFuse's transfers of its buckets, or collectives."""

from dataclasses import replace

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu import MismatchError, Transport
from tests.distributed.ranks import on_ranks
from tests.limits import PATIENT
from tests.megatron.models import BF16, DISTRIBUTED, Case
from tests.megatron.training import Trainer, launched, layout

STEPS = 3
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
