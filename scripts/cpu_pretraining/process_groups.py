"""torch's and Megatron's process groups, for as long as the run lasts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state

__all__ = ["process_groups"]


@contextmanager
def process_groups(args: argparse.Namespace) -> Iterator[None]:
    """Join the world that torchrun started and make tensor-, context- and data-parallel groups.

    A rank that dies makes the others fail in their collective, at the latest after
    `--distributed-timeout-minutes`.
    """
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    dist.init_process_group(args.distributed_backend, timeout=timeout)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            distributed_timeout_minutes=args.distributed_timeout_minutes,
        )
        yield
        # Only on the way out without an error: nobody waits for a rank that failed.
        dist.barrier()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
