"""What a rank measures in each step when it is asked; all ranks are asked alike.

Times are seconds of one call.  What the host takes to launch is measured by
itself, and in no other time of a device (:mod:`commfuse_npu.tools.measure.stopwatch`).
"""

from __future__ import annotations

import math
import os
import platform
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.kernels import kernels_for
from commfuse_npu.runtime.collectives import all_gather_rows, all_to_all_rows, reduce_scatter_rows
from commfuse_npu.runtime.hccl_options import buffers_of
from commfuse_npu.runtime.lanes import post_swap
from commfuse_npu.runtime.transport import Transport
from commfuse_npu.tools.bench.worker import FormsWorker
from commfuse_npu.tools.measure.steps import Scale, Times
from commfuse_npu.tools.measure.stopwatch import Stopwatch

__all__ = ["Exchange", "Worker"]

_PROCESSOR, _RESIDENT = Path("/proc/cpuinfo"), Path("/proc/self/statm")
_AHEAD = 4096
"""Rows, columns and depth of the GEMM that a device is given ahead of what is timed."""
_TRAIN = 8
"""Launches one behind the other, of which the host's time is taken."""
_SHARE = 0.75
"""Of the time of an exchange, for the GEMMs beside it."""
_TURNS = 8
"""Of a ping-pong, to and fro."""
_BUFFERS = 1, 20, 200
"""MB of each of a communicator's two: the last is HCCL's default."""


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
        self.begin()
        self.end()

    def begin(self) -> None:
        for lane, theirs, target, source in self.swaps:
            self._works += post_swap(
                lane, self._mine, theirs, target, source, batched=self._batched
            )

    def end(self) -> None:
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


class Worker(FormsWorker):
    """One rank of the default process group, which has been made, on lanes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._kernels = kernels_for(self._device)
        self._backend = dist.get_backend(self._transport.lane_groups[0])
        side = 0 if self._module is None else _AHEAD
        ahead = self._product(side, side, side)
        token = torch.zeros(1, device=self._device)
        group = self._transport.group
        self._stopwatch = Stopwatch(
            self._module,
            ahead=ahead,
            meet=lambda: dist.all_reduce(token, group=group),
            barrier=lambda: dist.barrier(group),
        )

    def machine(self) -> dict[str, Any]:
        """Host, versions, and the device's name, bytes of memory and cube cores where it tells."""
        info = _PROCESSOR.read_text() if _PROCESSOR.exists() else ""
        named = re.search(r"^model name\s*: (.*)$", info, re.MULTILINE)
        found: dict[str, Any] = {
            "processor": named[1] if named else platform.processor() or platform.machine(),
            "host": platform.node(),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "backend": self._backend,
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

    def links(self, scale: Scale) -> Times:
        """Half a ping-pong, then messages on one and several lanes at once."""
        pings = self.latency(scale.calls)
        found: Times = [{"bytes": 8, "lanes": 1, "half a ping-pong": True, "seconds": pings}]
        for size in scale.messages:
            for lanes in sorted({min(lanes, self.size - 1) for lanes in (1, 2, 4, self.size)}):
                seconds = self.lanes(size, lanes, scale.calls)
                found.append({"bytes": size, "lanes": lanes, "seconds": seconds})
        return found

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

    def collectives(self, scale: Scale) -> Times:
        """So many bytes from every rank to every other one, in bf16, by the backend's own."""
        group, found = self._transport.group, []
        for size in scale.messages:
            blocks = self._numbers(self.size, size // 2)
            for name, call in {
                "all-gather": partial(all_gather_rows, blocks[:1], group),
                "reduce-scatter": partial(reduce_scatter_rows, blocks, group),
                "all-to-all": partial(all_to_all_rows, blocks, group),
            }.items():
                seconds = self._timed(call, scale.calls, together=True)
                found.append({"what": name, "bytes": size, "seconds": seconds})
        return found

    def gemms(self, scale: Scale) -> Times:
        """``[rows, inputs] @ [inputs, outputs]`` in bf16."""
        found = []
        for layer, (inputs, outputs) in scale.layers().items():
            for rows in scale.halves(6):
                seconds = self._timed(self._product(rows, inputs, outputs), scale.calls)
                shape = {"rows": rows, "inputs": inputs, "outputs": outputs}
                found.append({"layer": layer, **shape, "seconds": seconds})
        return found

    def host(self, scale: Scale) -> Times:
        """Seconds of the host for a send and a receive of 8 bytes, posted and waited for.

        On gloo also as single operations, elsewhere for a GEMM of 16 rows and columns: single
        operations of HCCL open a communicator per pair, in an order that may hang.
        """
        calls = 2 * scale.calls

        def posting(batched: bool) -> list[float]:
            # Each on a lane of its own, waited for behind all: a device overlaps them.
            exchange = Exchange(self._transport, 8, self.size - 1, batched=batched)
            times = self._of_host(exchange.run, calls)
            return [seconds / len(exchange.swaps) for seconds in times]

        found = [{"what": "batch", "seconds": posting(True)}]
        if self._backend == "gloo":
            return [*found, {"what": "single", "seconds": posting(False)}]
        return [
            *found,
            {"what": "GEMM", "seconds": self._of_host(self._product(16, 16, 16), calls)},
        ]

    def beside(self, scale: Scale) -> Times:
        """GEMMs of a piece and an exchange with all peers, alone and begun together."""
        inputs, outputs = scale.layers()["fc1"]
        gemm = self._product(scale.rows // 4, inputs, outputs)
        by = self.side_by_side(gemm, scale.message, scale.calls)
        return [{"what": what, "seconds": seconds} for what, seconds in by.items()]

    def side_by_side(
        self, gemm: Callable[[], object], size: int, calls: int
    ) -> dict[str, list[float]]:
        """As many GEMMs, one behind the other, as take most of the time of an exchange.

        Returns:
            seconds of the GEMMs (``gemm``) and of the ``exchange`` alone, of the GEMMs while the
            exchange is under way (``gemm beside``), and until both are over (``both``).
        """
        exchange = Exchange(self._transport, size, self._transport.lanes)
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

    def memory(self, scale: Scale) -> Times:
        """A copy of bf16 numbers: reads and writes two bytes of each."""
        source = self._numbers(scale.message)
        out = torch.empty_like(source)
        seconds = self._timed(lambda: out.copy_(source), scale.calls)
        return [{"what": "copy", "numbers": scale.message, "seconds": seconds}]

    def communicators(self, scale: Scale) -> Times:
        """One more lane: made, its links opened, and closed; by MB of each of HCCL's buffers.

        The bytes that it takes are of the device's memory, on a CPU of this process's resident
        set; ``None`` where the system does not say.
        """
        found = []
        for megabytes in (_BUFFERS if "hccl" in self._backend else (None,)) * 3:
            options = None if megabytes is None else buffers_of(megabytes)
            self._together()
            start, before = time.perf_counter(), self._taken()
            made = Transport.create(lanes=1, lane_options=options)
            seconds, after = self._now() - start, self._taken()
            made.close()
            taken = None if before is None or after is None else max(0, after - before)
            row = {"MB of a buffer": megabytes, "bytes taken": taken, "seconds": [seconds]}
            found.append(row)
        return found

    def attention(self, scale: Scale) -> Times:
        """The last queries against all keys, causal, forward, by the number of queries."""
        config, keys, found = scale.config, scale.rows, []
        heads = max(1, config.num_attention_heads // scale.ranks // scale.shrink)
        head = config.hidden_size // config.num_attention_heads
        k, v = (self._numbers(keys, 1, heads, head) for _ in range(2))
        for queries in scale.halves(4):
            q = self._numbers(queries, 1, heads, head)
            call = partial(self._kernels.attention_forward, q, k, v, causal=True)
            of = {"queries": queries, "keys": keys, "heads": heads, "of": head}
            found.append({**of, "seconds": self._timed(call, scale.calls)})
        return found

    def _product(self, m: int, k: int, n: int) -> Callable[[], object]:
        a, b, out = self._numbers(m, k), self._numbers(k, n), self._numbers(m, n)
        return lambda: self._kernels.gemm_into(out, a, b)

    def _taken(self) -> int | None:
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
            self._together()
            start = clock()
            for _ in range(_TRAIN):
                post()
            self._synchronise()
            times.append((clock() - start) / _TRAIN)
        return times[1:]
