"""Iterations of the CPU pretraining, Megatron's own groups and all, on an emulated HCCL."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import torch.distributed as dist

from commfuse_npu.proof.verify_log import files_of, verify_logs
from commfuse_npu.runtime.order_log import shared_order_log
from scripts.cpu_pretraining.__main__ import main
from scripts.free_port import free_port
from tests.emulator.settings import Settings

TINY = (
    "--fp32 --num-layers 1 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 "
    "--num-query-groups 2 --seq-length 32 --micro-batch-size 2 --global-batch-size 4 "
    "--train-iters 3 --lr-warmup-iters 1 --eval-interval 0 --save-interval 0 "
    "--distributed-timeout-minutes 1 --commfuse-chunks 2"
)
TP = "--tensor-model-parallel-size 2 --sequence-parallel"
DP = (
    "--tensor-model-parallel-size 1 --data-parallel-size 2 --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather --commfuse-dp --ddp-bucket-size 3000"
)


def pretrained(rank: int, backend: str, layout: str, runs: str, port: int) -> tuple[int, str]:
    """The exit code of a training in this process, and what it printed."""
    if dist.is_initialized():
        dist.destroy_process_group()  # the training makes its own
    os.environ["MASTER_PORT"] = str(port)
    options = [*TINY.split(), *layout.split(), "--distributed-backend", backend]
    log = f"{runs}/order on {backend}"
    options += ["--runs-dir", runs, "--name", backend, "--commfuse-order-log", log]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(options)
    shared_order_log(log, rank, 2).close()  # this process ends without a word
    return code, printed.getvalue()


def weights(outcomes: list[tuple[int, str]]) -> str:
    (code, printed), (other_code, _) = outcomes
    assert (code, other_code) == (0, 0), printed
    assert re.search(r": [1-9]\d* (forward calls|buckets) fused", printed), "nothing was compared"
    found = re.search(r"^sha256 of all weights: (\w{64})$", printed, re.MULTILINE)
    assert found, printed
    return found.group(1)


@pytest.fixture(scope="module")
def own(request: pytest.FixtureRequest) -> Any:
    """Processes that nothing else uses: the training destroys their group and makes others."""
    from tests.distributed.ranks import Ranks
    from tests.emulator.emulated_ranks import EmulatedRanks

    gloo, emulated = Ranks(2), EmulatedRanks(2)
    yield gloo, emulated
    gloo.kill()
    emulated.kill()


@pytest.mark.long
@pytest.mark.parametrize("layout", [TP, DP], ids=["tensor-parallel", "replicas"])
def test_a_training_has_the_weights_that_it_has_on_gloo(
    own: Any, tmp_path: Path, layout: str
) -> None:
    gloo, emulated = own
    emulated.settings = Settings(max_delay=0.0003, seed=1)
    hashes = [
        weights(ranks.run(pretrained, backend, layout, str(tmp_path), free_port()))
        for ranks, backend in ((gloo, "gloo"), (emulated, "emulated_hccl"))
    ]
    assert hashes[0] == hashes[1]
    for backend in ("gloo", "emulated_hccl"):
        found = verify_logs(files_of([tmp_path / f"order on {backend}"]))
        assert (found.faults, found.notes) == ([], [])
        assert found.operations > 30
