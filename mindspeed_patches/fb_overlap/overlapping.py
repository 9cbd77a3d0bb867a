"""Replaces Megatron's schedule by the overlapped one, if a watched first step allows it."""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.overlap import ForwardBackwardOverlap
from commfuse_npu.overlap.pair import enabled_by_environment
from commfuse_npu.plan.slots import (
    in_flight_without,
    most_in_flight,
    paired_microbatches,
    slots,
)
from commfuse_npu.runtime.order_log import shared_order_log
from mindspeed_patches.fb_overlap.core_versions import Layout, obstacle
from mindspeed_patches.fb_overlap.recomputation import Recomputation
from mindspeed_patches.fb_overlap.schedule import OverlappedSchedule
from mindspeed_patches.fb_overlap.side_states import Census, separate_scratch, side_states
from mindspeed_patches.patching import PatchManager, around

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_logger = logging.getLogger(__name__)


class Overlapping:
    """Replaces the training schedule of Megatron core 0.12 to 0.16.  Without MindSpeed::

        Overlapping().start()  # on all ranks, before the first step

    The first step runs in Megatron's order while the census watches it; all ranks then decide
    together whether later steps overlap.  On a device one more step in Megatron's order and two
    overlapped steps are timed, and the faster way is kept: where the host is the bottleneck,
    overlap gains nothing.

    Args:
        plain_pipelines: also overlap in a pipeline of ``p`` stages without virtual stages.  Its
            first stage then holds the activations of up to ``2 p - 1`` micro-batches, not ``p``.
        order_log: a folder in which to record the order of collectives.

    Attributes:
        overlap: runs the pairs; ``None`` before the second step, and if the overlap was refused.
        clock: returns seconds after synchronizing the device; ``None`` on a CPU, where ranks share
            cores and times are not meaningful.
    """

    def __init__(self, *, plain_pipelines: bool = False, order_log: str | None = None) -> None:
        self._plain_pipelines, self._order_log = plain_pipelines, order_log
        self._patches = PatchManager()
        self.overlap: ForwardBackwardOverlap | None = None
        self.clock: Callable[[], float] | None = None
        self.recomputation = Recomputation()
        self._decided = False
        self._tried: list[float] = []
        self._said: set[str] = set()

    def start(self) -> None:
        """Wrap ``get_forward_backward_func``, also in modules that already imported it."""
        self.register(self._patches)
        self._patches.apply_patches()

    def stop(self) -> None:
        """Undo :meth:`start`."""
        self._patches.remove_patches()

    def register(self, patch_manager: Any) -> None:
        """Like :meth:`start`, but through MindSpeed's patch manager."""
        path = f"{_SCHEDULES}.get_forward_backward_func"
        patch_manager.register_patch(path, self.get_forward_backward_func_wrapper)
        if enabled_by_environment():
            self.recomputation.register(patch_manager)

    @around
    def get_forward_backward_func_wrapper(
        self, get: Callable[..., Callable[..., Any]], *args: Any, **kwargs: Any
    ) -> Callable[..., Any]:
        """Wrap the schedule that Megatron chooses."""
        plain = get(*args, **kwargs)
        return functools.wraps(plain)(lambda **step: self._run(plain, step))

    def _run(self, plain: Callable[..., Any], step: dict[str, Any]) -> Any:
        if step.get("forward_only"):
            return plain(**step)
        losses = self._train(plain, step)
        if (left_out := self.recomputation.describe()) is not None:
            self._say(left_out)
        return losses

    def _train(self, plain: Callable[..., Any], step: dict[str, Any]) -> Any:
        reason = self._obstacle(plain, step)
        if reason is not None:
            self._say(f"off: {reason}")
            return plain(**step)
        if not self._decided:
            return self._watched(plain, step)
        overlap, clock = self.overlap, self.clock
        if overlap is None:
            return plain(**step)
        if clock is None or len(self._tried) == 3:
            return _overlapped(overlap, step)
        start = clock()
        losses = _overlapped(overlap, step) if self._tried else plain(**step)
        self._tried.append(clock() - start)
        if len(self._tried) == 3:
            self._keep_the_faster(overlap)
        return losses

    def _obstacle(self, plain: Callable[..., Any], step: dict[str, Any]) -> str | None:
        """Why this step cannot be overlapped; ``None`` if it can."""
        from megatron.core import utils

        if inspect.unwrap(plain).__module__ != _SCHEDULES:
            return f"the schedule is {plain.__module__}.{plain.__qualname__}, not Megatron's own"
        layout = Layout(step)
        models, stages = layout.models, layout.stages
        config = utils.get_model_config(models[0])
        reason = obstacle(step, models, config)
        if reason is not None:
            return reason
        # A model of MindSpeed-LLM's fine-tuning has no type.
        if getattr(utils.get_model_type(models[0]), "name", None) == "encoder_and_decoder":
            return "a model of encoder and decoder sends two tensors per stage"
        if step["num_microbatches"] * len(models) < 2:
            return "one micro-batch has no partner"
        if len(models) > 1 and config.microbatch_group_size_per_vp_stage != stages:
            return (
                f"--microbatch-group-size-per-virtual-pipeline-stage is "
                f"{config.microbatch_group_size_per_vp_stage}; it has to be the {stages} stages"
            )
        if len(models) == 1 < stages and not self._plain_pipelines:
            return f"{plain_pipeline_memory(stages)}; plain_pipelines=True allows that"
        try:
            slots(*layout.shape(step["num_microbatches"]))
        except ValueError as error:
            return str(error)
        return None

    def _keep_the_faster(self, overlap: ForwardBackwardOverlap) -> None:
        """Decide on all ranks by the times of a step in Megatron's order and the second of two."""
        slowest = torch.tensor(self._tried, device=overlap.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        in_order, _, overlapped = (1e3 * seconds for seconds in slowest.tolist())
        compared = f"a step took {overlapped:.1f} ms, {in_order:.1f} ms in Megatron's order"
        if overlapped >= in_order:
            self.overlap = None
            compared = f"off: {compared}; the host, not the transfers, is probably the limit"
        self._say(compared)

    def _watched(self, plain: Callable[..., Any], step: dict[str, Any]) -> Any:
        """Run the first step under the census, and decide whether later steps overlap."""
        self._decided = True
        layout = Layout(step)
        groups = layout.hidden()
        if not groups:
            self._say("off: no tensor, expert or context parallelism, so nothing to hide")
            return plain(**step)
        log = None
        if self._order_log is not None:
            log = shared_order_log(self._order_log, dist.get_rank(), dist.get_world_size())
        overlap = ForwardBackwardOverlap(groups, order_log=log)
        census = Census(overlap, layout.models)
        losses = OverlappedSchedule(census, **step).run()
        count = torch.tensor([len(census.unknown)], device=overlap.device)
        dist.all_reduce(count, dist.ReduceOp.MAX)
        if census.unknown:
            _logger.warning(
                "CommFuse: forward and backward both write %s", ", ".join(census.unknown)
            )
        if int(count.item()):
            self._say(
                "off: forward and backward both write state that is not known to belong to a "
                "micro-batch (the ranks that found it name it); the training goes on without it"
            )
            return losses
        separate_scratch()
        overlap.states = side_states(layout.models, overlap.device)
        overlap.choose_orders()
        self.overlap = overlap
        if overlap.device != "cpu":
            self.clock = _synchronised_clock(overlap.device)
        shape = layout.shape(step["num_microbatches"])
        plan = slots(*shape)
        paired, total = paired_microbatches(plan)
        self._say(
            f"{paired} of {total} forwards of stage {layout.stage} run beside a backward; it holds "
            f"the activations of at most {most_in_flight(plan)} forwards, instead of "
            f"{in_flight_without(*shape)}"
        )
        return losses

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            if dist.get_rank() == 0:
                print(f"CommFuse: forward-backward overlap: {line}", flush=True)


def plain_pipeline_memory(stages: int) -> str:
    """The cost of overlap in a pipeline without virtual stages."""
    return (
        f"a pipeline of {stages} stages without virtual stages holds the activations of up to "
        f"{2 * stages - 1} micro-batches on the first stage, instead of {stages}"
    )


def _overlapped(overlap: ForwardBackwardOverlap, step: dict[str, Any]) -> Any:
    losses = OverlappedSchedule(overlap, **step).run()
    overlap.check()
    return losses


def _synchronised_clock(device: str) -> Callable[[], float]:
    module = torch.get_device_module(device)

    def clock() -> float:
        module.synchronize()
        return time.perf_counter()

    return clock
