"""Which form the tensor-parallel linear layers take in a run."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from megatron.core import parallel_state

from commfuse_npu import Schedule, Transport
from commfuse_npu.ops import LinearOptions
from mindspeed_patches import LinearWrappers, PatchManager
from mindspeed_patches.wrappers import Form

__all__ = ["MODES", "LinearsInUse", "tensor_parallel_linears"]

MODES = ("megatron", "plain", "commfuse")
"""Megatron's own layers; the plain collectives with the fused form's GEMMs; the fused form."""


class LinearsInUse:
    """What the layers of a run report about themselves."""

    def __init__(self, mode: str, wrappers: LinearWrappers | None, schedule: Schedule) -> None:
        self._mode = mode
        self._wrappers = wrappers
        self._schedule = schedule

    def blocked_seconds(self) -> float:
        """Time that this rank was blocked in transfers of fused layers since the start."""
        transport = self._wrappers.transport if self._wrappers else None
        return transport.blocked_seconds if transport and self._mode == "commfuse" else 0.0

    def describe(self) -> list[str]:
        """Which layers took which path, and by which plan, for people."""
        if self._wrappers is None:
            return ["tensor-parallel linear layers: Megatron's own"]
        return [
            f"tensor-parallel linear layers: {self._mode}, plan: {self._schedule}",
            *(f"  {line}" for line in self._wrappers.describe()),
        ]


@contextmanager
def tensor_parallel_linears(mode: str, args: argparse.Namespace) -> Iterator[LinearsInUse]:
    """Patch Megatron's linear layers for ``mode``, and undo it at the end.

    A collective over all processes, like the set-up of groups: enter it after
    ``initialize_model_parallel`` and before the model is built.

    Raises:
        ValueError: an unknown mode or option.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is unknown; choose one of {', '.join(MODES)}")
    schedule = _schedule(args)
    if mode == "megatron":
        yield LinearsInUse(mode, None, schedule)
        return
    options = LinearOptions(
        schedule=schedule,
        keep_gathered=args.commfuse_keep_gathered,
        reduce_dtype=torch.float32 if args.commfuse_reduce_dtype == "float32" else None,
        wgrad=args.commfuse_wgrad,
    )
    form: Form = "fused" if mode == "commfuse" else "plain"
    wrappers = LinearWrappers(options, args.commfuse_layers, form)
    manager = PatchManager()
    wrappers.register(manager)
    wrappers.transport = Transport.create(
        parallel_state.get_tensor_model_parallel_group(),
        lanes=schedule.lanes,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
    )
    manager.apply_patches()
    try:
        yield LinearsInUse(mode, wrappers, schedule)
    finally:
        manager.remove_patches()
        wrappers.transport.close()


def _schedule(args: argparse.Namespace) -> Schedule:
    """``auto``: two_level if a tensor-parallel group spans nodes, else shifted."""
    size = args.tensor_model_parallel_size
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    spans_nodes = local < size and size % local == 0
    shape = args.commfuse_schedule
    if shape == "auto":
        shape = "two_level" if spans_nodes else "shifted"
    return Schedule(
        shape=shape,
        lanes=args.commfuse_lanes,
        chunks=args.commfuse_chunks,
        order=args.commfuse_order,
        node_size=min(local, size) if shape == "two_level" else None,
    )
