"""The commands that a rank of the bench executes: set up a workload, check variants, run rounds."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.runtime.transport import Transport
from commfuse_npu.tools.bench.carriers import DirectExchange
from commfuse_npu.tools.bench.forms import Form, form_of, plain_form
from commfuse_npu.tools.bench.results import Check, Sample
from commfuse_npu.tools.bench.shapes import Shape
from commfuse_npu.tools.bench.sleeping import SleepingGemms
from commfuse_npu.tools.bench.variants import REFERENCE, Variant
from commfuse_npu.tools.bench.wire import pace
from commfuse_npu.tools.bench.works import Work
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
        self._gflops: float | None = None
        self._reference: list[torch.Tensor] | None = None
        self._exchange: DirectExchange | None = None

    def _connected(self) -> DirectExchange:
        """A direct exchange over a separate group, created on all ranks on first use."""
        if self._exchange is None:
            group = dist.new_group(list(range(self.size)))
            assert group is not None
            for process_group in (self._transport.group, group):  # links connect at their first use
                dist.all_reduce(torch.ones(1, device=self._device), group=process_group)
            self._exchange = DirectExchange(group, {})
        return self._exchange

    def pace(self, bytes_per_second: float | None) -> str:
        """Limit the rate of the sockets of all groups, which are all sockets of this process."""
        self._connected()
        return pace(bytes_per_second)

    def set_up(self, work: str, shape: Shape, dtype: str, seed: int, gflops: float | None) -> None:
        """Create the weights and inputs of a workload.

        Args:
            gflops: let GEMMs sleep, modeled at this speed; ``None`` for real ones.
        """
        self._work = Work(
            work, shape, rank=self.rank, size=self.size, dtype=dtype, device=self._device, seed=seed
        )
        self._gflops = gflops
        self._reference = None
        self._forms.clear()
        # Buffers that baselines and fused ops keep between calls have other shapes.
        self._connected().idle.clear()
        self._transport.scratch.clear()

    def check(self, variant: Variant) -> Check:
        """Compare a variant with the reference, using real GEMMs; this also warms it up."""
        work, form = self._work, self._form(variant)
        if self._reference is None:
            results = work.run(self._form(Variant(REFERENCE, "blocking")))
            self._reference = [result.clone() for result in results]
        results = work.run(form)
        same: bool | None = None
        if variant.schedule is not None and not variant.tuned:
            same = _all_equal(results, work.run(plain_form(variant, self._transport)))
        equal = _all_equal(results, self._reference)
        return Check(equal, _max_difference(results, self._reference), same)

    def forget_tuning(self) -> None:
        """Discard tuning decisions, because the link or the GEMMs have changed."""
        decisions(self._transport).clear()
        self._forms = {variant: form for variant, form in self._forms.items() if not variant.tuned}

    def tune(self, variant: Variant) -> Check:
        """Run a variant so that it tunes itself, unless another one already did, then check it."""
        decided = decisions(self._transport)
        with self._gemms():
            self._work.run(self._form(variant))
        if variant.kind == "turns":
            return self.check(variant)
        chosen = tuple(
            f"{problem.layer} {problem.half} {problem.inputs} x {problem.outputs}: "
            f"{schedule or 'collectives'}"
            for (problem, _), schedule in decided.items()
        )
        return replace(self.check(variant), chosen=chosen)

    def round(self, order: Sequence[Variant]) -> list[Sample]:
        gc.collect()
        gc.disable()
        try:
            with self._gemms() as sleeping:
                samples = []
                for variant in order:
                    if sleeping is not None:
                        sleeping.settle()
                    samples.append(self._sample(variant))
        finally:
            gc.enable()
        return samples

    def _sample(self, variant: Variant) -> Sample:
        run: Callable[[], object]
        if variant.kind == "communication":
            direct = self._connected()
            run, blocked = partial(self._work.communicate, direct), lambda: direct.blocked_seconds
        else:
            form = self._form(variant)
            run, blocked = partial(self._work.run, form), form.blocked_seconds
        start = self._together()
        blocked_before, cpu = blocked(), time.process_time()
        run()
        total = self._now() - start
        return Sample(total, blocked() - blocked_before, time.process_time() - cpu)

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
        return SleepingGemms(self._gflops, self._work.shape.scale)

    def _form(self, variant: Variant) -> Form:
        if variant not in self._forms:
            self._forms[variant] = form_of(variant, self._transport, self._connected())
        return self._forms[variant]


def _all_equal(results: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(result, other) for result, other in zip(results, others, strict=True))


def _max_difference(results: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    return max(
        float((result.float() - other.float()).abs().max())
        for result, other in zip(results, others, strict=True)
    )
