"""Lets the passes of a Megatron training take turns, if its watched first step allows it."""

from __future__ import annotations

import functools
import inspect
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from commfuse_npu.overlap import ForwardBackwardOverlap
from commfuse_npu.overlap.forward_backward import enabled_by_environment
from commfuse_npu.overlap.transfers import active_turns
from commfuse_npu.plan.slots import (
    in_flight_without,
    most_in_flight,
    paired_microbatches,
    recomputes_all,
    slots,
)
from commfuse_npu.runtime.order_log import shared_order_log
from mindspeed_patches.core_pieces import first_difference
from mindspeed_patches.fb_overlap.core_versions import (
    PIECES,
    StepLayout,
    alone,
    groups_obstacle,
    obstacle,
)
from mindspeed_patches.fb_overlap.first_step import FirstStep
from mindspeed_patches.fb_overlap.gradient_check import checked_step, has_gradients
from mindspeed_patches.fb_overlap.late_weight_gradients import WeightGradientDeferral
from mindspeed_patches.fb_overlap.pass_states import pass_states, separate_scratch
from mindspeed_patches.fb_overlap.pipeline_schedule import OverlappedSchedule
from mindspeed_patches.fb_overlap.recomputation import Recomputation
from mindspeed_patches.patching import Function, PatchManager, around, register, replaced

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_WAITS_OF_EXPERTS = (
    "megatron.core.transformer.moe.",
    "mindspeed.core.transformer.moe.",
    "mindspeed_llm.core.transformer.moe.",
)
"""Modules in which the host waits for the token counts of experts, on all ranks."""
_WARM_UP = 1
_EACH_WAY = 3
"""Overlapped steps before steps are timed, and steps timed each way, alternately."""


@dataclass
class _Training:
    """What was decided for a model that overlaps.

    Attributes:
        overlap: runs the passes.
        first_step: watches the first step, then ``None``.
        alone: why no forward runs beside a backward, as the census found.
        ahead: whether recomputations run ahead.
        checked: whether its gradients were compared with Megatron's order.
        reported: whether it was said what is hidden.
        steps: seconds per micro-batch of the steps that were timed.
    """

    overlap: ForwardBackwardOverlap
    first_step: FirstStep | None
    alone: str | None = None
    ahead: bool = False
    checked: bool = False
    reported: bool = False
    steps: list[float] = field(default_factory=list)


class Overlapping:
    """Overlaps the transfers of a training with Megatron core 0.12 to 0.19.  Without MindSpeed::

        Overlapping().start()  # on all ranks, before the first step

    Where a micro-batch has a partner, its forward runs beside the backward of another one, in a
    schedule of its own.  In any schedule, recomputations run ahead of gradients.

    The first step runs in Megatron's order while a census watches it; all ranks then decide
    together whether later steps overlap.  On a device, steps are timed each way and the faster one
    is kept: where the host is the bottleneck, overlap gains nothing.

    Args:
        plain_pipelines: also run forwards beside backwards in a pipeline of ``p`` stages without
            virtual stages.  Its first stage then holds the activations of up to ``2 p - 1``
            micro-batches, not ``p``.  Where all layers are recomputed these are only inputs, and
            it is done anyway.
        check: compare the gradients of each model's second step with those of Megatron's order.
        alone: why no forward may run beside a backward, if so.
        order_log: a folder in which to record the order of collectives.

    Attributes:
        recomputation: what recomputations leave out, and run ahead.
        weight_gradients: lets weight gradients wait.
        clock: returns seconds after synchronizing the device; ``None`` on a CPU, where ranks share
            cores and times are not meaningful.
    """

    def __init__(
        self,
        *,
        plain_pipelines: bool = False,
        check: bool = False,
        alone: str | None = None,
        order_log: str | None = None,
    ) -> None:
        self._plain_pipelines = plain_pipelines
        self._check = check
        self._order_log = order_log
        self._always_alone = alone
        self._patches = PatchManager()
        self.clock: Callable[[], float] | None = None
        self.recomputation = Recomputation()
        self.weight_gradients = WeightGradientDeferral()
        # Of the models whose first step is over; ``None``: Megatron's order.
        self._trainings: WeakKeyDictionary[torch.nn.Module, _Training | None] = WeakKeyDictionary()
        self._now: _Training | None = None
        self._said: set[str] = set()

    @functools.cached_property
    def _difference(self) -> str | None:
        """What this version of Megatron core lacks."""
        return first_difference(PIECES)

    @property
    def overlap(self) -> ForwardBackwardOverlap | None:
        """Runs the passes of the first model; ``None`` before its second step, and if refused."""
        first = next(iter(self._trainings.values()), None)
        return None if first is None else first.overlap

    def start(self) -> None:
        """Wrap the schedules, also in modules that already imported them.

        Does nothing, and says why, if this version of Megatron core is not supported.
        """
        if self._difference is not None:
            self._say(f"off: {self._difference}")
            return
        self.register(self._patches)
        self._patches.apply_patches()

    def stop(self) -> None:
        """Undo :meth:`start`."""
        self._patches.remove_patches()

    def register(self, patch_manager: Any) -> None:
        """Like :meth:`start`, but through MindSpeed's patch manager."""
        if not enabled_by_environment():
            return
        steps = self.forward_step_wrapper, self.backward_step_wrapper
        register(patch_manager, _SCHEDULES, self.get_forward_backward_func_wrapper, *steps)
        self.recomputation.register(patch_manager)
        self.weight_gradients.register(patch_manager)

    @around
    def get_forward_backward_func_wrapper(
        self, get: Callable[..., Function], *args: Any, **kwargs: Any
    ) -> Function:
        """Wrap the schedule that Megatron chooses."""
        plain = get(*args, **kwargs)
        return functools.wraps(plain)(lambda **step: self._run(plain, step))

    @around
    def forward_step_wrapper(self, forward: Function, *args: Any, **kwargs: Any) -> Any:
        """Run a forward by itself as a pass, in any schedule."""
        return self._by_itself("forward", functools.partial(forward, *args, **kwargs))

    @around
    def backward_step_wrapper(self, backward: Function, *args: Any, **kwargs: Any) -> Any:
        """Run a backward by itself as a pass, in any schedule."""
        return self._by_itself("backward", functools.partial(backward, *args, **kwargs))

    def _by_itself(self, kind: str, function: Callable[[], Any]) -> Any:
        training = self._now
        if training is None or active_turns() is not None:
            return function()
        if training.first_step is not None:
            return training.first_step.run_pass(kind, function)
        return training.overlap.run_together(**{kind: function})[0]

    def _run(self, plain: Function, step: dict[str, Any]) -> Any:
        if step.get("forward_only"):
            return plain(**step)
        reason = self._difference or groups_obstacle(step)
        if reason is not None:
            self._say(f"off: {reason}")
            return plain(**step)
        layout = StepLayout(step)
        with self.recomputation.leaving_out(layout.models):
            return self._step(plain, layout)

    def _step(self, plain: Function, layout: StepLayout) -> Any:
        step = layout.step
        reason = obstacle(layout.models, layout.config)
        if reason is not None:
            self._say(f"off: {reason}")
            return plain(**step)
        if layout.models[0] not in self._trainings:
            return self._first_step(plain, layout)
        training = self._trainings[layout.models[0]]
        if training is None:
            return plain(**step)
        if self._check and not training.checked and not has_gradients(layout):
            training.checked = True
            states = training.overlap.states
            ours = functools.partial(self._overlapped, plain, layout, training)
            in_order = self.recomputation.complete(plain)
            losses, verdict = checked_step(in_order, ours, layout, states)
            self._say(verdict)
        else:
            losses = self._timed(plain, layout, training)
        for line in (*self.recomputation.describe(), *self.weight_gradients.describe()):
            self._say(line)
        return losses

    def _timed(self, plain: Function, layout: StepLayout, training: _Training) -> Any:
        """Run a step, and time it until it is decided which way is faster."""
        step = layout.step
        number = len(training.steps)
        clock = self.clock
        if clock is None or number == _WARM_UP + 2 * _EACH_WAY:
            return self._overlapped(plain, layout, training, **step)
        start = clock()
        if number >= _WARM_UP and (number - _WARM_UP) % 2 == 0:
            losses = plain(**step)
        else:
            losses = self._overlapped(plain, layout, training, **step)
        training.steps.append((clock() - start) / step["num_microbatches"])
        if len(training.steps) == _WARM_UP + 2 * _EACH_WAY:
            self._keep_the_faster(layout, training)
        return losses

    def _overlapped(
        self, plain: Function, layout: StepLayout, training: _Training, **step: Any
    ) -> Any:
        overlap = training.overlap
        reason = training.alone or self._alone(plain, layout)
        with self._passes_of(training):
            if reason is None:
                losses = OverlappedSchedule(overlap, **step).run()
            else:
                self._say(f"no forward runs beside a backward: {reason}")
                losses = plain(**step)
        overlap.check()
        if not training.reported:
            training.reported = True
            counts = overlap.hand_overs, overlap.waits
            hidden = [f"{counts[0][kind]} of {counts[1][kind]} of {kind}s" for kind in counts[1]]
            self._say(f"in a step, another pass runs beside these transfers: {', '.join(hidden)}")
        return losses

    def _passes_of(self, training: _Training) -> AbstractContextManager[None]:
        """In the block, passes are those of this model."""
        for kind in (self.recomputation.ahead, training.overlap.recompute_ahead):
            kind.enabled = training.ahead
        return replaced(self, _now=training)

    def _alone(self, plain: Function, layout: StepLayout) -> str | None:
        """Why no forward of this step can run beside a backward; ``None`` if it can."""
        if self._always_alone is not None:
            return self._always_alone
        if inspect.unwrap(plain).__module__ != _SCHEDULES:
            return f"the schedule is {plain.__module__}.{plain.__qualname__}, not Megatron's own"
        config = layout.config
        reason = alone(layout)
        if reason is not None:
            return reason
        if len(layout.models) == 1 < layout.stages and not self._plain_pipelines:
            layers = -(-config.num_layers // layout.stages)
            granularity, method, number = (
                getattr(config, f"recompute_{part}", None)
                for part in ("granularity", "method", "num_layers")
            )
            if not recomputes_all(granularity, method, number, layers):
                return (
                    f"a pipeline of {layout.stages} stages without virtual stages holds the "
                    f"activations of up to {2 * layout.stages - 1} micro-batches on the first "
                    f"stage, instead of {layout.stages}; --commfuse-overlap-memory allows that"
                )
        return None

    def _keep_the_faster(self, layout: StepLayout, training: _Training) -> None:
        """Decide on all ranks by the medians of timed steps, for a step of this size."""
        timed = training.steps[_WARM_UP:]
        slowest = layout.maximum(statistics.median(timed[::2]), statistics.median(timed[1::2]))
        milliseconds = 1e3 * layout.step["num_microbatches"]
        in_order, overlapped = (milliseconds * seconds for seconds in slowest)
        compared = f"a step takes {overlapped:.1f} ms, {in_order:.1f} ms in Megatron's order"
        if overlapped >= in_order:
            self._trainings[layout.models[0]] = None
            compared = f"off: {compared}; the host, not the transfers, is probably the limit"
        self._say(compared)

    def _first_step(self, plain: Function, layout: StepLayout) -> list[Any]:
        """Run a model's first step in Megatron's order, watch it, and decide."""
        step = layout.step
        groups = layout.hidden()
        if not groups:
            self._trainings[layout.models[0]] = None
            self._say("off: no tensor, expert or context parallelism, so nothing to hide")
            return plain(**step)
        log = None
        if self._order_log is not None:
            log = shared_order_log(self._order_log, dist.get_rank(), dist.get_world_size())
        overlap = ForwardBackwardOverlap(
            groups, waits_in=_WAITS_OF_EXPERTS, replicas=layout.joined_replicas(), order_log=log
        )
        separate_scratch()
        overlap.states = pass_states(layout.models, overlap.device)
        first_step = FirstStep(overlap, layout, self.recomputation)
        training = _Training(overlap, first_step)
        with self._passes_of(training):
            losses: list[Any] = plain(**step)
        # After an error, a step that is tried again is watched again.
        decision = first_step.decide()
        if decision.off is not None:
            self._trainings[layout.models[0]] = None
            self._say(f"off: {decision.off}")
            return losses
        self._trainings[layout.models[0]] = training
        training.first_step = None
        training.alone = decision.alone
        training.ahead = decision.in_place is None
        if decision.in_place is not None:
            self._say(f"no recomputation runs ahead: {decision.in_place}")
        overlap.states += decision.states
        overlap.waits.clear()
        if overlap.device != "cpu":
            self.clock = self.clock or _synchronized_clock(overlap.device)
        if decision.alone is None and self._alone(plain, layout) is None:
            shape = layout.shape()
            plan = slots(*shape)
            paired, total = paired_microbatches(plan)
            self._say(
                f"{paired} of {total} forwards of stage {layout.stage} run beside a backward; it "
                f"holds the activations of at most {most_in_flight(plan)} forwards, instead of "
                f"{in_flight_without(*shape)}"
            )
        return losses

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            # Before groups are initialized, the launcher's number.
            rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
            if rank == 0:
                print(f"CommFuse: overlap: {line}", flush=True)


def _synchronized_clock(device: str) -> Callable[[], float]:
    module = torch.get_device_module(device)

    def clock() -> float:
        module.synchronize()
        return time.perf_counter()

    return clock
