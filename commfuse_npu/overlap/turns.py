"""Threads of which only one runs at a time, until it hands over to the next one.

The first pass runs in the caller's thread, each other one in a thread of its own.  Only calls of
:meth:`Turns.hand_over` decide which pass runs (:mod:`commfuse_npu.plan.turn_rule`), never speed, so
the order is the same on all ranks::

    forward    | runs ... hand_over |                    | runs ... ends |
    backward   |                    | runs ... hand_over |               | runs ... ends |

A pass is known by its thread.  By default autograd runs a device's backward in threads of its own;
in a pass it runs in the thread that calls it (``set_multithreading_enabled(False)``), so several
passes can run one.  A thread that belongs to no pass, such as a data loader's, never hands over.
"""

from __future__ import annotations

import signal
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast

from commfuse_npu.overlap.states import PassState, RandomState, restore_states, save_states
from commfuse_npu.overlap.thread_context import Autocast, ThreadContext
from commfuse_npu.overlap.weight_gradients import WeightGradients
from commfuse_npu.plan.turn_rule import filled_pass, next_pass

__all__ = ["OtherPassError", "Pass", "Turns"]

_idle: list[ThreadPoolExecutor] = []
"""Threads, one each, that run no pass: a new thread would start with a cold allocator cache."""


class OtherPassError(RuntimeError):
    """This pass was ended because another one failed; ``__cause__`` is that failure."""


@dataclass(eq=False)
class Pass:
    """A function that takes turns with others.

    Attributes:
        recomputes: whether it is a recomputation that runs ahead.
        slot: a number that no other pass has as long as this one has not ended; the first one's
            is 0.
        waits: how often it reached a point at which it hands over if another pass can run.
        hand_overs: how often it let another pass run.
        points: checksum of the names of the points that it reached, in order.
        result: what the function returned.
    """

    name: str
    function: Callable[[], Any]
    recomputes: bool = False
    waits: int = 0
    hand_overs: int = 0
    points: int = 0
    result: Any = None
    thread: int | None = None
    worker: ThreadPoolExecutor | None = None
    future: Future[None] | None = None
    slot: int = 0
    awaits: Pass | None = None
    ended: bool = False
    began_with: Sequence[dict[str, Any]] = ()
    saved: Sequence[dict[str, Any]] = ()

    def __post_init__(self) -> None:
        self.gate = threading.Lock()
        self.gate.acquire()


class Turns:
    """The turns of some passes; the first one begins.

    Args:
        states: swapped whenever the turn changes.
        device: ``npu``, ``cuda`` or ``cpu``.
        weight_gradients: those that wait to be computed.
        at_point: called at each point, with its name.

    Attributes:
        running: the pass whose turn it is.
        passes: all passes, in the order of their creation.
        error: of the pass that failed first.
        interrupted: whether Ctrl-C came; passes end where they hand over next.
    """

    running: Pass

    def __init__(
        self,
        states: Sequence[PassState],
        device: str,
        weight_gradients: WeightGradients,
        at_point: Callable[[str], object] | None = None,
    ) -> None:
        self._at_point = at_point
        self.weight_gradients = weight_gradients
        self.passes: list[Pass] = []
        self.error: BaseException | None = None
        self._failed = ""
        self._states = states
        self._device = device
        # Casts of autocast belong to the process.  Where autocast begins inside a pass, another
        # pass needs other ones; around all passes, they are shared as in order.
        self._shares_casts = Autocast(device).enabled
        self._ring: list[Pass] = []
        self.interrupted = False
        self._paused = False

    def run(self, functions: Mapping[str, Callable[[], Any]]) -> list[Any]:
        """Run the functions as passes; returns their results.

        Afterwards each state has the value that the first pass wrote last, else the second, ...: as
        if they had run one after the other, the last one first.

        Raises:
            BaseException: that of the pass that failed first, after all passes have ended.
            RuntimeError: a pass other than the first one drew random numbers, which are not those
                of a run in order.
        """
        given = [Pass(name, function) for name, function in functions.items()]
        first = self.running = given[0]
        with self._deferred_interrupts():
            for number, one in enumerate(given):
                self._add(one, number)
            for one in given[1:]:
                self._start(one)
            first.gate.release()
            self._run(first, None)
            for one in self.passes:
                self._release(one)
        if self.error is not None:
            raise self.error
        if self.interrupted:
            raise KeyboardInterrupt
        for one in reversed(given):
            self._keep_changes(one, random=one is first)
        return [one.result for one in given]

    @property
    def over(self) -> bool:
        """Whether all passes have ended."""
        return not self._ring

    @property
    def alone(self) -> bool:
        """Whether there is no other pass to hand over to."""
        return len(self._ring) == 1

    def runs_here(self) -> bool:
        """Whether the pass whose turn it is runs in the calling thread."""
        return self.running.thread == threading.get_ident() and not self._paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """In the block, collectives of the running pass are no points."""
        before = self._paused
        self._paused = True
        try:
            yield
        finally:
            self._paused = before

    def reach_point(self, name: str, hands_over: bool, fills: bool = False) -> None:
        """A point at which the pass hands over, or that only the checksum knows.

        Args:
            fills: a weight gradient may be computed before the wait that follows.
        """
        self.running.points = zlib.crc32(name.encode(), self.running.points)
        if self._at_point is not None:
            self._at_point(name)
        if hands_over:
            self.running.waits += 1
            self.hand_over(fills)

    def hand_over(self, fills: bool = False) -> None:
        """Let the next pass run; returns when the turn comes back.  Nothing if no other can run.

        A range of ``torch.profiler``, from here to when the turn comes back.

        Raises:
            OtherPassError: another pass failed.
            KeyboardInterrupt: Ctrl-C, since the turn began.
        """
        me = self.running
        self._check()
        other = self._next()
        if other is not me:
            me.hand_overs += 1
            with _RecordFunctionFast(f"CommFuse: {me.name} handed over"):
                self._give_turn(other)
                self._wait_for_turn(me)
        if fills and len(self.weight_gradients):
            filled = filled_pass([one.recomputes for one in self._ring])
            if filled is not None and self._ring[filled] is me:
                with self.paused():
                    self.weight_gradients.compute_one()

    def fork(self, recomputation: Callable[[], Any]) -> Pass:
        """Begin a recomputation, whose turn comes after that of the calling pass."""
        other = Pass("recomputation", recomputation, recomputes=True)
        self._add(other, self._ring.index(self.running) + 1)
        self._start(other)
        return other

    def join(self, other: Pass) -> Any:
        """Wait until a forked pass has ended; returns its result.

        What it wrote to states, the calling pass has from now on.
        """
        me = self.running
        me.awaits = other
        try:
            while not other.ended:
                self._check()
                self._give_turn(self._next())
                self._wait_for_turn(me)
        finally:
            me.awaits = None
        self._check()
        self._release(other)
        self._keep_changes(other, random=False)
        return other.result

    def _add(self, new: Pass, at: int) -> None:
        new.began_with = new.saved = save_states(self._states)
        taken = {one.slot for one in self._ring}
        new.slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        self._ring.insert(at, new)
        self.passes.append(new)

    def _start(self, new: Pass) -> None:
        new.worker = _idle.pop() if _idle else ThreadPoolExecutor(1, "commfuse-pass")
        new.future = new.worker.submit(self._run, new, ThreadContext(self._device))

    def _release(self, ended: Pass) -> None:
        """Wait for the thread of a pass, and make it idle."""
        if ended.future is not None and ended.worker is not None:
            ended.future.result()
            _idle.append(ended.worker)
            ended.worker = None

    def _run(self, me: Pass, context: ThreadContext | None) -> None:
        me.thread = threading.get_ident()
        try:
            self._wait_for_turn(me)
            with ExitStack() as stack:
                if context is not None:
                    context.enter(stack)
                # Last: inference_mode(False) would enable it.
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
                me.result = me.function()
        except BaseException as error:
            self._fail(me, error)
        del me.function
        self._end(me)

    def _end(self, me: Pass) -> None:
        me.ended = True
        following = self._next()
        self._ring.remove(me)
        me.thread = None
        if following is me:
            me.saved = save_states(self._states)
        else:
            self._give_turn(following)

    def _next(self) -> Pass:
        can_run = [not one.ended and (one.awaits is None or one.awaits.ended) for one in self._ring]
        return self._ring[next_pass(can_run, self._ring.index(self.running))]

    def _give_turn(self, other: Pass) -> None:
        try:
            self.running.saved = save_states(self._states)
            restore_states(self._states, other.saved)
            if not self._shares_casts:
                torch.clear_autocast_cache()
        except BaseException as error:
            self._fail(self.running, error)
        self.running = other
        other.gate.release()

    def _fail(self, one: Pass, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            self._failed = one.name

    def _wait_for_turn(self, me: Pass) -> None:
        me.gate.acquire()
        self._check()

    def _check(self) -> None:
        if self.interrupted and self.error is None:
            raise KeyboardInterrupt
        if self.error is not None:
            raise OtherPassError(
                f"the {self.running.name} was ended because the {self._failed} beside it failed: "
                f"{self.error!r}"
            ) from self.error

    @contextmanager
    def _deferred_interrupts(self) -> Iterator[None]:
        """Ctrl-C takes effect where a pass hands over or ends; a second one at once."""

        def interrupt(number: int, frame: FrameType | None) -> None:
            if self.interrupted:
                signal.default_int_handler(number, frame)
            self.interrupted = True

        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        ):
            yield
            return
        signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _keep_changes(self, other: Pass, random: bool) -> None:
        """Set what an ended pass has written."""
        for state, before, after in zip(self._states, other.began_with, other.saved, strict=True):
            changed = {
                name: value
                for name, value in after.items()
                if name not in before or not state.same(before[name], value)
            }
            if changed and isinstance(state, RandomState) and not random:
                raise RuntimeError(
                    f"the {other.name} drew random numbers of its own: they are not those of a run "
                    "in order; run it by itself, or leave RandomState out of states"
                )
            state.restore(changed)
