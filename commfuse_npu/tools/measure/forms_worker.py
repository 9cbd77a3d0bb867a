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
from commfuse_npu.tools.measure.carriers import Carrier, DirectExchange, TorchCollectives
from commfuse_npu.tools.measure.forms import Form, form_of
from commfuse_npu.tools.measure.layers import Work
from commfuse_npu.tools.measure.rounds import Sample
from commfuse_npu.tools.measure.sleeping import SleepingGemms
from commfuse_npu.tools.measure.steps import Scale
from commfuse_npu.tools.measure.variants import REFERENCE, Variant
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
        self._forms: dict[Variant, Form] = {}
        self._work: Work
        self._scale: Scale
        self._gflops: float | None = None
        self._reference: list[torch.Tensor] = []
        self._carrier: Carrier | None = None

    def _connected(self) -> Carrier:
        """The transfers of the baselines, created on all ranks on first use.

        On a CPU over a separate group: the fused ops have sockets of their own, too.
        """
        if self._carrier is None and self._module is not None:
            self._carrier = TorchCollectives(self._transport.group)  # read, not run
        elif self._carrier is None:
            group = dist.new_group(list(range(self.size)))
            assert group is not None
            for process_group in (self._transport.group, group):  # links connect at their first use
                dist.all_reduce(torch.ones(1), group=process_group)
            self._carrier = DirectExchange(group)
        return self._carrier

    def pace(self, bytes_per_second: float | None) -> str:
        """Limit the rate of the sockets of all groups, which are all sockets of this process."""
        self._connected()
        return pace(bytes_per_second)

    def set_up(self, work: str, scale: Scale, gflops: float | None) -> None:
        """Create the weights and inputs of a workload, and forget what was tuned for others.

        Args:
            gflops: let GEMMs sleep, modeled at this speed; ``None`` for real ones.
        """
        self._work = Work(work, scale, rank=self.rank, device=self._device)
        self._scale, self._gflops, self._reference = scale, gflops, []
        self._forms.clear()
        decisions(self._transport).clear()
        # Buffers that baselines and fused ops keep between calls have other shapes.
        self._connected().idle.clear()
        self._transport.scratch.clear()

    def check(self, variant: Variant) -> float:
        """Run a form with real GEMMs, which also warms it up.

        Returns:
            The largest difference of its outputs and gradients from the reference's: 0 if all are
            equal, infinite if one is not a number.
        """
        if not self._reference:
            results = self._work.run(self._form(Variant(REFERENCE, "blocking")))
            self._reference = [result.clone() for result in results]
        results = self._work.run(self._form(variant))
        differences = [
            float((result.float() - other.float()).abs().max())
            for result, other in zip(results, self._reference, strict=True)
        ]
        return math.inf if any(map(math.isnan, differences)) else max(differences)

    def tune(self, variant: Variant) -> float:
        """Run a form so that it tunes itself, unless another one already did, then check it."""
        with self._gemms():
            self._work.run(self._form(variant))
        return self.check(variant)

    def round(self, order: Sequence[Variant]) -> list[Sample]:
        gc.collect()
        gc.disable()
        try:
            with self._gemms() as sleeping:
                samples = []
                for variant in order:
                    if sleeping is not None:
                        sleeping.settle()
                    samples.append(self._sample(self._form(variant)))
        finally:
            gc.enable()
        return samples

    def _sample(self, form: Form) -> Sample:
        start, blocked = self._together(), form.blocked_seconds()
        self._work.run(form)
        return Sample(self._now() - start, form.blocked_seconds() - blocked)

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

    def _gemms(self) -> AbstractContextManager[SleepingGemms | None]:
        if self._gflops is None:
            return nullcontext()
        return SleepingGemms(self._gflops, self._scale.shrink)

    def _form(self, variant: Variant) -> Form:
        if variant not in self._forms:
            self._forms[variant] = form_of(variant, self._transport, self._connected())
        return self._forms[variant]
