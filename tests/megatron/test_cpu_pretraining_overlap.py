"""Trainings with forward-backward overlap, of Megatron's layers and of fused ones."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu.proof.verify_log import files_of, verify_logs
from scripts.cpu_pretraining.arguments import parse_arguments
from scripts.cpu_pretraining.usage_error import UsageError
from tests.megatron.in_ranks import pretrained, recorded

OVERLAP = ("--train-iters", "4", "--eval-interval", "0", "--commfuse-fb-overlap")


@pytest.mark.parametrize("options", [(), ("--recompute", "--no-gradient-accumulation-fusion")])
def test_bits_of_megatrons_own_order(ranks, tmp_path: Path, options: tuple[str, ...]) -> None:
    printed = pretrained(ranks(2), tmp_path, *OVERLAP, "--compare", *options).out
    assert "forward-backward overlap: 3 of 4 forwards of stage 0 run beside a backward" in printed
    assert printed.splitlines()[-1] == "identical: True"


def test_layers_are_fused_where_a_micro_batch_has_no_partner(ranks, tmp_path: Path) -> None:
    fused = pretrained(ranks(2), tmp_path, "--name", "fused", *OVERLAP)
    plain = pretrained(ranks(2), tmp_path, "--name", "plain", *OVERLAP, "--plain")
    assert fused.weights == plain.weights
    # Two layers; of four micro-batches of an iteration the first one has no partner.
    assert "qkv: 8 forward calls fused" in fused.out
    beside = "because the micro-batch beside this one hides its transfers"
    assert f"qkv: 24 forward calls by Megatron, {beside}" in fused.out


def test_the_order_of_collectives_is_recorded_and_proved(ranks, tmp_path: Path) -> None:
    log = tmp_path / "order log"
    words = (*OVERLAP, "--no-use-commfuse", "--commfuse-order-log", str(log))
    pretrained(ranks(2), tmp_path, *words, work=recorded)
    found = verify_logs(files_of([log]))
    assert (found.faults, found.notes) == ([], [])
    # Two ranks, four iterations of three pairs, each of 28 collectives.
    assert found.operations == 2 * 4 * 3 * 28


def test_a_trace_is_of_fused_layers(tmp_path: Path) -> None:
    words = [*OVERLAP, "--trace", str(tmp_path / "trace.json")]
    with pytest.raises(UsageError, match="leave one of the two out"):
        parse_arguments(words, world_size=2)
