"""A rank: joins Megatron's groups, and trains whenever it is asked to."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from threading import Event

import torch.distributed as dist
from megatron.core import parallel_state

from commfuse_npu.runtime.order_log import shared_order_log
from mindspeed_patches.refusals import IncompatibleOptionsError

from .arguments import UsageError
from .checkpoint import CheckpointError
from .data import Corpus
from .megatron_on_cpu import megatron_on_cpu
from .metrics import Outcome
from .training import TrainingDivergedError, train

__all__ = ["Worker"]


class Worker:
    """What `commfuse_npu.tools.ranks.Ranks` asks on each rank.

    SIGTERM is a request to stop after the running iteration. It reaches the ranks at different
    moments, or only one of them, so each remembers it, and they decide together.
    """

    def __init__(self) -> None:
        self._stop = Event()
        signal.signal(signal.SIGTERM, lambda *_: self._stop.set())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def train(
        self, args: argparse.Namespace, corpus: Corpus, mode: str, folder: Path, found: Path | None
    ) -> Outcome:
        """`train` in Megatron's groups, which the first call makes; expected errors are said."""
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=args.tensor_model_parallel_size,
                context_parallel_size=args.context_parallel_size,
                distributed_timeout_minutes=args.distributed_timeout_minutes,
            )
        try:
            with megatron_on_cpu():
                return train(args, corpus, mode, folder, found, self._stop)
        except (CheckpointError, TrainingDivergedError) as error:
            return Outcome(error=str(error), code=1)
        except (IncompatibleOptionsError, UsageError) as error:
            return Outcome(error=str(error), code=2)

    def close_order_log(self, folder: str) -> None:
        """Write its last line: a rank that is ended is not asked any more."""
        shared_order_log(folder, dist.get_rank(), dist.get_world_size()).close()
