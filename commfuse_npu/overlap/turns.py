"""Two threads of which only one runs at a time, until it hands over to the other.

The forward runs in the caller's thread, the backward in a second one.  Only calls of
:meth:`Turns.hand_over` decide which side runs, never speed, so the order is the same on all ranks::

    forward   | runs ... hand_over |                    | runs ... ends |
    backward  |                    | runs ... hand_over |               | runs ... ends |

The running side is known from the turn, not from the thread: autograd runs the backward of CUDA and
NPU tensors in its own threads, which belong to the side that called it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast

from commfuse_npu.overlap.states import SideState
from commfuse_npu.plan.turn_order import BACKWARD, FORWARD, HandOverPoint

__all__ = ["BACKWARD", "FORWARD", "OtherSideError", "Recording", "Turns"]

NAMES = "forward", "backward"


class OtherSideError(RuntimeError):
    """This side was ended because the other one failed; ``__cause__`` is that failure."""


class Turns:
    """The turns of one forward and one backward; the forward starts.

    Args:
        states: swapped whenever the turn changes.
        order: for each point of the forward, and of the backward, whether it hands over there;
            beyond the end of a list each point has its default.

    Attributes:
        side: whose turn it is.
        hand_overs: how often each side handed over.
        error: of the side that failed first.
    """

    def __init__(
        self, states: Sequence[SideState] = (), order: Sequence[Sequence[bool]] = ((), ())
    ) -> None:
        self.side = FORWARD
        self.hand_overs = [0, 0]
        self._order, self._passed = order, [0, 0]
        self.error: BaseException | None = None
        self._states = states
        self._saved: list[list[Any]] = [[], self._save()]
        self._ended = [False, False]
        self._gates = threading.Lock(), threading.Lock()
        for gate in self._gates:
            gate.acquire()

    def run(self, side: int, function: Callable[[], Any]) -> Any:
        """Run a side in the thread that calls it, the backward from its first turn on.

        An exception is kept in :attr:`error`.
        """
        error: BaseException | None = None
        result = None
        try:
            if side == BACKWARD:
                self._wait_for_turn(BACKWARD)
            result = function()
        except BaseException as failure:
            error = failure
        self.end(side, error)
        return result

    def reach_point(self, by_default: bool, began: Any = None, waits_for: Any = None) -> None:
        """A point to hand over: after a transfer started, or before the side waits for one.

        Args:
            by_default: whether to hand over if the order does not say.
            began: the transfer that started.
            waits_for: the transfer that the side waits for next, if known.
        """
        chosen, at = self._order[self.side], self._passed[self.side]
        self._passed[self.side] += 1
        if chosen[at] if at < len(chosen) else by_default:
            self.hand_over()

    def hand_over(self) -> None:
        """Let the other side run until it hands over or ends; nothing if it has ended.

        A range of ``torch.profiler``, from here to when the turn comes back.

        Raises:
            OtherSideError: the other side failed.
        """
        side, other = self.side, 1 - self.side
        self._check()
        if self._ended[other]:
            return
        self.hand_overs[side] += 1
        with _RecordFunctionFast(f"CommFuse: {NAMES[side]} handed over"):
            self._give_turn(other)
            self._wait_for_turn(side)

    def end(self, side: int, error: BaseException | None = None) -> None:
        """A side returned or raised ``error``; the other one runs to its end."""
        self._ended[side] = True
        self.error = self.error or error
        other = 1 - side
        if self._ended[other]:
            # A backward leaves random states as it found them, so those of the forward stay.
            if side == BACKWARD:
                self._restore(FORWARD)
        else:
            self._give_turn(other)

    def _give_turn(self, other: int) -> None:
        if self.side != other:  # equal if Ctrl-C came after the turn was given
            self._saved[self.side] = self._save()
            self._restore(other)
            self.side = other
        if self._gates[other].locked():
            self._gates[other].release()

    def _wait_for_turn(self, side: int) -> None:
        try:
            self._gates[side].acquire()
        except BaseException as error:
            # Ctrl-C, in the main thread.  If the other side runs, let it end first, so that the
            # cleanup of this side does not run at the same time.  Check the turn, not the lock:
            # Ctrl-C may come just after it was acquired.
            self.error = self.error or error
            if self.side != side:
                self._gates[side].acquire()
            raise
        self._check()

    def _check(self) -> None:
        if self.error is not None:
            raise OtherSideError(
                f"the {NAMES[self.side]} was ended because the {NAMES[1 - self.side]} beside it "
                f"failed: {self.error!r}"
            ) from self.error

    def _save(self) -> list[Any]:
        return [state.save() for state in self._states]

    def _restore(self, side: int) -> None:
        for state, saved in zip(self._states, self._saved[side], strict=True):
            state.restore(saved)


class Recording(Turns):
    """Measures one side that runs alone from its beginning to its end.

    It waits for each transfer where it starts.  Times are from events on the current stream,
    or the host clock on a CPU.  ``look``: see ``ForwardBackwardOverlap.record``.
    """

    def __init__(self, side: int, device: str, look: Callable[[int, int | None], object]) -> None:
        super().__init__()
        self.side = side
        self._device = None if device == "cpu" else torch.get_device_module(device)
        self._measured: list[tuple[Any, Any, Any, int | None, bool]] = []
        self._under_way: list[Any] = []
        self._look = look
        look(side, 0)
        self._resumed = self._now()

    def reach_point(self, by_default: bool, began: Any = None, waits_for: Any = None) -> None:
        reached, waits = self._now(), None
        if began is not None:
            self._under_way.append(began)
            began.wait()
        if waits_for in self._under_way:
            waits = self._under_way.index(waits_for)
            del self._under_way[waits]
        arrived = reached if began is None else self._now()
        self._measured.append((self._resumed, reached, arrived, waits, by_default))
        self._look(self.side, len(self._measured))
        self._resumed = self._now()

    def points(self) -> list[HandOverPoint]:
        """The points that were passed, and the end of the side, which is now."""
        end = self._now()
        if self._device is not None:
            self._device.synchronize()  # not the event's wait, which is a hand-over point
        self._look(self.side, None)
        return [
            HandOverPoint(
                self._seconds(resumed, reached), self._seconds(reached, arrived), waits, default
            )
            for resumed, reached, arrived, waits, default in [
                *self._measured,
                (self._resumed, end, end, None, False),
            ]
        ]

    def _now(self) -> Any:
        if self._device is None:
            return time.perf_counter()
        event = self._device.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        if start is end:
            return 0.0
        return end - start if self._device is None else float(start.elapsed_time(end)) / 1e3
