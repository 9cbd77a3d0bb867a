"""Two threads of which one runs at a time, until it hands over to the other.

The forward side is the caller's thread, the backward side a second one.  Which side runs is decided
by calls of :meth:`Turns.hand_over` alone, never by speed, so that the order is the same on every
rank::

    forward   | runs ... hand_over |                    | runs ... ends |
    backward  |                    | runs ... hand_over |               | runs ... ends |

Whoever runs is known from whose turn it is, not from its thread: autograd runs a backward of CUDA
and NPU tensors in threads of its own, which belong to the side that called it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from commfuse_npu.plan.turn_order import BACKWARD, FORWARD

__all__ = ["BACKWARD", "FORWARD", "OtherSideError", "SideState", "Turns"]

NAMES = "forward", "backward"


class OtherSideError(RuntimeError):
    """This side was ended because the other one failed; its cause is that failure."""


class SideState(Protocol):
    """State outside the autograd graph that each side has to find as it left it.

    Random states are such state, and a global that the forward of one micro-batch sets and the
    recomputation of another one sets again.
    """

    def save(self) -> Any:
        """What :meth:`restore` puts back."""

    def restore(self, saved: Any) -> None:
        """Put back what :meth:`save` returned."""


class Turns:
    """The turns of one forward and one backward; the forward begins.

    Args:
        states: exchanged whenever the turn changes.
        order: for each place of the forward, and of the backward, whether it hands over there;
            beyond the end of a list, or without one, each place has its default.

    Attributes:
        side: whose turn it is.
        hand_overs: how often each side handed over.
    """

    def __init__(
        self, states: Sequence[SideState] = (), order: Sequence[Sequence[bool]] = ((), ())
    ) -> None:
        self.side = FORWARD
        self.hand_overs = [0, 0]
        self._order, self._places = order, [0, 0]
        self.error: BaseException | None = None
        self._states = states
        self._saved: list[list[Any]] = [[], self._save()]
        self._ended = [False, False]
        self._gates = threading.Lock(), threading.Lock()
        for gate in self._gates:
            gate.acquire()

    def begin(self) -> None:
        """Wait for the first turn of the backward side, in its thread.

        Raises:
            OtherSideError: the forward failed before it handed over.
        """
        self._wait_for_turn(BACKWARD)

    def began(self, work: Any, blocking: bool) -> None:
        """A place: a transfer began, which the caller waits for at once if it is ``blocking``."""
        self._place(blocking)

    def waits(self, by_default: bool, work: Any = None) -> None:
        """A place: the side is about to wait for what it began earlier, ``work`` if it is known."""
        self._place(by_default)

    def _place(self, by_default: bool) -> None:
        chosen, at = self._order[self.side], self._places[self.side]
        self._places[self.side] += 1
        if chosen[at] if at < len(chosen) else by_default:
            self.hand_over()

    def hand_over(self) -> None:
        """Let the other side run until it hands over or ends; nothing if it has ended.

        Raises:
            OtherSideError: the other side failed.
        """
        side, other = self.side, 1 - self.side
        self._check()
        if self._ended[other]:
            return
        self.hand_overs[side] += 1
        self._give_turn(other)
        self._wait_for_turn(side)

    def end(self, side: int, error: BaseException | None = None) -> None:
        """A side returned, or raised ``error``; the other one runs to its end."""
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
        if self.side != other:  # else Ctrl-C came after the turn was given
            self._saved[self.side] = self._save()
            self._restore(other)
            self.side = other
        if self._gates[other].locked():
            self._gates[other].release()

    def _wait_for_turn(self, side: int) -> None:
        try:
            self._gates[side].acquire()
        except BaseException as error:
            # Ctrl-C, in the main thread.  If the other side runs, let it end first, so that what
            # this one does on its way out is not done beside it.  The lock does not tell: Ctrl-C
            # may come just after it was acquired.
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
