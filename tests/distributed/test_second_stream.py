"""Operations whose second stream is late: what is aside runs only when the first one holds for it.

On a CPU there is one stream, and the host's order is the only one that ever happens.  Here the
sums and copies that are aside are put off as far as the events of the program allow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commfuse_npu.ops import LinearOptions, all_gather_linear, linear_reduce_scatter
from commfuse_npu.plan import Schedule
from commfuse_npu.runtime import executor
from commfuse_npu.runtime.executor import Running
from commfuse_npu.runtime.second_stream import SecondStream
from commfuse_npu.runtime.transport import Transport
from tests.limits import PATIENT


class LateStream:
    """Does what it is given only when somebody holds for it."""

    def __init__(self, holds: bool) -> None:
        self.holds = holds
        self.entered = False
        self.put_off: deque[Callable[[], None]] = deque()
        self.done = self.given = 0

    def __enter__(self) -> None:
        self.entered = True

    def __exit__(self, *error: object) -> None:
        self.entered = False

    def give(self, work: Callable[[], None]) -> None:
        self.put_off.append(work)
        self.given += 1

    def record(self, *, aside: bool) -> int:
        # The first stream is the host: what it was given is done.
        return self.given if aside else 0

    def hold(self, event: int, *, aside: bool) -> None:
        while self.holds and self.done < event:
            self.put_off.popleft()()
            self.done += 1


def late(patch: pytest.MonkeyPatch, stream: LateStream) -> None:
    light = Running._light

    def given(self: Running, one: tuple[Any, ...]) -> None:
        if stream.entered:
            # Not entered when it is done: a wait on gloo holds the host, and with it both streams.
            stream.give(lambda: light(self, one))
        else:
            light(self, one)

    patch.setattr(Running, "_light", given)
    patch.setattr(executor, "second_stream", lambda device: stream)


def column(link: Transport, options: LinearOptions) -> list[torch.Tensor]:
    x, weight, grad = leaf(link.rank, 8, 16), leaf(1, 24, 16), leaf(2, 8 * link.size, 24)
    out = all_gather_linear(x, weight, transport=link, options=options)
    out.backward(grad.detach())
    return [out.detach(), x.grad, weight.grad]


def row(link: Transport, options: LinearOptions) -> list[torch.Tensor]:
    x, weight, grad = leaf(link.rank, 8 * link.size, 16), leaf(1, 24, 16), leaf(2, 8, 24)
    out = linear_reduce_scatter(x, weight, transport=link, options=options)
    out.backward(grad.detach())
    return [out.detach(), x.grad, weight.grad]


def leaf(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).requires_grad_()


def calls(rank: int, chunks: int, holds: bool) -> list[int]:
    """The same bits as with one stream; how often something was put off."""
    link = Transport.create(lanes=2, timeout=PATIENT, batched=True)
    options = LinearOptions(schedule=Schedule(chunks=chunks))
    given = []
    for op in (column, row):
        expected = op(link, options)
        link.scratch.clear()
        stream = LateStream(holds)
        with pytest.MonkeyPatch.context() as patch:
            late(patch, stream)
            got = op(link, options)
        assert not stream.put_off or not holds, "the program ended before what is aside"
        same = all(map(torch.equal, got, expected))
        assert same == holds, "the sums and copies that are aside are not in the results"
        given.append(stream.given)
    return given


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("size", [2, 3])
def test_a_late_second_stream_changes_no_bit(ranks: Any, size: int, chunks: int) -> None:
    for given in ranks(size).run(calls, chunks, True):
        assert all(given), "nothing was aside"


def test_without_holding_for_it_the_results_are_others(ranks: Any) -> None:
    ranks(3).run(calls, 4, False)


# ---------------------------------------------------------------------- the device's own streams


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
    with second:
        assert module.current == "the second"
    assert module.current == "the first"
    second.hold(second.record(aside=True), aside=False)
    assert module.asked == [
        "the first records",
        "the second waits for an event of the first",
        "the second records",
        "the first waits for an event of the second",
    ]
