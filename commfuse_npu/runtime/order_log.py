"""Writes down what a rank posts and waits for, in order, for ``commfuse-npu verify --log``.

Off unless an :class:`OrderLog` is given to :meth:`Transport.create`; the option
``--commfuse-order-log FOLDER`` does so.  Each process writes a file of JSON lines, each line as it
happens, so that a run that hangs or is killed leaves all it did.  The first lines say who writes,
others define what comes up again; the others are short::

    {"order_log": 1, "rank": 0, "size": 2}
    {"transport": 0, "ranks": [0, 1], "lanes": 2, "batched": false}
    {"operation": 0, "transport": 0, "name": "all_gather_linear", "kind": "gather", ...}
    {"message": 0, "step": 0, "lane": 0, "source": 0, "target": 1, "piece": [0, null, 0], ...}

    ["meet", transport, name]           the ranks of the group wait for each other
    ["start", slot, operation]          a plan begins; slots are used again
    ["receive", slot, message]          about to post a receive
    ["send", slot, message]             about to post a send
    ["queue", slot, message]            gloo: a send is held back until its lane is free
    ["batch", slot, message, message]   HCCL: about to post a send and a receive as one
    ["wait", slot, message]             about to wait, for a batch as a whole
    ["finish", slot]                    all of the plan was waited for
    ["fail", transport, why]            the transport is broken
    ["close", transport]                it was given up
    ["thread", number]                  the lines from here on are of another thread
    ["forget"]                          operations and messages are defined anew from here on
    ["end"]                             the process came to its end

Ranks in it are places in the transport's group, but for the first line and ``ranks``, which are
those of the job.  What else the job does, collectives of other groups above all, is not in it.

A post costs a line of about 20 bytes, some microseconds.  If a line cannot be written (a full
disk), recording ends with a warning and the job goes on.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

from commfuse_npu.plan import Plan, Transfer

__all__ = ["VERSION", "OperationLog", "OrderLog", "TransportLog", "shared_order_log"]

VERSION = 1

_logger = logging.getLogger(__name__)

_MOST_DEFINED = 50_000
"""Operations and messages that are remembered as defined; then they are defined anew."""


class OrderLog:
    """The file of one process, ``folder/rank_00000.jsonl``; an older one of that name is replaced.

    Args:
        folder: made if it does not exist.  Every rank writes a file of its own in it, or in one of
            the same name on its own machine; collect them to verify them.
        rank, size: of the process in the job.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank_{rank:05d}.jsonl"
        self._file = self.path.open("w", encoding="utf-8", buffering=1)
        self._open = True
        # Two transports may be in use by two threads at once.
        self._lock = threading.RLock()
        self._threads = [threading.get_ident()]
        self._thread = self._threads[0]
        self._transports = 0
        self._defined: dict[Hashable, int] = {}
        self._in_use: set[int] = set()
        self._line({"order_log": VERSION, "rank": rank, "size": size})

    def transport(self, ranks: Sequence[int], lanes: int, batched: bool) -> TransportLog:
        """The part of one transport.  All ranks make theirs in the same order."""
        with self._lock:
            number = self._transports
            self._transports += 1
            self._line(
                {"transport": number, "ranks": list(ranks), "lanes": lanes, "batched": batched}
            )
        return TransportLog(self, number)

    def close(self) -> None:
        """The process has come to its end; nothing more is written."""
        with self._lock:
            self._write(["end"])
            self._stop()

    # ------------------------------------------------------------------ for the parts

    def _write(self, event: list[Any]) -> None:
        with self._lock:
            thread = threading.get_ident()
            if thread != self._thread:
                if thread not in self._threads:
                    self._threads.append(thread)
                self._thread = thread
                self._line(["thread", self._threads.index(thread)])
            self._line(event)

    def _line(self, content: Any) -> None:
        if not self._open:
            return
        try:
            self._file.write(json.dumps(content, separators=(",", ":")) + "\n")
        except OSError as error:
            _logger.warning(
                "%s: %s; the order of transfers is not recorded any more, the job goes on",
                self.path,
                error,
            )
            self._stop()

    def _stop(self) -> None:
        self._open = False
        try:
            self._file.close()
        except OSError as error:
            _logger.warning("%s: its end is lost: %s", self.path, error)

    def _number(self, kind: str, about: Hashable, facts: Callable[[], dict[str, Any]]) -> int:
        """The number of an operation or a message, which is written down when it is new."""
        key = kind, about
        with self._lock:
            number = self._defined.get(key)
            if number is None:
                number = self._defined[key] = len(self._defined)
                self._line({kind: number, **facts()})
        return number

    def _forget(self) -> None:
        """Between operations: keep what is remembered as defined within bounds."""
        if len(self._defined) >= _MOST_DEFINED and not self._in_use:
            self._defined.clear()
            self._line(["forget"])

    def _take_slot(self) -> int:
        """The lowest free one, so that what repeats itself leaves the same lines."""
        slot = 0
        while slot in self._in_use:
            slot += 1
        self._in_use.add(slot)
        return slot


class TransportLog:
    """What one transport does."""

    def __init__(self, log: OrderLog, number: int) -> None:
        self._log = log
        self._transport = number

    def start(
        self, plan: Plan, name: str, block: Sequence[int], dtype: Hashable, options: Hashable
    ) -> OperationLog:
        """A plan begins."""
        log = self._log
        asked = repr(options)

        def facts() -> dict[str, Any]:
            return {
                "transport": self._transport,
                "name": name,
                "kind": plan.kind,
                "own": plan.own,
                "rank": plan.rank,
                "size": plan.size,
                "schedule": dataclasses.asdict(plan.schedule),
                "block": list(block),
                "dtype": str(dtype),
                "options": asked,
            }

        about = self._transport, name, plan.kind, plan.own, plan.schedule, *block, dtype, asked
        with log._lock:
            log._forget()
            number = log._number("operation", about, facts)
            slot = log._take_slot()
            log._write(["start", slot, number])
        return OperationLog(log, slot)

    def meet(self, name: str) -> None:
        """This rank is about to wait for the others of its group."""
        self._log._write(["meet", self._transport, name])

    def fail(self, why: str) -> None:
        self._log._write(["fail", self._transport, why])

    def close(self) -> None:
        self._log._write(["close", self._transport])


class OperationLog:
    """What one plan under way does.  Messages are written down as they are posted."""

    def __init__(self, log: OrderLog, slot: int) -> None:
        self._log = log
        self._slot = slot

    def message(self, transfer: Transfer, elements: int, dtype: Hashable) -> int:
        """The number of a message, for the other calls."""
        return self._log._number(
            "message",
            (transfer, elements, dtype),
            lambda: {
                **transfer._asdict(),
                "piece": list(transfer.piece),
                "elements": elements,
                "dtype": str(dtype),
            },
        )

    def post(self, verb: str, *messages: int) -> None:
        """``receive``, ``send``, ``queue`` or ``wait`` of a message, or ``batch`` of two."""
        self._log._write([verb, self._slot, *messages])

    def finish(self) -> None:
        """All of it was waited for."""
        with self._log._lock:
            self._log._in_use.discard(self._slot)
            self._log._write(["finish", self._slot])


_shared: dict[Path, OrderLog] = {}


def shared_order_log(folder: str | Path, rank: int, size: int) -> OrderLog:
    """The log of this process in ``folder``, the same at every call, closed when Python ends.

    Raises:
        OSError: the file cannot be made.
    """
    path = Path(folder).absolute()
    if path not in _shared:
        _shared[path] = OrderLog(path, rank, size)
        atexit.register(_shared[path].close)
    return _shared[path]
