"""Which form linear layers, attention under Ulysses and data parallelism take in a run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from commfuse_npu import Schedule, Transport
from mindspeed_patches import LinearWrappers, PatchManager
from mindspeed_patches.all_wrappers import register_wrappers
from mindspeed_patches.arguments import commfuse_options
from mindspeed_patches.lanes import DataParallelLanes, Lanes
from mindspeed_patches.refusals import IncompatibleOptionsError
from mindspeed_patches.start_report import StartReport

from .usage_error import UsageError

__all__ = ["LinearsInUse", "tensor_parallel_linears"]


class LinearsInUse:
    """What the layers of a run report about themselves."""

    def __init__(
        self,
        mode: str,
        schedule: Schedule,
        wrappers: LinearWrappers | None = None,
        lanes: Sequence[Lanes] = (),
        report: StartReport | None = None,
    ) -> None:
        self._mode = mode
        self._schedule = schedule
        self._wrappers = wrappers
        self._lanes = lanes
        self._report = report

    def tell(self, model: torch.nn.Module) -> None:
        """Print what is fused of it. Collective.

        Raises `UsageError` if nothing is.
        """
        if self._report is None or self._mode != "commfuse":
            return
        try:
            self._report.tell([model])
        except IncompatibleOptionsError as error:
            raise UsageError(str(error)) from error

    def blocked_seconds(self) -> float:
        """Time that this rank was blocked in transfers of fused layers since the start.

        Those of data parallelism do not count, as its collectives do not.
        """
        if self._mode != "commfuse":
            return 0.0
        counted = (lanes for lanes in self._lanes if not isinstance(lanes, DataParallelLanes))
        return sum(lanes.user.lanes().blocked_seconds for lanes in counted)

    @property
    def transport(self) -> Transport | None:
        """Of the fused layers; ``None`` if none is."""
        return self._wrappers.transport if self._wrappers and self._mode == "commfuse" else None

    def describe(self) -> list[str]:
        """Which layers took which path, and by which schedule, for people."""
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

    Args:
        mode: ``megatron`` for Megatron's own layers; ``plain`` for the plain collectives with the
            fused form's GEMMs; ``commfuse`` for the fused form.
    """
    options = commfuse_options(args)
    schedule = options.linear.schedule
    if mode == "megatron":
        yield LinearsInUse(mode, schedule)
        return
    manager = PatchManager()
    wrappers, all_lanes, report = register_wrappers(
        manager,
        options,
        form="fused" if mode == "commfuse" else "plain",
        ulysses_attention="scripts.cpu_pretraining.ulysses.UlyssesAttention",
    )
    for lanes in all_lanes:
        lanes.open(args.distributed_timeout_minutes)
    manager.apply_patches()
    try:
        yield LinearsInUse(mode, schedule, wrappers, all_lanes, report)
    finally:
        manager.remove_patches()
        for lanes in all_lanes:
            lanes.close()
