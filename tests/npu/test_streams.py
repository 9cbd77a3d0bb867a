"""What the side stream and those of lanes ask of torch_npu, held against the wheel."""

from __future__ import annotations

from typing import Any


def parameters() -> dict[str, list[str]]:
    import inspect

    import torch
    import torch_npu

    npu: Any = torch.get_device_module("npu")
    asked = {
        "Stream": npu.Stream.__new__,
        "Stream.wait_event": npu.Stream.wait_event,
        "Event.record": npu.Event.record,
        "stream": npu.stream,
        "current_stream": npu.current_stream,
        "erase_stream": torch_npu.erase_stream,
    }
    assert torch_npu._C._distributed_c10d.ProcessGroupHCCL._get_stream_id
    return {name: list(inspect.signature(call).parameters) for name, call in asked.items()}


def test_streams_and_events_are_called_as_the_wheel_declares_them(npu: Any) -> None:
    found = npu.run(parameters)
    assert "device" in found["Stream"]
    assert found["Stream.wait_event"] == ["self", "event"]
    assert found["Event.record"] == ["self", "stream"]
    assert found["stream"] == ["stream"]
    assert found["current_stream"] == ["device"]
    assert found["erase_stream"] == ["tensor", "stream"]
