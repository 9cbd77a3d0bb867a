"""Which form linear layers, attention under Ulysses and data parallelism take in a run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from commfuse_npu import Schedule
from mindspeed_patches import LinearWrappers, PatchManager
from mindspeed_patches.all_wrappers import register_wrappers
from mindspeed_patches.arguments import commfuse_options
from mindspeed_patches.lanes import DataParallelLanes, Lanes
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
        counted = (lanes for lanes in self.lanes if not isinstance(lanes, DataParallelLanes))
        return sum(lanes.user.lanes().blocked_seconds for lanes in counted)

    def describe(self) -> list[str]:
        """Which layers took which path, and by which schedule, for people."""
        if self.wrappers is None:
            return ["tensor-parallel linear layers: Megatron's own"]
        said = [f"tensor-parallel linear layers: {self.mode}, plan: {self.schedule}"]
        return said + [f"  {line}" for line in self.wrappers.describe()]


@contextmanager
def patched_layers(mode: str, args: argparse.Namespace) -> Iterator[Layers]:
    """Patch Megatron's layers for ``mode`` (see ``train``), and undo it at the end.

    A collective over all processes, like the set-up of groups: enter it after
    ``initialize_model_parallel`` and before the model is built.
    """
    options = commfuse_options(args)
    schedule = options.linear.schedule
    if mode in ("megatron", "overlap"):
        yield Layers(mode, schedule)
        return
    manager = PatchManager()
    wrappers, all_lanes, report = register_wrappers(
        manager,
        options,
        form="fused" if mode == "commfuse" else "plain",
        ulysses_attention="scripts.cpu_pretraining.ulysses.UlyssesAttention",
    )
    with ExitStack() as undone:
        for lanes in all_lanes:
            lanes.open(args.distributed_timeout_minutes)
            undone.callback(lanes.close)
        manager.apply_patches()
        undone.callback(manager.remove_patches)
        yield Layers(mode, schedule, wrappers, all_lanes, report if mode == "commfuse" else None)
