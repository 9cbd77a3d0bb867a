"""Which form linear layers, attention under Ulysses and data parallelism take in a run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from commfuse_npu import Schedule
from commfuse_npu.runtime.collective_transport import CollectiveTransport
from mindspeed_patches import LinearWrappers, PatchManager
from mindspeed_patches.all_wrappers import register_wrappers
from mindspeed_patches.arguments import commfuse_options
from mindspeed_patches.lanes import DATA_PARALLEL, Lanes
from mindspeed_patches.start_report import StartReport

__all__ = ["Layers", "patched_layers"]


@dataclass(frozen=True)
class Layers:
    """What the layers of a run report about themselves; without wrappers they are Megatron's.

    Attributes:
        report: says what is fused when the model is made.
    """

    mode: str
    schedule: Schedule
    wrappers: LinearWrappers | None = None
    lanes: Sequence[Lanes] = ()
    report: StartReport | None = None

    def blocked_seconds(self) -> float:
        """Time that this rank was blocked in transfers of fused layers since the start.

        Those of data parallelism do not count, as its collectives do not.
        """
        if self.mode != "commfuse":
            return 0.0
        counted = (lanes for lanes in self.lanes if lanes.group is not DATA_PARALLEL)
        transports: list[Any] = [lanes.user.lanes() for lanes in counted]
        return sum(transport.blocked_seconds for transport in transports)

    def describe(self) -> list[str]:
        """Which layers took which path, and by which schedule, for people."""
        if self.wrappers is None:
            return ["tensor-parallel linear layers: Megatron's own"]
        said = [f"tensor-parallel linear layers: {self.mode}, plan: {self.schedule}"]
        path = {"plain": "by collectives"}.get(self.mode, "fused")
        lines = (line.replace(" fused", f" {path}") for line in self.wrappers.describe())
        return said + [f"  {line}" for line in lines]


@contextmanager
def patched_layers(mode: str, args: argparse.Namespace) -> Iterator[Layers]:
    """Patch Megatron's layers for ``mode`` (see ``train``), and undo it at the end.

    The plain form runs the fused ops on collectives, and leaves buckets to Megatron's.

    A collective over all processes, like the set-up of groups: enter it after
    ``initialize_model_parallel`` and before the model is built.
    """
    options = commfuse_options(args)
    schedule = options.linear.schedule
    if mode in ("megatron", "overlap"):
        yield Layers(mode, schedule)
        return
    manager = PatchManager()
    if mode == "plain":
        options = replace(options, data_parallel=None, order_log=None)
    wrappers, all_lanes, report = register_wrappers(
        manager,
        options,
        ulysses_attention="scripts.cpu_pretraining.ulysses.UlyssesAttention",
    )
    with ExitStack() as undone:
        for lanes in all_lanes:
            lanes.open(args.distributed_timeout_minutes)
            undone.callback(lanes.close)
            if mode == "plain":
                group = lanes.user.lanes().group
                lanes.user.transport = CollectiveTransport(group, same_pieces=True)
        manager.apply_patches()
        undone.callback(manager.remove_patches)
        yield Layers(mode, schedule, wrappers, all_lanes, report if mode == "commfuse" else None)
