"""What the second stream of an operation asks of a device.

That programs are right on two streams, however late one of them is, is in ``tests/one_device``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from commfuse_npu.runtime.second_stream import SecondStream


class _Device:
    """Stands in for ``torch.npu``; writes down what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.current = "the first"

    def Stream(self, device: torch.device) -> Any:
        return self._named("the second")

    def current_stream(self, device: torch.device) -> Any:
        return self._named(self.current)

    def _named(self, name: str) -> Any:
        return SimpleNamespace(
            name=name, wait_event=lambda event: self.asked.append(f"{name} waits for {event.name}")
        )

    def Event(self) -> Any:
        event = SimpleNamespace(name="")

        def record(stream: Any) -> None:
            event.name = f"an event of {stream.name}"
            self.asked.append(f"{stream.name} records")

        event.record = record
        return event

    def stream(self, stream: Any) -> Any:
        device = self

        class Context:
            def __enter__(self) -> None:
                self.before, device.current = device.current, stream.name

            def __exit__(self, *error: object) -> None:
                device.current = self.before

        return Context()


def test_what_a_device_is_asked_for() -> None:
    module = _Device()
    second = SecondStream(module, torch.device("cpu"))
    second.hold(second.record(aside=False), aside=True)
    second.do(lambda: module.asked.append(f"{module.current} works"))
    assert module.current == "the first"
    second.hold(second.record(aside=True), aside=False)
    assert module.asked == [
        "the first records",
        "the second waits for an event of the first",
        "the second works",
        "the second records",
        "the first waits for an event of the second",
    ]
