"""Megatron in the processes of a test: its groups, wrappers in force, and whole trainings."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from commfuse_npu.runtime.order_log import shared_order_log
from mindspeed_patches import PatchManager
from scripts.free_port import free_port
from tests.distributed.ranks import Ranks

__all__ = ["TINY", "Finished", "losses", "megatron", "patched", "pretrained", "pretraining",
           "recorded"]  # fmt: skip

TINY = (
    "--fp32 --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 "
    "--num-query-groups 2 --seq-length 32 --micro-batch-size 2 --global-batch-size 8 "
    "--train-iters 6 --lr-warmup-iters 1 --eval-interval 3 --eval-iters 1 --save-interval 3 "
    "--distributed-timeout-minutes 2"
)
"""Options of the CPU pretraining; what comes after them takes their place."""


@contextlib.contextmanager
def megatron(
    tensor_parallel: int = 1, context_parallel: int = 1, minutes: float = 1, **layout: int | None
) -> Iterator[None]:
    """Parallel state of the real Megatron; what is left of the ranks are replicas.

    Args:
        layout: more sizes, as Megatron names them.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from scripts.cpu_pretraining.megatron_on_cpu import cuda_means_cpu, megatron_on_cpu

    warnings.simplefilter("ignore")
    parallel_state.initialize_model_parallel(
        tensor_parallel,
        context_parallel_size=context_parallel,
        distributed_timeout_minutes=minutes,
        **layout,
    )
    try:
        with megatron_on_cpu(), cuda_means_cpu():
            model_parallel_cuda_manual_seed(1)
            yield
    finally:
        parallel_state.destroy_model_parallel()
        # Megatron leaves these, and takes them for the next layout's.
        parallel_state._EMBEDDING_GLOBAL_RANKS = None
        parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None


@contextlib.contextmanager
def patched(manager: PatchManager) -> Iterator[None]:
    """What is registered is in force."""
    manager.apply_patches()
    try:
        yield
    finally:
        manager.remove_patches()


@dataclass(frozen=True)
class Finished:
    """How the command line of the CPU pretraining ended, and what rank 0 printed."""

    code: int
    out: str
    err: str

    @property
    def weights(self) -> str:
        """SHA-256 over all of them."""
        found = re.search(r"^sha256 of all weights: (\w{64})$", self.out, re.MULTILINE)
        assert found, self.out + self.err
        return found[1]


Work = Callable[[int, int, list[str]], Finished]


def pretraining(rank: int, port: int, argv: list[str]) -> Finished:
    """The command line of the CPU pretraining, on one rank."""
    from scripts.cpu_pretraining.__main__ import main

    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    return Finished(code, out.getvalue(), err.getvalue())


def recorded(rank: int, port: int, argv: list[str]) -> Finished:
    """The same with an order log, which is closed: the process goes on."""
    done = pretraining(rank, port, argv)
    shared_order_log(argv[argv.index("--commfuse-order-log") + 1], rank, 2).close()
    return done


def pretrained(
    group: Ranks, runs: Path, *options: str, code: int = 0, work: Work = pretraining
) -> Finished:
    """``work`` on all ranks of a group, with :data:`TINY` and more options.

    The ranks are of use for other trainings only: each makes process groups of its own.
    """
    data = Path(__file__).resolve().parents[2] / "commfuse_npu"
    argv = [*TINY.split(), "--data-path", str(data), *options, "--runs-dir", str(runs)]
    outcomes = group.run(work, free_port(), argv)
    assert {one.code for one in outcomes} == {code}, outcomes[0]
    return outcomes[0]


def losses(run: Path) -> list[float]:
    """Of the iterations in a run's folder."""
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    return [entry["lm_loss"] for entry in map(json.loads, lines) if "lm_loss" in entry]
