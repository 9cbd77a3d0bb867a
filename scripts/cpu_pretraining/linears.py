"""Which form linear layers, attention under Ulysses and data parallelism take in a run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from megatron.core import parallel_state

from commfuse_npu import Schedule, Transport
from commfuse_npu.runtime.order_log import shared_order_log
from mindspeed_patches import LinearWrappers, PatchManager
from mindspeed_patches.arguments import commfuse_options
from mindspeed_patches.attention import AttentionWrappers
from mindspeed_patches.data_parallel import BucketWrappers
from mindspeed_patches.ulysses import UlyssesWrappers
from mindspeed_patches.wrappers import Form

__all__ = ["MODES", "LinearsInUse", "tensor_parallel_linears"]

MODES = ("megatron", "plain", "commfuse")
"""Megatron's own layers; the plain collectives with the fused form's GEMMs; the fused form."""


class LinearsInUse:
    """What the layers of a run report about themselves."""

    def __init__(
        self,
        mode: str,
        wrappers: LinearWrappers | None,
        schedule: Schedule,
        ulysses: UlyssesWrappers | None = None,
    ) -> None:
        self._mode = mode
        self._wrappers = wrappers
        self._schedule = schedule
        self._ulysses = ulysses

    def blocked_seconds(self) -> float:
        """Time that this rank was blocked in transfers of fused layers since the start.

        Those of data parallelism do not count, as its collectives do not.
        """
        if self._mode != "commfuse":
            return 0.0
        users = (self._wrappers, self._ulysses)
        transports = [user.transport for user in users if user is not None]
        return sum(lanes.blocked_seconds for lanes in transports if lanes is not None)

    @property
    def transport(self) -> Transport | None:
        """Of the fused layers; ``None`` if none is."""
        return self._wrappers.transport if self._wrappers and self._mode == "commfuse" else None

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
    options = commfuse_options(args)
    schedule = options.linear.schedule
    if mode == "megatron":
        yield LinearsInUse(mode, None, schedule)
        return
    form: Form = "fused" if mode == "commfuse" else "plain"
    wrappers = LinearWrappers(options.linear, options.layers, form, options.min_bytes)
    manager = PatchManager()
    wrappers.register(manager)
    if options.attention:
        AttentionWrappers(wrappers).register(manager)
    log = None
    if options.order_log is not None and form == "fused":
        log = shared_order_log(options.order_log, dist.get_rank(), dist.get_world_size())
    create = partial(
        Transport.create, timeout=timedelta(minutes=args.distributed_timeout_minutes), order_log=log
    )
    wrappers.transport = create(
        parallel_state.get_tensor_model_parallel_group(), lanes=schedule.lanes
    )
    transports, ulysses = [wrappers.transport], None
    if options.ulysses is not None:
        ulysses = UlyssesWrappers(wrappers, options.ulysses, form)
        ulysses.register(manager, "scripts.cpu_pretraining.ulysses.UlyssesAttention")
        ulysses.transport = create(
            parallel_state.get_context_parallel_group(), lanes=options.ulysses.schedule.lanes
        )
        transports.append(ulysses.transport)
    if options.data_parallel is not None:
        buckets = BucketWrappers(wrappers, options.data_parallel, form)
        buckets.register(manager)
        group = parallel_state.get_data_parallel_group(
            with_context_parallel=True, partial_data_parallel=True
        )
        for direction in (buckets.gradients, buckets.parameters):
            direction.transport = create(group, lanes=options.data_parallel.schedule.lanes)
            transports.append(direction.transport)
    manager.apply_patches()
    try:
        yield LinearsInUse(mode, wrappers, schedule, ulysses)
    finally:
        manager.remove_patches()
        for transport in transports:
            transport.close()
