"""What a rank measures when it is asked; all ranks are asked alike.

Times are seconds of one call, a list per question, so that who asked can tell medians from spreads.
On a device the host waits for it before and after, so that nothing else is in a time.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.kernels import kernels_for
from commfuse_npu.runtime.transport import Transport, post_swap

__all__ = ["Worker"]

_DTYPE = torch.bfloat16


class Worker:
    """One rank of the default process group, which has been made, on lanes of its own."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._transport = Transport.create(lanes=max(1, self.size - 1))
        self._device = torch.device(self._transport.device_type)
        self._kernels = kernels_for(self._device)

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
        return found

    # ------------------------------------------------------------------ transfers

    def posting(self, calls: int, *, batched: bool) -> list[float]:
        """CPU seconds of this thread for a send and a receive of 8 bytes, posted and waited for."""
        mine, theirs = self._bytes(8), self._bytes(8)
        target, source = self._peers(1)
        lane = self._transport.lane_groups[0]
        times = []
        for _ in range(calls):
            self._synchronise()
            dist.barrier(self._transport.group)
            start = time.thread_time_ns()
            self._wait(post_swap(lane, mine, theirs, target, source, batched=batched))
            times.append((time.thread_time_ns() - start) / 1e9)
        return times

    def latency(self, calls: int) -> list[float]:
        """Half a ping-pong of 8 bytes between ranks 0 and 1; the others have no times."""
        token, lane = self._bytes(8), self._transport.lane_groups[0]
        times = []
        for _ in range(calls if self.rank < 2 else 0):
            start = self._now()
            for turn in (0, 1):
                peer = self._transport.ranks[1 - self.rank]
                operation = dist.isend if turn == self.rank else dist.irecv
                self._wait(dist.batch_isend_irecv([dist.P2POp(operation, token, peer, lane)]))
            times.append((self._now() - start) / 2)
        dist.barrier(self._transport.group)
        return times

    def lanes(self, size: int, lanes: int, calls: int) -> list[float]:
        """A message of ``size`` bytes to each of ``lanes`` peers, and one from each, at once."""
        exchange = _Exchange(self, size, lanes)
        return self._together(exchange, calls)

    # ------------------------------------------------------------------ work

    def gemm(self, m: int, k: int, n: int, calls: int) -> list[float]:
        """``[m, k] @ [k, n]`` in bf16."""
        a, b, out = self._numbers(m, k), self._numbers(k, n), self._numbers(m, n)
        return self._alone(lambda: self._kernels.gemm_into(out, a, b), calls)

    def column_gemm(self, m: int, k: int, n: int, groups: int, calls: int) -> list[float]:
        """The same, a group of columns of a weight ``[n, k]`` after the other."""
        a, weight = self._numbers(m, k), self._numbers(n, k)
        step = n // groups
        outs = [self._numbers(m, step) for _ in range(groups)]
        parts = [weight[i * step : (i + 1) * step].t() for i in range(groups)]

        def call() -> None:
            for out, part in zip(outs, parts, strict=True):
                self._kernels.gemm_into(out, a, part)

        return self._alone(call, calls)

    def copy(self, numbers: int, calls: int) -> list[float]:
        """A copy of so many bf16 numbers: reads and writes two bytes of each."""
        source = self._numbers(numbers)
        out = torch.empty_like(source)
        return self._alone(lambda: out.copy_(source), calls)

    def sums(self, numbers: int, parts: int, calls: int, *, once: bool) -> list[float]:
        """``parts`` partials of so many bf16 numbers: in order, or in one pass in fp32."""
        slab = self._numbers(parts, numbers)
        out = torch.empty_like(slab[:1])
        terms = [(slab, parts)] if once else [(slab[i : i + 1], 1) for i in range(parts)]
        dtype = torch.float32 if once else None
        return self._alone(lambda: self._kernels.sum_parts(out, terms, dtype=dtype), calls)

    def attention(self, rows: int, keys: int, heads: int, head: int, calls: int) -> list[float]:
        """The last ``rows`` queries against ``keys`` keys, causal, forward."""
        q, k, v = (self._numbers(length, 1, heads, head) for length in (rows, keys, keys))
        return self._alone(lambda: self._kernels.attention_forward(q, k, v, causal=True), calls)

    def beside(self, m: int, k: int, n: int, size: int, calls: int) -> dict[str, list[float]]:
        """A GEMM and an exchange with all peers, alone and begun together.

        Returns:
            seconds of ``gemm`` and ``exchange`` alone, of the GEMM while the exchange is under way
            (``gemm beside``), and until both are over (``both``).
        """
        a, b, out = self._numbers(m, k), self._numbers(k, n), self._numbers(m, n)
        exchange = _Exchange(self, size, self._transport.lanes)
        found: dict[str, list[float]] = {
            "gemm": self._alone(lambda: self._kernels.gemm_into(out, a, b), calls),
            "exchange": self._together(exchange, calls),
            "gemm beside": [],
            "both": [],
        }
        for _ in range(calls):
            start = self._start()
            exchange.begin()
            # Only this stream: the transfers have others.
            self._kernels.gemm_into(out, a, b)
            self._transport.synchronise()
            found["gemm beside"].append(time.perf_counter() - start)
            exchange.end()
            found["both"].append(self._now() - start)
        return found

    # ------------------------------------------------------------------ how

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

    def _alone(self, call: Callable[[], object], calls: int) -> list[float]:
        call()
        times = []
        for _ in range(calls):
            start = self._now()
            call()
            times.append(self._now() - start)
        return times

    def _together(self, exchange: _Exchange, calls: int) -> list[float]:
        times = []
        for number in range(calls + 1):
            start = self._start()
            exchange.begin()
            exchange.end()
            if number:  # the first one makes connections
                times.append(self._now() - start)
        return times

    def _start(self) -> float:
        self._synchronise()
        dist.barrier(self._transport.group)
        return self._now()

    def _now(self) -> float:
        self._synchronise()
        return time.perf_counter()

    def _synchronise(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize()


class _Exchange:
    """Messages of ``size`` bytes to the next ``lanes`` ranks, one per lane, and from as many."""

    def __init__(self, worker: Worker, size: int, lanes: int) -> None:
        self._worker = worker
        self._mine = worker._bytes(size)
        self._theirs = [worker._bytes(size) for _ in range(lanes)]
        self._works: list[Any] = []

    def begin(self) -> None:
        transport = self._worker._transport
        for number, theirs in enumerate(self._theirs):
            lane, peers = transport.lane_groups[number], self._worker._peers(number + 1)
            batched = transport.batched
            self._works += post_swap(lane, self._mine, theirs, *peers, batched=batched)

    def end(self) -> None:
        self._worker._wait(self._works)
        self._works = []
