"""The streams of a device beside the one that an operation is called on.

On an NPU vector cores add while the cube cores multiply, if they are given the two on different
streams [read in CANN's documentation]: :class:`SideStream`.  Which instruction is on which
stream, and where one waits for the other, is in the program.

Each lane of HCCL has a stream, too, and torch_npu marks what a batch sends and receives as used on
it; freed memory is then kept until the allocator finds an event on that stream done.  A batch of
CANN 8 takes the mark away in its wait.  One of CANN 9 is a group, whose wait does not
(``endCoalescing`` in ``ProcessGroupHCCL.cpp`` of torch_npu 26.0 and 26.1, read): the further the
host is ahead of the device, the more memory is taken.  So :class:`LaneStreams` takes the marks away
when a program is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["LaneStreams", "SideStream", "side_stream"]


class SideStream:
    """For the sums and copies of operations on one device.

    Args:
        module: the device's: ``torch.npu``, ``torch.cuda``.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device = module, device
        self._stream = module.Stream(device=device)

    def do(self, work: Callable[..., None], *args: object) -> None:
        """Call ``work`` with it as the current stream."""
        with self._module.stream(self._stream):
            work(*args)

    def _of(self, aside: bool) -> Any:
        return self._stream if aside else self._module.current_stream(self._device)

    def record(self, *, aside: bool) -> Any:
        """An event, after what this stream, or the current one, was given so far."""
        event = self._module.Event()
        event.record(self._of(aside))
        return event

    def hold(self, event: Any, *, aside: bool) -> None:
        """What this stream, or the current one, is given from now on comes after the event."""
        self._of(aside).wait_event(event)


@lru_cache(maxsize=16)
def side_stream(device: torch.device) -> SideStream | None:
    """The one of a device; a CPU has none, there the host does everything in its order."""
    if device.type == "cpu":
        return None
    return SideStream(torch.get_device_module(device.type), device)


class LaneStreams:
    """The streams of lanes that are warmed up, on one NPU."""

    def __init__(self, lanes: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        import torch_npu

        self._erase = torch_npu.erase_stream
        npu: Any = torch_npu.npu
        backends: list[Any] = [lane._get_backend(device) for lane in lanes]
        self._streams = [
            npu.Stream(
                stream_id=backend._get_stream_id(),
                device_index=device.index,
                device_type=npu.current_stream(device).device_type,
            )
            for backend in backends
        ]

    @classmethod
    def of(cls, lanes: Sequence[dist.ProcessGroup], device: torch.device) -> LaneStreams | None:
        """Those of an NPU whose torch_npu can take marks away (7.2 and newer), else none."""
        if device.type != "npu":
            return None
        import torch_npu

        return cls(lanes, device) if hasattr(torch_npu, "erase_stream") else None

    def erase(self, tensors: Iterable[torch.Tensor], lanes: int) -> None:
        """Take the marks of the first ``lanes`` away.

        Every transfer of the tensors' memory on these lanes has been waited for, and the current
        stream comes after the waits.
        """
        for tensor in tensors:
            for stream in self._streams[:lanes]:
                self._erase(tensor, stream)
