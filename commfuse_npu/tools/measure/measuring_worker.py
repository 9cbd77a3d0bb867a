"""The measurements of a rank in each step; all ranks get the same calls.

Times are seconds of one call.  The host's time to launch is measured separately and excluded from
all device times (:mod:`commfuse_npu.tools.measure.stopwatch`).
"""

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
from commfuse_npu.runtime.collectives import all_gather_rows, reduce_scatter_rows
from commfuse_npu.runtime.lanes import post_swap
from commfuse_npu.runtime.transport import Transport
from commfuse_npu.tools.measure.measuring_steps import Scale, Times
from commfuse_npu.tools.measure.stopwatch import Stopwatch

_PROCESSOR = Path("/proc/cpuinfo")
_TRAIN = 8
"""Number of consecutive launches over which host time is measured."""
_SHARE = 0.75
"""Share of the time of an exchange that the GEMMs beside it take."""
_TURNS = 8
"""Round trips of a ping-pong."""
_AHEAD = 4096
"""Rows, columns and depth of the GEMM that a device runs before a timed call."""


class MeasuredExchange:
    """A message of ``size`` bytes to each peer and one from each, a lane per distance."""

    def __init__(self, transport: Transport, size: int) -> None:
        self._transport = transport
        ranks = transport.ranks
        rank = transport.rank
        n = transport.size
        mine = torch.zeros(size, dtype=torch.uint8, device=transport.device_type)
        self.swaps = [
            (lane, mine, torch.empty_like(mine), ranks[(rank + d) % n], ranks[(rank - d) % n])
            for d, lane in enumerate(transport.lane_groups, 1)
        ]
        self._works: list[Any] = []

    def run(self) -> None:
        self.begin()
        self.end()

    def begin(self) -> None:
        for swap in self.swaps:
            self._works += post_swap(*swap)

    def end(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []


class Worker:
    """One rank of the initialized default process group.

    Attributes:
        transport: has a lane per peer; whoever needs the worker no longer closes it.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.transport = Transport.create(lanes=max(1, self.size - 1))
        self._device = torch.device(self.transport.device_type)
        group = self.transport.group
        self._kernels = kernels_for(self._device)
        on_cpu = self._device.type == "cpu"
        self._module: Any = None if on_cpu else torch.get_device_module(self._device)
        side = 0 if on_cpu else _AHEAD
        self._stopwatch = Stopwatch(
            self._module,
            ahead=self._product(side, side, side),
            meet=partial(dist.all_reduce, torch.zeros(1, device=self._device), group=group),
            barrier=partial(dist.barrier, group),
        )

    def machine(self) -> dict[str, Any]:
        """Host, versions, and, if available, the device's name, memory in bytes and cube cores."""
        info = _PROCESSOR.read_text() if _PROCESSOR.exists() else ""
        match = re.search(r"^model name\s*: (.*)$", info, re.MULTILINE)
        facts: dict[str, Any] = {
            "processor": match[1] if match else platform.processor() or platform.machine(),
            "host": platform.node(),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "backend": dist.get_backend(self.transport.lane_groups[0]),
            "cores": os.cpu_count(),
            "device": self._device.type,
        }
        if self._module is not None:
            facts["device name"] = self._module.get_device_name()
            facts["device bytes"] = self._module.mem_get_info()[1]
            properties = self._module.get_device_properties(self._module.current_device())
            # Newer versions of torch_npu have it.
            facts["cube cores"] = getattr(properties, "cube_core_num", None)
        return facts

    def links(self, scale: Scale) -> Times:
        """Half a ping-pong between ranks 0 and 1, and a message to each peer, a lane each."""
        lane = self.transport.lane_groups[0]
        ranks = self.transport.ranks
        token = torch.zeros(8, dtype=torch.uint8, device=self._device)

        def to_and_fro() -> None:
            for turn in (0, 1) * _TURNS if self.rank < 2 else ():
                post = dist.isend if turn == self.rank else dist.irecv
                operation = dist.P2POp(post, token, ranks[1 - self.rank], lane)
                for work in dist.batch_isend_irecv([operation]):
                    work.wait()

        pings = self._stopwatch.times(to_and_fro, scale.calls)
        halves = [seconds / (2 * _TURNS) for seconds in pings] if self.rank < 2 else []
        row = {"what": "messages", "bytes": scale.message, "peers": self.size - 1}
        return [
            {"what": "half a ping-pong", "seconds": halves},
            {**row, "seconds": self.messages(scale.message, scale.calls)},
        ]

    def messages(self, size: int, calls: int) -> list[float]:
        """A message of ``size`` bytes to each peer, and one from each, at once."""
        return self._stopwatch.times(MeasuredExchange(self.transport, size).run, calls)

    def collectives(self, scale: Scale) -> Times:
        """The backend's collectives in bf16 of ``message`` bytes from each rank to each other."""
        group = self.transport.group
        times = []
        blocks = self._numbers(self.size, scale.message // 2)
        for name, call in {
            "all-gather": partial(all_gather_rows, blocks[:1], group),
            "reduce-scatter": partial(reduce_scatter_rows, blocks, group),
        }.items():
            seconds = self._stopwatch.times(call, scale.calls)
            times.append({"what": name, "bytes": scale.message, "seconds": seconds})
        return times

    def gemms(self, scale: Scale) -> Times:
        """GEMMs ``[rows, inputs] @ [inputs, outputs]`` in bf16."""
        times = []
        for layer, (inputs, outputs) in scale.layers().items():
            for rows in scale.halves(6):
                seconds = self._stopwatch.times(self._product(rows, inputs, outputs), scale.calls)
                shape = {"rows": rows, "inputs": inputs, "outputs": outputs}
                times.append({"layer": layer, **shape, "seconds": seconds})
        return times

    def host(self, scale: Scale) -> Times:
        """Host seconds to post 8 bytes and wait for them, and on a device to launch a GEMM.

        A send and a receive are one post on HCCL, two on gloo.
        """
        calls = 2 * scale.calls
        # One exchange per lane, all posted before the waits: a device overlaps them.
        exchange = MeasuredExchange(self.transport, 8)
        posts = len(exchange.swaps)
        times = {"post": [seconds / posts for seconds in self._of_host(exchange.run, calls)]}
        if self._module is not None:
            times["GEMM"] = self._of_host(self._product(16, 16, 16), calls)
        return [{"what": name, "seconds": seconds} for name, seconds in times.items()]

    def beside(self, scale: Scale) -> Times:
        """GEMMs, as many in sequence as take most of the time of an exchange, and both.

        Times of the GEMMs (``gemm``) and of the ``exchange`` alone, of the GEMMs during the
        exchange (``gemm beside``), and until both are complete (``both``).
        """
        inputs, outputs = scale.layers()["fc1"]
        gemm = self._product(scale.rows // 4, inputs, outputs)
        calls = scale.calls
        exchange = MeasuredExchange(self.transport, scale.message)
        alone = self._stopwatch.times(exchange.run, calls)
        times = math.floor(_SHARE * min(alone) / min(self._stopwatch.times(gemm, calls)))
        # The same number on all ranks.
        fewest = torch.tensor(float(max(1, times)), device=self._device)
        dist.all_reduce(fewest, dist.ReduceOp.MIN, group=self.transport.group)
        repeats = range(int(fewest.item()))

        def gemms() -> None:
            for _ in repeats:
                gemm()

        def together(lap: Callable[[], None]) -> None:
            exchange.begin()
            lap()
            gemms()
            lap()  # of this stream: the transfers use others
            exchange.end()
            lap()

        laps = self._stopwatch.laps(together, calls)
        samples = {
            "gemm": self._stopwatch.times(gemms, calls),
            "exchange": alone,
            "gemm beside": [beside for _, beside, _ in laps],
            "both": [sum(lap) for lap in laps],
        }
        return [{"what": name, "seconds": seconds} for name, seconds in samples.items()]

    def memory(self, scale: Scale) -> Times:
        """A copy of bf16 numbers, which reads and writes two bytes each."""
        source = self._numbers(scale.message)
        out = torch.empty_like(source)
        seconds = self._stopwatch.times(lambda: out.copy_(source), scale.calls)
        return [{"what": "copy", "numbers": scale.message, "seconds": seconds}]

    def attention(self, scale: Scale) -> Times:
        """The last queries against all keys, causal, forward, by number of queries."""
        keys = scale.rows
        heads = scale.heads // scale.ranks
        head = scale.head
        times = []
        k, v = (self._numbers(keys, 1, heads, head) for _ in range(2))
        for queries in scale.halves(4):
            q = self._numbers(queries, 1, heads, head)
            call = partial(self._kernels.attention_forward, q, k, v, causal=True)
            shape = {"queries": queries, "keys": keys, "heads": heads, "of": head}
            times.append({**shape, "seconds": self._stopwatch.times(call, scale.calls)})
        return times

    def _product(self, m: int, k: int, n: int) -> Callable[[], object]:
        a = self._numbers(m, k)
        b = self._numbers(k, n)
        out = self._numbers(m, n)
        return lambda: self._kernels.gemm_into(out, a, b)

    def _numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self._device).to(torch.bfloat16)

    def _of_host(self, post: Callable[[], object], calls: int) -> list[float]:
        """Host seconds of each of several consecutive launches.

        On a CPU, time of this thread.  On a device, wall time until the last one is complete:
        another thread may launch what this one posts, and the slower of the two counts.  The
        device, which has little to do, contributes only if it takes longer still.
        """
        clock = time.thread_time if self._module is None else time.perf_counter
        times = []
        for _ in range(calls + 1):
            self._stopwatch.together()
            start = clock()
            for _ in range(_TRAIN):
                post()
            self._stopwatch.now()
            times.append((clock() - start) / _TRAIN)
        return times[1:]
