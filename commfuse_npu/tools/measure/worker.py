"""What a rank measures when it is asked; all ranks are asked alike.

Times are seconds of one call, a list per question, so that who asked can tell medians from spreads.
What the host takes to launch is measured by itself, and in no other time of a device
(:mod:`commfuse_npu.tools.measure.stopwatch`).
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from commfuse_npu.kernels import kernels_for
from commfuse_npu.runtime.collectives import (
    all_gather_rows,
    all_to_all_rows,
    reduce_scatter_rows,
)
from commfuse_npu.runtime.hccl_options import buffers_of
from commfuse_npu.runtime.second_stream import second_stream
from commfuse_npu.runtime.transport import Transport, post_swap
from commfuse_npu.tools.measure.exchange import Batch, Exchange
from commfuse_npu.tools.measure.grouped import grouped_gemm
from commfuse_npu.tools.measure.stopwatch import Stopwatch

__all__ = ["Worker"]

_DTYPE = torch.bfloat16
_RESIDENT = Path("/proc/self/statm")
_AHEAD = 4096
"""Rows, columns and depth of the GEMM that a device is given ahead of what is timed."""
_TRAIN = 8
"""Launches one behind the other, of which the host's time is taken."""
_MOST = 0.75
"""Of the time of an exchange, for the GEMMs beside it."""
_TURNS = 8
"""Of a ping-pong, to and fro."""


class Worker:
    """One rank of the default process group, which has been made, on lanes of its own."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._transport = Transport.create(lanes=max(1, self.size - 1))
        self._device = torch.device(self._transport.device_type)
        self._kernels = kernels_for(self._device)
        self._other: dist.ProcessGroup | None = None
        on_cpu = self._device.type == "cpu"
        side = 0 if on_cpu else _AHEAD
        a, b, out = (self._numbers(side, side) for _ in range(3))
        token = torch.zeros(1, device=self._device)
        group = self._transport.group
        self._stopwatch = Stopwatch(
            None if on_cpu else torch.get_device_module(self._device),
            ahead=lambda: self._kernels.gemm_into(out, a, b),
            meet=lambda: dist.all_reduce(token, group=group),
            barrier=lambda: dist.barrier(group),
        )

    def machine(self) -> dict[str, Any]:
        """What runs here."""
        found = {
            "host": platform.node(),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "backend": dist.get_backend(self._transport.lane_groups[0]),
            "cores": os.cpu_count(),
            "device": self._device.type,
            "lanes": self._transport.lanes,
        }
        if self._device.type != "cpu":
            module = torch.get_device_module(self._device)
            found["device name"] = module.get_device_name()
            found["device bytes"] = module.mem_get_info()[1]
            properties = module.get_device_properties(module.current_device())
            # Newer versions of torch_npu tell.
            found["cube cores"] = getattr(properties, "cube_core_num", None)
        return found

    # ------------------------------------------------------------------ transfers

    def posting(self, calls: int, *, batched: bool) -> list[float]:
        """Seconds of the host for a send and a receive of 8 bytes, posted and waited for."""
        lanes = self._transport.lane_groups
        swaps = [
            (lane, self._bytes(8), self._bytes(8), *self._peers(distance))
            for distance, lane in enumerate(lanes, 1)
        ]

        def post() -> None:
            # Each on a lane of its own, waited for behind all: a device overlaps them.
            works = [post_swap(*swap, batched=batched) for swap in swaps]
            for posted in works:
                self._wait(posted)

        return [seconds / len(swaps) for seconds in self._of_host(post, calls)]

    def launching(self, calls: int) -> list[float]:
        """Seconds of the host for a GEMM of 16 rows and columns."""
        a, b, out = (self._numbers(16, 16) for _ in range(3))
        return self._of_host(lambda: self._kernels.gemm_into(out, a, b), calls)

    def latency(self, calls: int) -> list[float]:
        """Half a ping-pong of 8 bytes between ranks 0 and 1; the others have no times."""
        token, lane = self._bytes(8), self._transport.lane_groups[0]

        def to_and_fro() -> None:
            for turn in (0, 1) * _TURNS if self.rank < 2 else ():
                peer = self._transport.ranks[1 - self.rank]
                operation = dist.isend if turn == self.rank else dist.irecv
                self._wait(dist.batch_isend_irecv([dist.P2POp(operation, token, peer, lane)]))

        times = self._timed(to_and_fro, calls, together=True)
        return [seconds / (2 * _TURNS) for seconds in times] if self.rank < 2 else []

    def lanes(self, size: int, lanes: int, calls: int) -> list[float]:
        """A message of ``size`` bytes to each of ``lanes`` peers, and one from each, at once."""
        exchange = Exchange(self._transport, size, self._lane_batches(lanes))
        return self._exchanged(exchange, calls)

    def collective(self, name: str, size: int, calls: int) -> list[float]:
        """``size`` bytes from every rank to every other one, in bf16, by the backend's own."""
        group, blocks = self._transport.group, self._numbers(self.size, size // 2)
        call = {
            "all-gather": lambda: all_gather_rows(blocks[:1], group),
            "reduce-scatter": lambda: reduce_scatter_rows(blocks, group),
            "all-to-all": lambda: all_to_all_rows(blocks, group),
        }[name]
        return self._timed(call, calls, together=True)

    def batches(
        self, size: int, lanes: int, calls: int, *, grouped: bool
    ) -> dict[str, list[float]]:
        """A message of ``size`` bytes to every peer, and one from each.

        Args:
            lanes: on which they go in turn.
            grouped: all on one lane in one batch, and not one after the other, a batch each.

        Returns:
            seconds until all is over (``whole``), and of the host for as many messages of 8 bytes
            (``host``).
        """
        groups, peers = self._transport.lane_groups, range(1, self.size)
        batches: list[Batch] = [(groups[(d - 1) % lanes], (d,)) for d in peers]
        posted = [(groups[0], peers)] if grouped else batches
        return {
            "whole": self._exchanged(Exchange(self._transport, size, posted), calls),
            "host": self._of_host(Exchange(self._transport, 8, posted).run, calls),
        }

    def pipelines(self, size: int, lanes: int, calls: int) -> dict[str, list[float]]:
        """Batches on ``lanes`` lanes at once, beside one of a pipeline on a group of its own.

        The pipeline's is that of an interleaved schedule in its middle, a message to either
        neighbour and one from either, which Megatron posts as one batch (read in core_v0.12.1,
        ``_batched_p2p_ops``); ranks are stages, the first one behind the last.  Of two ranks each
        has one neighbour, and one message: Megatron takes no two stages there, and HCCL no two
        messages to one rank in a batch.

        Returns:
            seconds of ``lanes`` and of ``pipeline`` alone, and of ``both``, the pipeline's posted
            first.
        """
        ours = self._lane_batches(lanes)
        pipeline: list[Batch] = [(self._group(), sorted({1, self.size - 1}))]
        asked = {"lanes": ours, "pipeline": pipeline, "both": [*pipeline, *ours]}
        return {
            what: self._exchanged(Exchange(self._transport, size, batches), calls)
            for what, batches in asked.items()
        }

    def communicator(self, megabytes: int | None) -> tuple[float, int | None]:
        """A lane more: made, its links opened, and given up.

        Args:
            megabytes: of each of HCCL's two buffers; ``None`` for other backends.

        Returns:
            the seconds that :meth:`Transport.create` takes, and the bytes that are taken by then
            and were not before: of the device's memory, on a CPU of this process's resident set.
            ``None`` where the system does not say.
        """
        options = None if megabytes is None else buffers_of(megabytes)
        self._stopwatch.synchronise()
        dist.barrier(self._transport.group)
        start, before = time.perf_counter(), self._taken()
        made = Transport.create(lanes=1, lane_options=options)
        self._stopwatch.synchronise()
        seconds, after = time.perf_counter() - start, self._taken()
        made.close()
        return seconds, None if before is None or after is None else max(0, after - before)

    # ------------------------------------------------------------------ work

    def gemm(
        self, m: int, k: int, n: int, calls: int, *, view: Literal["", "input", "weight"] = ""
    ) -> list[float]:
        """``[m, k] @ [k, n]`` in bf16.

        Args:
            view: which of them is the left half of a tensor with twice the columns.
        """
        a = self._numbers(m, 2 * k)[:, :k] if view == "input" else self._numbers(m, k)
        b = self._numbers(k, 2 * n)[:, :n] if view == "weight" else self._numbers(k, n)
        out = self._numbers(m, n)
        return self._timed(lambda: self._kernels.gemm_into(out, a, b), calls)

    def row_gemms(self, m: int, k: int, n: int, groups: int, calls: int) -> dict[str, Any]:
        """The same cut into ``groups`` GEMMs of rows.

        Returns:
            seconds of them ``one by one``, and in ``one call`` of the operator ``by``, which makes
            its result's memory; or ``None``, and ``by`` says why there is no such call here.
        """
        a, b, out = self._numbers(m, k), self._numbers(k, n), self._numbers(m, n)
        pairs = list(zip(out.chunk(groups), a.chunk(groups), strict=True))

        def one_by_one() -> None:
            for result, part in pairs:
                self._kernels.gemm_into(result, part, b)

        found: dict[str, Any] = {"one by one": self._timed(one_by_one, calls)}
        name, call = grouped_gemm(a, b, groups)
        try:
            return {**found, "one call": self._timed(call, calls), "by": name}
        except (AttributeError, RuntimeError) as error:
            # Another version, or this device or dtype is not for it.
            return {**found, "one call": None, "by": f"no {name}: {error}"}

    def column_gemm(self, m: int, k: int, n: int, groups: int, calls: int) -> list[float]:
        """The same, a group of columns of a weight ``[n, k]`` after the other."""
        a, weight = self._numbers(m, k), self._numbers(n, k)
        step = n // groups
        outs = [self._numbers(m, step) for _ in range(groups)]
        parts = [weight[i * step : (i + 1) * step].t() for i in range(groups)]

        def call() -> None:
            for out, part in zip(outs, parts, strict=True):
                self._kernels.gemm_into(out, a, part)

        return self._timed(call, calls)

    def copy(self, numbers: int, calls: int) -> list[float]:
        """A copy of so many bf16 numbers: reads and writes two bytes of each."""
        source = self._numbers(numbers)
        out = torch.empty_like(source)
        return self._timed(lambda: out.copy_(source), calls)

    def sums(self, numbers: int, parts: int, calls: int, *, once: bool) -> list[float]:
        """``parts`` partials of so many bf16 numbers: in order, or in one pass in fp32."""
        slab = self._numbers(parts, numbers)
        out = torch.empty_like(slab[:1])
        terms = [(slab, parts)] if once else [(slab[i : i + 1], 1) for i in range(parts)]
        dtype = torch.float32 if once else None
        return self._timed(lambda: self._kernels.sum_parts(out, terms, dtype=dtype), calls)

    def attention(self, rows: int, keys: int, heads: int, head: int, calls: int) -> list[float]:
        """The last ``rows`` queries against ``keys`` keys, causal, forward."""
        q, k, v = (self._numbers(length, 1, heads, head) for length in (rows, keys, keys))
        return self._timed(lambda: self._kernels.attention_forward(q, k, v, causal=True), calls)

    def beside(self, m: int, k: int, n: int, size: int, calls: int) -> dict[str, list[float]]:
        """GEMMs and an exchange with all peers, alone and begun together.

        Of the GEMM as many, one behind the other, as take most of the time of the exchange.

        Returns:
            seconds of the GEMMs (``gemm``) and of the ``exchange`` alone, of the GEMMs while the
            exchange is under way (``gemm beside``), and until both are over (``both``).
        """
        a, b, out = self._numbers(m, k), self._numbers(k, n), self._numbers(m, n)
        exchange = Exchange(self._transport, size, self._lane_batches(self._transport.lanes))

        def gemm() -> None:
            self._kernels.gemm_into(out, a, b)

        alone = self._exchanged(exchange, calls)
        times = math.floor(_MOST * min(alone) / min(self._timed(gemm, calls)))
        # As many on all ranks.
        fewest = torch.tensor(max(1.0, times), device=self._device)
        dist.all_reduce(fewest, dist.ReduceOp.MIN, group=self._transport.group)
        many = range(int(fewest.item()))

        def gemms() -> None:
            for _ in many:
                gemm()

        def together(lap: Callable[[], None]) -> None:
            exchange.begin()
            lap()
            gemms()
            lap()  # of this stream: the transfers have others
            exchange.end()
            lap()

        laps = self._stopwatch.laps(together, calls, together=True)
        return {
            "gemm": self._timed(gemms, calls),
            "exchange": alone,
            "gemm beside": [beside for _, beside, _ in laps],
            "both": [sum(one) for one in laps],
        }

    def sums_beside(self, m: int, k: int, n: int, parts: int, calls: int) -> dict[str, list[float]]:
        """A GEMM, and sums of as many numbers in one pass on the second stream.

        Returns:
            seconds of one of the ``sums`` alone, of the GEMM with sums beside it to its end
            (``gemm beside sums``), and until all are over (``gemm and sums``).  Nothing on a CPU,
            which has no second stream.
        """
        aside = second_stream(self._device)
        if aside is None:
            return {}
        a, b, out = self._numbers(m, k), self._numbers(k, n), self._numbers(m, n)
        slab = self._numbers(parts, m * n // parts)
        total = torch.empty_like(slab[:1])

        def gemm() -> None:
            self._kernels.gemm_into(out, a, b)

        def add() -> None:
            self._kernels.sum_parts(total, [(slab, parts)], dtype=torch.float32)

        def add_all(times: int) -> None:
            for _ in range(times):
                add()

        alone = self._timed(add, calls)
        sums = 1 + math.ceil(min(self._timed(gemm, calls)) / min(alone))

        def together(lap: Callable[[], None]) -> None:
            aside.hold(aside.record(aside=False), aside=True)
            aside.do(add_all, sums)
            gemm()
            lap()
            aside.hold(aside.record(aside=True), aside=False)
            lap()

        laps = self._stopwatch.laps(together, calls)
        return {
            "sums": alone,
            "gemm beside sums": [beside for beside, _ in laps],
            "gemm and sums": [sum(one) for one in laps],
        }

    # ------------------------------------------------------------------ how

    def _group(self) -> dist.ProcessGroup:
        """One more over all ranks, which is no lane; made at the first call."""
        if self._other is None:
            lane = self._transport.lane_groups[0]
            self._other = dist.new_group(
                list(self._transport.ranks),
                timeout=self._transport.timeout,
                backend=dist.get_backend(lane),
            )
        return self._other

    def _taken(self) -> int | None:
        """Bytes of memory that are not free."""
        if self._device.type != "cpu":
            free, whole = torch.get_device_module(self._device).mem_get_info()
            return int(whole - free)
        try:
            pages = _RESIDENT.read_text("ascii").split()[1]
        except FileNotFoundError:
            return None  # no Linux
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def _bytes(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self._device)

    def _numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self._device).to(_DTYPE)

    def _peers(self, distance: int) -> tuple[int, int]:
        """To whom and from whom, by rank of the job."""
        ranks = self._transport.ranks
        return ranks[(self.rank + distance) % self.size], ranks[(self.rank - distance) % self.size]

    def _wait(self, works: Sequence[Any]) -> None:
        for work in works:
            self._transport.wait_for(work)

    def _lane_batches(self, lanes: int) -> list[Batch]:
        """To the next ``lanes`` ranks, and from as many, a lane for each distance."""
        groups = self._transport.lane_groups[:lanes]
        return [(group, (distance,)) for distance, group in enumerate(groups, 1)]

    def _exchanged(self, exchange: Exchange, calls: int) -> list[float]:
        times = self._timed(exchange.run, calls, together=True)
        exchange.check()
        return times

    def _timed(
        self, call: Callable[[], object], calls: int, *, together: bool = False
    ) -> list[float]:
        def once(lap: Callable[[], None]) -> None:
            call()
            lap()

        return [one for (one,) in self._stopwatch.laps(once, calls, together=together)]

    def _of_host(self, post: Callable[[], object], calls: int) -> list[float]:
        """Seconds of the host for each of a train of launches.

        On a CPU those of this thread.  On a device until the last one is over: what this thread
        posts another one may launch, and the longer of the two counts; the device, which has
        little to do, is in it only if it takes longer still.
        """
        on_cpu = self._device.type == "cpu"
        clock = time.thread_time if on_cpu else time.perf_counter
        times = []
        for _ in range(calls + 1):
            self._stopwatch.synchronise()
            dist.barrier(self._transport.group)
            start = clock()
            for _ in range(_TRAIN):
                post()
            self._stopwatch.synchronise()
            times.append((clock() - start) / _TRAIN)
        return times[1:]
