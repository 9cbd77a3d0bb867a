"""What torch_npu makes of batch_isend_irecv: one handle for all transfers, where gloo has one each.

The transport waits for every handle it gets and never picks one by its position.  Here torch_npu's
own function runs with recorders in place of the device and of HCCL; what HCCL does with a batch is
not shown.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist


class _Group(dist.ProcessGroup):
    """Records what is asked of HCCL."""

    def __init__(self) -> None:
        super().__init__(0, 4)
        self.events: list[Any] = []

    def _get_backend(self, device: torch.device) -> _Group:
        return self

    def _start_coalescing(self, device: torch.device) -> None:
        self.events.append("start")

    def _end_coalescing(self, device: torch.device) -> str:
        self.events.append("end")
        return "the handle"

    def batch_isend_irecv(self, kinds: list[str], tensors: list[Any], peers: list[int]) -> str:
        self.events.append((kinds, len(tensors), peers))
        return "the handle"


def _batch(group: _Group | None, device: str) -> list[dist.P2POp]:
    """Two sends and two receives; the tensors are named, not allocated."""
    batch = []
    for index, kind in enumerate((dist.isend, dist.irecv, dist.isend, dist.irecv)):
        # Its constructor would ask for a process group.
        operation: Any = object.__new__(dist.P2POp)

        def issue(*args: Any, index: int = index, **kwargs: Any) -> str:
            if group is not None:
                group.events.append(index)
            return f"handle {index}"

        issue.__name__ = kind.__name__
        operation.op, operation.group, operation.tag = issue, group, 0
        operation.peer = operation.group_peer = index % 4
        operation.tensor = SimpleNamespace(device=torch.device(device))
        batch.append(operation)
    return batch


def handles(device: str, soc: str, grouped: bool) -> tuple[list[Any], list[Any]]:
    """In the worker: what the function returns and asks, on a device and version of CANN.

    Nothing if it has no groups, as in torch_npu before 26.
    """
    from torch_npu.distributed import distributed_c10d

    group = _Group()
    if grouped and not hasattr(distributed_c10d, "_CANN_VERSION"):
        return [], []
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(distributed_c10d, "_CANN_VERSION"):
            patch.setattr(distributed_c10d.npu, "get_device_name", lambda: soc)
            patch.setattr(distributed_c10d, "_CANN_VERSION", grouped)
        patch.setattr(distributed_c10d, "_get_default_group", lambda: group)
        named = grouped and device == "npu"
        batch = _batch(group if named else None, device)
        return dist.batch_isend_irecv(batch), group.events


def whose_function() -> list[str]:
    """In the worker."""
    c10d = dist.distributed_c10d
    return [dist.batch_isend_irecv.__module__, c10d.batch_isend_irecv.__module__]


def test_torch_npu_replaces_the_function(npu) -> None:
    assert npu.run(whose_function) == ["torch_npu.distributed.distributed_c10d"] * 2


@pytest.mark.parametrize(
    ("device", "soc", "grouped", "returned", "events"),
    [
        ("npu", "Ascend910B1", False, ["the handle"],
         [(["isend", "irecv", "isend", "irecv"], 4, [0, 1, 2, 3])]),
        ("npu", "Ascend910B1", True, ["the handle"], ["start", 0, 1, 2, 3, "end"]),
        ("cpu", "none", False, [f"handle {index}" for index in range(4)], []),
    ],
)  # fmt: skip
def test_a_device_has_one_handle_for_a_batch_and_the_cpu_one_each(
    npu, device: str, soc: str, grouped: bool, returned: list[str], events: list[Any]
) -> None:
    found = npu.run(handles, device, soc, grouped)
    if found == ([], []):
        pytest.skip("this torch_npu posts no batch as a group")
    assert found == (returned, events)
