"""The side stream of a device, and the streams of HCCL's lanes.

:class:`SideStream`: on an NPU the vector cores add while the cube cores multiply, if the two are on
different streams [read in CANN's documentation].  The program says which instruction is on which
stream, and where one waits for the other.

:class:`LaneStreams`: each lane of HCCL has a stream, and torch_npu records the tensors of a batch
as used on it.  If such a tensor is freed, the allocator keeps its memory until an event on that
stream completes.  With CANN 8 the wait for a batch removes this record.  With CANN 9 a batch is a
group, whose wait does not (``endCoalescing`` in ``ProcessGroupHCCL.cpp`` of torch_npu 26.0 and
26.1, read), so memory use grows with the distance between host and device.  Therefore the records
are removed when a program has finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["LaneStreams", "SideStream", "side_stream"]


class SideStream:
    """A stream for the sums and copies of operations on one device.

    Args:
        module: of the device: ``torch.npu`` or ``torch.cuda``.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._stream = module.Stream(device=device)

    def do(self, work: Callable[..., None], *args: object) -> None:
        """Call ``work`` with this stream as the current stream."""
        with self._module.stream(self._stream):
            work(*args)

    def _of(self, on_side_stream: bool) -> Any:
        return self._stream if on_side_stream else self._module.current_stream(self._device)

    def record(self, *, on_side_stream: bool) -> Any:
        """Record an event on this stream (``on_side_stream``) or on the current one."""
        event = self._module.Event()
        event.record(self._of(on_side_stream))
        return event

    def wait_event(self, event: Any, *, on_side_stream: bool) -> None:
        """Make this stream (``on_side_stream``) or the current one wait for an event."""
        self._of(on_side_stream).wait_event(event)


@lru_cache(maxsize=16)
def side_stream(device: torch.device) -> SideStream | None:
    """The side stream of a device, created once; ``None`` for a CPU, which has no streams."""
    if device.type == "cpu":
        return None
    return SideStream(torch.get_device_module(device.type), device)


class LaneStreams:
    """The streams of warmed-up lanes on one NPU."""

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
        """The streams, if torch_npu has ``erase_stream`` (7.2 and newer); else ``None``."""
        if device.type != "npu":
            return None
        import torch_npu

        return cls(lanes, device) if hasattr(torch_npu, "erase_stream") else None

    def erase(self, tensors: Iterable[torch.Tensor], lanes: int) -> None:
        """Remove the records of these tensors from the streams of the first ``lanes`` lanes.

        Every transfer of their memory on these lanes has to be waited for on the current stream.
        """
        for tensor in tensors:
            for stream in self._streams[:lanes]:
                self._erase(tensor, stream)
