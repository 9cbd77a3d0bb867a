"""The streams of HCCL's lanes, where the memory allocator is told that tensors are done with.

torch_npu marks what a batch sends and receives as used on the lane's stream; freed memory is then
kept until the allocator finds an event on that stream done.  A batch of CANN 8 takes the mark away
in its wait.  One of CANN 9 is a group, whose wait does not (``endCoalescing`` in
``ProcessGroupHCCL.cpp`` of torch_npu 26.0 and 26.1, read): the further the host is ahead of the
device, the more memory is taken.  So the marks are taken away here, when a program is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["LaneStreams"]


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
