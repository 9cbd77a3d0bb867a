"""A rank's line to the referee."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import count
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue

from tests.emulator.errors import BY_KIND, LostError, OverdueError
from tests.emulator.messages import (
    Ask,
    Communicator,
    Data,
    Done,
    End,
    Ended,
    Failed,
    Fetch,
    FromRank,
    Open,
    Post,
    Read,
    Wait,
)
from tests.emulator.settings import Settings

_MARGIN = 10.0
"""Seconds after which a rank stops waiting for a referee that should have ended the wait."""


class Contribution:
    """What a rank sends with one operation, read from its tensors once, as late as possible."""

    def __init__(self, read: Callable[[], Data]) -> None:
        self._read: Callable[[], Data] | None = read
        self.data: Data = {}

    def take(self) -> Data:
        if self._read is not None:
            self.data, self._read = self._read(), None
        return self.data


class Link:
    """One per process.  A thread listens to the referee; the others post and wait."""

    def __init__(self, pipe: Connection, settings: Settings) -> None:
        self.settings = settings
        self._pipe = pipe
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._numbers = count()
        self._unread: dict[int, Contribution] = {}
        self._asked: dict[int, float] = {}
        self._blocked = 0
        self._run = 0
        self._gone = False
        self._users: set[int | None] = set()
        self._replies: dict[int, SimpleQueue[Done | Failed]] = {}
        threading.Thread(target=self._listen, daemon=True, name="referee").start()

    def begin(self, settings: Settings) -> None:
        """A new function starts."""
        self.settings = settings
        self._run += 1
        with self._lock:
            self._unread.clear()
            self._asked.clear()

    def end(self, error: BaseException | None) -> None:
        """The function is over: nothing more is posted."""
        self._say(Ended(self._run, None if error is None else f"{type(error).__name__}: {error}"))

    def post(
        self,
        communicator: Communicator,
        name: str,
        contribution: Contribution | None,
        *,
        ends: tuple[End, ...] = (),
        agreed: str | None = None,
    ) -> int:
        """Queue an operation; returns its number.  Does not wait for anything."""
        number = next(self._numbers)
        with self._lock:
            self._users.add(threading.get_ident())
            if contribution is not None:
                self._unread[number] = contribution
        thread, contributes = threading.get_ident(), contribution is not None
        self._say(Post(number, communicator, name, thread, ends, agreed, contributes))
        return number

    def open(self, communicators: tuple[Communicator, ...], seconds: float) -> None:
        """Open communicators together with their other ranks."""
        self._wait(lambda: None, lambda _, *host: Open(communicators, *host), seconds)

    def wait(self, number: int, seconds: float) -> Data:
        """Wait for an operation; returns what it receives."""
        return self._wait(
            lambda: self._take(number),
            lambda data, thread, threads, limit: Wait(number, thread, threads, limit, data),
            seconds,
        )

    def is_complete(self, number: int) -> bool:
        """Whether an operation that was not waited for yet is complete."""
        replies = self._mine()
        self._say(Ask(number, threading.get_ident()))
        return self._reply(replies, _MARGIN).answer

    # ------------------------------------------------------------------ inside

    def _wait(
        self,
        take: Callable[[], Data | None],
        message: Callable[[Data | None, int, frozenset[int], float], FromRank],
        seconds: float,
    ) -> Data:
        replies = self._mine()
        with self._lock:
            self._blocked += 1
            asked = {number: self._take_locked(number) for number in self._asked}
            self._asked.clear()
        try:
            # From here on this thread changes no buffer: what others wait for can be read.
            for number, data in asked.items():
                self._say(Read(number, data or {}))
            seconds = min(seconds, self.settings.timeout)
            self._say(message(take(), threading.get_ident(), self._threads(), seconds))
            return self._reply(replies, seconds + _MARGIN).data
        finally:
            with self._lock:
                self._blocked -= 1

    def _threads(self) -> frozenset[int]:
        """The main thread, and those that posted and are still there."""
        alive = {thread.ident for thread in threading.enumerate()}
        with self._lock:
            self._users.add(threading.get_ident())
            self._users &= alive
            users = {*self._users, threading.main_thread().ident}
        return frozenset(thread for thread in users if thread is not None)

    def _mine(self) -> SimpleQueue[Done | Failed]:
        with self._lock:
            return self._replies.setdefault(threading.get_ident(), SimpleQueue())

    def _reply(self, replies: SimpleQueue[Done | Failed], seconds: float) -> Done:
        if self._gone:
            raise LostError("the referee is gone")
        try:
            reply = replies.get(timeout=seconds)
        except Empty:
            raise OverdueError(f"the referee did not answer within {seconds} s") from None
        if isinstance(reply, Failed):
            raise BY_KIND[reply.kind](reply.report)
        return reply

    def _say(self, message: FromRank) -> None:
        try:
            with self._sending:
                self._pipe.send(message)
        except OSError as error:
            raise LostError("the referee is gone") from error

    def _take(self, number: int) -> Data | None:
        with self._lock:
            return self._take_locked(number)

    def _take_locked(self, number: int) -> Data | None:
        contribution = self._unread.pop(number, None)
        return None if contribution is None else contribution.take()

    def _listen(self) -> None:
        try:
            while True:
                pause = self._until_grace_ends()
                if pause is None or self._pipe.poll(pause):
                    self._hear(self._pipe.recv())
                self._read_overdue()
        except (EOFError, OSError, LostError):
            self._gone = True
            with self._lock:
                for thread, replies in self._replies.items():
                    replies.put(Failed(thread, "lost", "the referee is gone"))

    def _hear(self, message: Done | Failed | Fetch) -> None:
        if not isinstance(message, Fetch):
            self._replies[message.thread].put(message)
            return
        with self._lock:
            if message.number not in self._unread:
                return
            if not self._blocked and self.settings.read_sends == "wait":
                self._asked[message.number] = time.monotonic() + self.settings.grace
                return
            data = self._take_locked(message.number)
        self._say(Read(message.number, data or {}))

    def _until_grace_ends(self) -> float | None:
        with self._lock:
            ends = min(self._asked.values(), default=None)
        return None if ends is None else max(0.0, ends - time.monotonic())

    def _read_overdue(self) -> None:
        with self._lock:
            now = time.monotonic()
            due = [number for number, ends in self._asked.items() if ends <= now]
            found = {number: self._take_locked(number) for number in due}
            for number in due:
                del self._asked[number]
        for number, data in found.items():
            if data is not None:
                self._say(Read(number, data))
