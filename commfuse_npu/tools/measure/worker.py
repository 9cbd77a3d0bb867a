"""What a rank measures when it is asked; all ranks are asked alike.

Times are seconds of one call, a list per question.  What the host takes to launch is measured by
itself, and in no other time of a device (:mod:`commfuse_npu.tools.measure.stopwatch`).
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.kernels import kernels_for
from commfuse_npu.runtime.collectives import all_gather_rows, all_to_all_rows, reduce_scatter_rows
from commfuse_npu.runtime.hccl_options import buffers_of
from commfuse_npu.runtime.transport import Transport, post_swap
from commfuse_npu.tools.measure.stopwatch import Stopwatch

__all__ = ["Exchange", "Worker"]

_RESIDENT = Path("/proc/self/statm")
_AHEAD = 4096
"""Rows, columns and depth of the GEMM that a device is given ahead of what is timed."""
_TRAIN = 8
"""Launches one behind the other, of which the host's time is taken."""
_SHARE = 0.75
"""Of the time of an exchange, for the GEMMs beside it."""
_TURNS = 8
"""Of a ping-pong, to and fro."""


class Exchange:
    """A message to each of the next ``lanes`` ranks and one from as many, a lane per distance.

    Args:
        size: bytes of each message, whose content tells its sender.
        batched: how to post; by default as the transport does.
    """

    def __init__(
        self, transport: Transport, size: int, lanes: int, *, batched: bool | None = None
    ) -> None:
        self._transport = transport
        self._batched = transport.batched if batched is None else batched
        ranks, rank, n = transport.ranks, transport.rank, transport.size
        self._mine = torch.full(
            (size,), _mark(ranks[rank]), dtype=torch.uint8, device=transport.device_type
        )
        self.swaps = [
            (lane, torch.zeros_like(self._mine), ranks[(rank + d) % n], ranks[(rank - d) % n])
            for d, lane in enumerate(transport.lane_groups[:lanes], 1)
        ]
        self._works: list[Any] = []

    def run(self) -> None:
        """:meth:`begin` and :meth:`end`."""
        self.begin()
        self.end()

    def begin(self) -> None:
        """Post all of it."""
        for lane, theirs, target, source in self.swaps:
            self._works += post_swap(
                lane, self._mine, theirs, target, source, batched=self._batched
            )

    def end(self) -> None:
        """Wait for all of it."""
        for work in self._works:
            self._transport.wait_for(work)
        self._works = []

    def check(self) -> None:
        """Compare what arrived.

        Raises:
            RuntimeError: it is not what was sent.
        """
        for _, theirs, _, source in self.swaps:
            if not bool((theirs == _mark(source)).all()):
                raise RuntimeError(
                    f"a message of {theirs.numel()} bytes from rank {source} has other bytes than "
                    f"{_mark(source)} in it: transfers were mixed up"
                )


def _mark(rank: int) -> int:
    """The byte that a rank sends; never 0, of which buffers are before."""
    return 1 + rank % 255


class Worker:
    """One rank of the default process group, which has been made, on lanes of its own."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._transport = Transport.create(lanes=max(1, self.size - 1))
        self._device = torch.device(self._transport.device_type)
        self._kernels = kernels_for(self._device)
        on_cpu = self._device.type == "cpu"
        self._module = None if on_cpu else torch.get_device_module(self._device)
        side = 0 if on_cpu else _AHEAD
        a, b, out = (self._numbers(side, side) for _ in range(3))
        token = torch.zeros(1, device=self._device)
        group = self._transport.group
        self._stopwatch = Stopwatch(
            self._module,
            ahead=lambda: self._kernels.gemm_into(out, a, b),
            meet=lambda: dist.all_reduce(token, group=group),
            barrier=lambda: dist.barrier(group),
        )

    def machine(self) -> dict[str, Any]:
        """Host, versions, and the device's name, bytes of memory and cube cores where it tells."""
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
        if self._module is not None:
            found["device name"] = self._module.get_device_name()
            found["device bytes"] = self._module.mem_get_info()[1]
            properties = self._module.get_device_properties(self._module.current_device())
            # Newer versions of torch_npu tell.
            found["cube cores"] = getattr(properties, "cube_core_num", None)
        return found

    # ------------------------------------------------------------------ transfers

    def posting(self, calls: int, *, batched: bool) -> list[float]:
        """Seconds of the host for a send and a receive of 8 bytes, posted and waited for."""
        # Each on a lane of its own, waited for behind all: a device overlaps them.
        exchange = Exchange(self._transport, 8, self.size - 1, batched=batched)
        return [seconds / len(exchange.swaps) for seconds in self._of_host(exchange.run, calls)]

    def launching(self, calls: int) -> list[float]:
        """Seconds of the host for a GEMM of 16 rows and columns."""
        a, b, out = (self._numbers(16, 16) for _ in range(3))
        return self._of_host(lambda: self._kernels.gemm_into(out, a, b), calls)

    def latency(self, calls: int) -> list[float]:
        """Half a ping-pong of 8 bytes between ranks 0 and 1; the others have no times."""
        lane, ranks = self._transport.lane_groups[0], self._transport.ranks
        token = torch.zeros(8, dtype=torch.uint8, device=self._device)

        def to_and_fro() -> None:
            for turn in (0, 1) * _TURNS if self.rank < 2 else ():
                post = dist.isend if turn == self.rank else dist.irecv
                operation = dist.P2POp(post, token, ranks[1 - self.rank], lane)
                for work in dist.batch_isend_irecv([operation]):
                    self._transport.wait_for(work)

        times = self._timed(to_and_fro, calls, together=True)
        return [seconds / (2 * _TURNS) for seconds in times] if self.rank < 2 else []

    def lanes(self, size: int, lanes: int, calls: int) -> list[float]:
        """A message of ``size`` bytes to each of ``lanes`` peers, and one from each, at once."""
        return self._exchanged(Exchange(self._transport, size, lanes), calls)

    def collective(self, name: str, size: int, calls: int) -> list[float]:
        """``size`` bytes from every rank to every other one, in bf16, by the backend's own."""
        group, blocks = self._transport.group, self._numbers(self.size, size // 2)
        call = {
            "all-gather": lambda: all_gather_rows(blocks[:1], group),
            "reduce-scatter": lambda: reduce_scatter_rows(blocks, group),
            "all-to-all": lambda: all_to_all_rows(blocks, group),
        }[name]
        return self._timed(call, calls, together=True)

    def communicator(self, megabytes: int | None) -> tuple[float, int | None]:
        """One more lane: made, its links opened, and closed.

        Args:
            megabytes: of each of HCCL's two buffers; ``None`` for other backends.

        Returns:
            the seconds that :meth:`Transport.create` takes, and the bytes that it takes: of the
            device's memory, on a CPU of this process's resident set.  ``None`` where the system
            does not say.
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

    def gemm(self, m: int, k: int, n: int, calls: int) -> list[float]:
        """``[m, k] @ [k, n]`` in bf16."""
        a, b, out = self._numbers(m, k), self._numbers(k, n), self._numbers(m, n)
        return self._timed(lambda: self._kernels.gemm_into(out, a, b), calls)

    def copy(self, numbers: int, calls: int) -> list[float]:
        """A copy of so many bf16 numbers: reads and writes two bytes of each."""
        source = self._numbers(numbers)
        out = torch.empty_like(source)
        return self._timed(lambda: out.copy_(source), calls)

    def attention(self, rows: int, keys: int, heads: int, head: int, calls: int) -> list[float]:
        """The last ``rows`` queries against ``keys`` keys, causal, forward."""
        q, k, v = (self._numbers(length, 1, heads, head) for length in (rows, keys, keys))
        return self._timed(lambda: self._kernels.attention_forward(q, k, v, causal=True), calls)

    def beside(self, m: int, k: int, n: int, size: int, calls: int) -> dict[str, list[float]]:
        """GEMMs and an exchange with all peers, alone and begun together.

        As many GEMMs, one behind the other, as take most of the time of the exchange.

        Returns:
            seconds of the GEMMs (``gemm``) and of the ``exchange`` alone, of the GEMMs while the
            exchange is under way (``gemm beside``), and until both are over (``both``).
        """
        a, b, out = self._numbers(m, k), self._numbers(k, n), self._numbers(m, n)
        exchange = Exchange(self._transport, size, self._transport.lanes)

        def gemm() -> None:
            self._kernels.gemm_into(out, a, b)

        alone = self._exchanged(exchange, calls)
        times = math.floor(_SHARE * min(alone) / min(self._timed(gemm, calls)))
        # As many on all ranks.
        fewest = torch.tensor(float(max(1, times)), device=self._device)
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

    # ------------------------------------------------------------------ how

    def _taken(self) -> int | None:
        """Bytes of memory that are not free."""
        if self._module is not None:
            free, total = self._module.mem_get_info()
            return int(total - free)
        if not _RESIDENT.exists():
            return None  # no Linux
        return int(_RESIDENT.read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def _numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self._device).to(torch.bfloat16)

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
        clock = time.thread_time if self._module is None else time.perf_counter
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
