"""The device and backend of a group, and the streams from which tensors are erased."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_npu.runtime.collectives import device_backend
from commfuse_npu.runtime.device_streams import LaneStreams
from commfuse_npu.runtime.transport import Transport

GROUP: Any = object()


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("gloo", ("cpu", "gloo")),
        ("nccl", ("cuda", "nccl")),
        ("hccl", ("npu", "hccl")),
        ("cpu:gloo,npu:hccl", ("npu", "hccl")),
        ("npu:hccl,cpu:gloo", ("npu", "hccl")),
        ("own_backend", ("cpu", "own_backend")),
    ],
)
def test_the_device_and_its_backend(monkeypatch, backend: str, expected: object) -> None:
    """Backends as torch_npu registers HCCL, and as a CPU backend registers itself."""
    devices = {**dist.Backend.backend_capability, "hccl": ["npu"], "own_backend": ["cpu"]}
    monkeypatch.setattr(dist.Backend, "backend_capability", devices)
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    assert device_backend(GROUP) == expected


def test_the_backend_that_torch_chose(monkeypatch) -> None:
    """``init_process_group()`` without a backend."""
    monkeypatch.setattr(dist, "get_backend", lambda group: "undefined")
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,npu:hccl")
    assert device_backend(GROUP) == ("npu", "hccl")
    monkeypatch.undo()
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    link = Transport.create()
    assert link.device_type == "cpu"
    dist.destroy_process_group()
    link.close()


def test_a_backend_that_nobody_registered(monkeypatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda group: "hccl")
    with pytest.raises(ValueError, match=r"'hccl' is unknown to torch.distributed, .*gloo"):
        device_backend(GROUP)


# With a mock of torch_npu.
NPU: Any = SimpleNamespace(type="npu", index=3)


def lane(stream: int) -> Any:
    backend = SimpleNamespace(_get_stream_id=lambda: stream)
    return SimpleNamespace(_get_backend=lambda device: backend)


@pytest.fixture
def erased(monkeypatch) -> list[tuple[Any, Any]]:
    calls: list[tuple[Any, Any]] = []
    npu = SimpleNamespace(
        Stream=lambda **words: words, current_stream=lambda device: SimpleNamespace(device_type=20)
    )
    module: Any = SimpleNamespace(npu=npu, erase_stream=lambda *args: calls.append(args))
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    return calls


def test_tensors_are_erased_from_the_streams_of_used_lanes(erased) -> None:
    streams = LaneStreams.of([lane(5), lane(7), lane(9)], NPU)
    assert streams is not None
    x, y = torch.ones(1), torch.ones(2)
    streams.erase([x, y], 2)
    five, seven = ({"stream_id": stream, "device_index": 3, "device_type": 20} for stream in (5, 7))
    expected = [(x, five), (x, seven), (y, five), (y, seven)]
    assert all(a is x and b == y for (a, b), (x, y) in zip(erased, expected, strict=True))


def test_elsewhere_there_is_nothing_to_erase(erased) -> None:
    assert LaneStreams.of([lane(5)], torch.device("cpu")) is None
    del sys.modules["torch_npu"].erase_stream
    assert LaneStreams.of([lane(5)], NPU) is None, "a torch_npu before 7.2"
