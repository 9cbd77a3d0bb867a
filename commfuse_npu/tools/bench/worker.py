"""What a rank does when it is asked: set a work up, check its variants, run a round of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist

from commfuse_npu.tools.bench import wire
from commfuse_npu.tools.bench.carriers import DirectExchange
from commfuse_npu.tools.bench.forms import Form, Groups, form_of, plain_form
from commfuse_npu.tools.bench.peak_memory import peak_bytes
from commfuse_npu.tools.bench.results import Check, Sample
from commfuse_npu.tools.bench.shapes import Shape
from commfuse_npu.tools.bench.sleeping import SleepingGemms
from commfuse_npu.tools.bench.variants import COMPUTE, REFERENCE, Variant
from commfuse_npu.tools.bench.works import Work
from commfuse_npu.tuning import decisions

__all__ = ["Worker"]


class Worker:
    """One rank of the default process group, which has been made; all ranks are asked alike."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._groups = Groups()
        self._device = self._groups.transport.device_type
        self._direct = DirectExchange(self._groups.direct, self._groups.pool)
        self._forms: dict[Variant, Form] = {}
        self._work: Work
        self._gflops: float | None = None
        self._reference: list[torch.Tensor] | None = None

    def pace(self, bytes_per_second: float | None) -> wire.Pacing:
        """Give this rank's sockets a rate."""
        return wire.pace(bytes_per_second)

    def wire_speed(self, payload: int) -> tuple[float, float]:
        """Measure the link as it is now: a direct exchange of ``payload`` bytes per pair.

        Returns:
            bytes per second that one rank sent to one other, all pairs busy both ways, and seconds
            that a message of 8 bytes takes one way, median.
        """
        shard = torch.ones(payload, dtype=torch.uint8, device=self._device)
        self._direct.give_back(self._direct.gather(shard).wait())
        start = self._together()
        whole = self._direct.gather(shard).wait()
        seconds = self._now() - start
        self._direct.give_back(whole)
        return payload / seconds, self._latency()

    def _latency(self) -> float:
        """Half a ping-pong between ranks 0 and 1; the others give 0."""
        if self.rank > 1:
            return 0.0
        group, peer = self._groups.direct, 1 - self.rank
        token = torch.zeros(1, dtype=torch.int64, device=self._device)
        times = []
        for _ in range(30):
            start = self._now()
            for turn in (0, 1):
                if turn == self.rank:
                    dist.send(token, peer, group)
                else:
                    dist.recv(token, peer, group)
            times.append((self._now() - start) / 2)
        return statistics.median(times)

    def set_up(self, work: str, shape: Shape, dtype: str, seed: int, gflops: float | None) -> None:
        """Make the weights and inputs of a work.

        Args:
            gflops: let GEMMs sleep, at this modelled speed; ``None`` for real ones.
        """
        self._work = Work(
            work, shape, rank=self.rank, size=self.size, dtype=dtype, device=self._device, seed=seed
        )
        self._gflops = gflops
        self._reference = None
        self._forms.clear()
        self._forget_buffers()

    def check(self, variant: Variant, *, memory: bool = True) -> Check:
        """Compare a variant with the reference, with real GEMMs, and take its peak memory.

        It warms the variant up besides.

        Args:
            memory: whether the peak is wanted, else it is 0; the profiler takes a while.
        """
        work, form = self._work, self._form(variant)
        if self._reference is None:
            results = work.run(self._form(Variant(REFERENCE, "blocking")))
            self._reference = [result.clone() for result in results]
        results = work.run(form)
        peak = 0
        if memory:
            # The second time, when a library has what it keeps for itself; buffers from nothing.
            results.clear()
            self._forget_buffers()
            peak = peak_bytes(lambda: results.extend(work.run(form)), self._device)
        if variant.name == COMPUTE:
            return Check(False, 0.0, None, peak)
        same: bool | None = None
        if variant.schedule is not None and not variant.tuned:
            same = _all_equal(results, work.run(plain_form(variant, self._groups)))
        return Check(
            _all_equal(results, self._reference),
            _max_difference(results, self._reference),
            same,
            peak,
        )

    def forget_tuning(self) -> None:
        """What was fastest is not any more: the link is another one, or the GEMMs."""
        decisions(self._groups.transport).clear()
        self._forms = {of: form for of, form in self._forms.items() if not of.tuned}

    def tune(self, variant: Variant) -> Check:
        """Let a variant try out what is fastest, unless another one did already, then check it."""
        decided = decisions(self._groups.transport)
        with self._gemms():
            self._work.run(self._form(variant))
        if variant.kind == "turns":
            # Profiled in one thread, the memory of two sides is neither's.
            return self.check(variant, memory=False)
        chosen = tuple(
            f"{of.layer} {of.half} {of.inputs} x {of.outputs}: {schedule or 'collectives'}"
            for (of, _), schedule in decided.items()
        )
        return replace(self.check(variant), chosen=chosen)

    def round(self, order: Sequence[Variant]) -> list[Sample]:
        """Run each variant once, in this order."""
        gc.collect()
        gc.disable()
        try:
            with self._gemms() as sleeping:
                samples = []
                for variant in order:
                    if sleeping is not None:
                        sleeping.settle()
                    samples.append(self._timed(variant))
        finally:
            gc.enable()
        return samples

    def _forget_buffers(self) -> None:
        """Free what the baselines and the product keep between calls."""
        self._groups.pool.clear()
        self._groups.transport.scratch.clear()

    def _timed(self, variant: Variant) -> Sample:
        call, blocked = self._call(variant), self._blocked(variant)
        start = self._together()
        blocked_before, cpu = blocked(), time.process_time()
        call()
        total = self._now() - start
        return Sample(total, blocked() - blocked_before, time.process_time() - cpu)

    def _call(self, variant: Variant) -> Callable[[], list[torch.Tensor] | None]:
        work, direct = self._work, self._direct
        if variant.kind == "communication":
            return lambda: work.communicate(direct)
        form = self._form(variant)
        return lambda: work.run(form)

    def _blocked(self, variant: Variant) -> Callable[[], float]:
        direct = self._direct
        if variant.kind == "communication":
            return lambda: direct.blocked_seconds
        return self._form(variant).blocked_seconds

    def _together(self) -> float:
        """Start at the same time on all ranks; returns the time."""
        self._synchronise()
        dist.barrier(self._groups.collectives)
        return self._now()

    def _now(self) -> float:
        """Seconds of a steady clock, with nothing under way on the device."""
        self._synchronise()
        return time.perf_counter()

    def _synchronise(self) -> None:
        if self._device != "cpu":
            getattr(torch, self._device).synchronize()  # read, not run

    def _gemms(self) -> AbstractContextManager[SleepingGemms | None]:
        if self._gflops is None:
            return nullcontext()
        return SleepingGemms(self._gflops, self._work.shape.scale)

    def _form(self, variant: Variant) -> Form:
        if variant not in self._forms:
            self._forms[variant] = form_of(variant, self._groups)
        return self._forms[variant]


def _all_equal(results: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(results, others, strict=True))


def _max_difference(results: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    return max(
        float((one.float() - other.float()).abs().max())
        for one, other in zip(results, others, strict=True)
    )
