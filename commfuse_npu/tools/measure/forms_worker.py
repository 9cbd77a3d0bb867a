"""What a rank does to compare forms: set up a workload, check forms, tune them, run rounds."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.runtime.transport import Transport
from commfuse_npu.tools.measure.baselines import Carrier, DirectExchange
from commfuse_npu.tools.measure.forms import Form, form_of
from commfuse_npu.tools.measure.layers import Work
from commfuse_npu.tools.measure.rounds import Sample
from commfuse_npu.tools.measure.sleeping import SleepingGemms
from commfuse_npu.tools.measure.steps import COMPUTE, NAMES, REFERENCE, Scale
from commfuse_npu.tools.measure.wire import pace
from commfuse_npu.tuning import decisions

__all__ = ["FormsWorker"]


class FormsWorker:
    """One rank of the initialized default process group; all ranks get the same calls.

    Its transport has one lane per peer.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._transport = Transport.create(lanes=max(1, self.size - 1))
        self._device = torch.device(self._transport.device_type)
        on_cpu = self._device.type == "cpu"
        self._module: Any = None if on_cpu else torch.get_device_module(self._device)
        self._carrier = Carrier(self._transport.group)  # read, not run
        if on_cpu:
            # In a group of its own, as the lanes of the fused ops have sockets of their own.
            group = dist.new_group(list(range(self.size)))
            assert group is not None
            self._carrier = DirectExchange(group)
            for process_group in (self._transport.group, group):  # links connect at their first use
                dist.all_reduce(torch.ones(1), group=process_group)
        self._forms: dict[str, Form] = {}
        self._work: Work
        self._scale: Scale
        self._gflops: float | None = None
        self._reference: list[torch.Tensor] = []

    def pace(self, bytes_per_second: float | None) -> str:
        """Limit the rate of the sockets of all groups, which are all sockets of this process."""
        return pace(bytes_per_second)

    def set_up(self, work: str, scale: Scale, gflops: float | None) -> None:
        """Create the weights and inputs of a workload, and forget what was tuned for others.

        Args:
            gflops: let GEMMs sleep, modeled at this speed; ``None`` for real ones.
        """
        self._work = Work(work, scale, rank=self.rank, device=self._device)
        self._scale, self._gflops, self._reference = scale, gflops, []
        decisions(self._transport).clear()
        # Buffers that baselines and fused ops keep between calls have other shapes.
        self._carrier.idle.clear()
        self._transport.scratch.clear()
        names = COMPUTE, *NAMES
        self._forms = {name: form_of(name, self._transport, self._carrier) for name in names}

    def check(self, name: str) -> float:
        """Run a form with real GEMMs, which also warms it up.

        Returns:
            The largest difference of its outputs and gradients from the reference's: 0 if all are
            equal, infinite if one is not a number.
        """
        if not self._reference:
            results = self._work.run(self._forms[REFERENCE])
            self._reference = [result.clone() for result in results]
        results = self._work.run(self._forms[name])
        differences = [
            float((result.float() - other.float()).abs().max())
            for result, other in zip(results, self._reference, strict=True)
        ]
        return math.inf if any(map(math.isnan, differences)) else max(differences)

    def tune(self, name: str) -> float:
        """Run a form so that it tunes itself, unless another one already did, then check it."""
        with self._gemms():
            self._work.run(self._forms[name])
        return self.check(name)

    def round(self, order: Sequence[str]) -> list[Sample]:
        gc.collect()
        gc.disable()
        try:
            return [self._sample(self._forms[name]) for name in order]
        finally:
            gc.enable()

    def _sample(self, form: Form) -> Sample:
        with self._gemms():
            start, blocked = self._together(), form.transport.blocked_seconds
            self._work.run(form)
            return Sample(self._now() - start, form.transport.blocked_seconds - blocked)

    def _together(self) -> float:
        """Start at the same time on all ranks; returns the start time."""
        self._synchronise()
        dist.barrier(self._transport.group)
        return self._now()

    def _now(self) -> float:
        """Seconds of a steady clock, once the device is idle."""
        self._synchronise()
        return time.perf_counter()

    def _synchronise(self) -> None:
        if self._module is not None:
            self._module.synchronize()  # read, not run

    def _gemms(self) -> AbstractContextManager[object]:
        if self._gflops is None:
            return nullcontext()
        return SleepingGemms(self._gflops, self._scale.shrink)
