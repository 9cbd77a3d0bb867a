"""Writes down what a rank posts and waits for, in order, for ``commfuse-npu verify --log``.

Off unless an :class:`OrderLog` is given to :meth:`Transport.create`; the option
``--commfuse-order-log FOLDER`` does so.  Each process writes a file of JSON lines, each line as it
happens, so that a run that hangs or is killed leaves all it did.  The first lines say who writes,
others define what comes up again; the others are short::

    {"order_log": 3, "rank": 0, "size": 2}
    {"transport": 0, "ranks": [0, 1], "lanes": 2, "batched": false}
    {"program": 0, "transport": 0, "name": "all_gather_linear", "rule": "gather_gemm", ...}
    {"collective": 1, "transport": 0, "name": "all_gather_into_tensor of a backward", ...}

    ["meet", transport, name]           the ranks of the group wait for each other
    ["begin", slot, program]            a program begins; slots are used again
    ["at", slot, place]                 about to carry out a post or a wait: the place in its code
    ["rows", slot, step, ...]           about to wait for what arrives in these steps
    ["finish", slot]                    the program came to its end
    ["issue", slot, collective]         about to begin a collective of the group, in a pair
                                        of forward-backward overlap
    ["await", slot]                     about to wait for it
    ["fail", transport, why]            the transport is broken
    ["close", transport]                it was given up
    ["thread", number]                  the lines from here on are of another thread
    ["forget"]                          programs are defined anew from here on
    ["end"]                             the process came to its end

A program is compiled again by who reads the file, from its rule and the rule's arguments, for this
rank's place in the transport's group; the ``ranks`` are those of the job.  What else the job does,
collectives of other groups above all, is not in it, and neither are plain collectives in the place
of an op's program.

A post costs a line of about 12 bytes, some microseconds.  If a line cannot be written (a full
disk), recording ends with a warning and the job goes on.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, cast

from commfuse_npu.plan import Schedule
from commfuse_npu.plan.program import Program

__all__ = ["VERSION", "OrderLog", "SlotLog", "TransportLog", "shared_order_log"]

VERSION = 3

_logger = logging.getLogger(__name__)
_json = json.JSONEncoder(separators=(",", ":")).encode

_MOST_DEFINED = 1000
"""Programs and collectives that are remembered as defined; then they are defined anew."""


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
            self._write("end")
            self._stop()

    # ------------------------------------------------------------------ for the parts

    def _write(self, *event: str | int) -> None:
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
            self._file.write(_json(content) + "\n")
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


class TransportLog:
    """What one transport does."""

    def __init__(self, log: OrderLog, number: int) -> None:
        self._log = log
        self._transport = number

    def begin(
        self,
        program: Program,
        name: str,
        dtype: Hashable,
        sum_dtype: Hashable = None,
        options: Hashable = (),
    ) -> SlotLog:
        """A program begins; the arguments are those of :meth:`Transport.begin`."""

        def definition() -> dict[str, object]:
            rule, schedule, *arguments = program.rule
            return {
                "rule": rule,
                "schedule": dataclasses.asdict(cast(Schedule, schedule)),
                "arguments": arguments,
                "dtype": str(dtype),
                "sum_dtype": str(sum_dtype),
                "options": repr(options),
            }

        key = program, name, dtype, sum_dtype, options
        return self._begun("begin", "program", name, key, definition)

    def collective(self, kind: str, name: str, size: int, dtype: Hashable) -> SlotLog:
        """This rank is about to begin a collective of the group.

        Args:
            kind: ``all_gather``, ``reduce_scatter_tensor`` and the like.
            name: what is transferred.
            size: bytes that this rank gives or gets.
        """
        facts: dict[str, object] = {"kind": kind, "bytes": size, "dtype": str(dtype)}
        return self._begun("issue", "collective", name, (kind, name, size, dtype), lambda: facts)

    def _begun(
        self,
        verb: str,
        what: str,
        name: str,
        key: Hashable,
        definition: Callable[[], dict[str, object]],
    ) -> SlotLog:
        """Take a slot for what begins, which is defined before if it is not yet."""
        log = self._log
        with log._lock:
            # With nothing under way, so that what is remembered stays within bounds.
            if len(log._defined) >= _MOST_DEFINED and not log._in_use:
                log._defined.clear()
                log._line(["forget"])
            number = log._defined.get((self._transport, key))
            if number is None:
                number = log._defined[self._transport, key] = len(log._defined)
                about = {what: number, "transport": self._transport, "name": name}
                log._line(about | definition())
            # The lowest free one, so that what repeats itself leaves the same lines.
            slot = next(slot for slot in count() if slot not in log._in_use)
            log._in_use.add(slot)
            log._write(verb, slot, number)
        return SlotLog(log, slot)

    def meet(self, name: str) -> None:
        """This rank is about to wait for the others of its group."""
        self._log._write("meet", self._transport, name)

    def fail(self, why: str) -> None:
        self._log._write("fail", self._transport, why)

    def close(self) -> None:
        self._log._write("close", self._transport)


class SlotLog:
    """What a program, or a collective, under way does."""

    def __init__(self, log: OrderLog, slot: int) -> None:
        self._log = log
        self._slot = slot

    def at(self, place: int) -> None:
        """It is about to carry out the post or the wait in this place of its code."""
        self._log._write("at", self._slot, place)

    def rows(self, steps: Sequence[int]) -> None:
        """It is about to wait for what arrives in these steps, ahead of its own waits."""
        self._log._write("rows", self._slot, *steps)

    def finish(self) -> None:
        """The program came to its end."""
        self._end("finish")

    def wait(self) -> None:
        """This rank is about to wait for the collective."""
        self._end("await")

    def _end(self, verb: str) -> None:
        """Its last line: the slot is free."""
        with self._log._lock:
            self._log._in_use.discard(self._slot)
            self._log._write(verb, self._slot)


def shared_order_log(folder: str | Path, rank: int, size: int) -> OrderLog:
    """The log of this process in ``folder``, the same at every call, closed when Python ends.

    Raises:
        OSError: the file cannot be made.
    """
    return _shared(Path(folder).absolute(), rank, size)


@cache
def _shared(folder: Path, rank: int, size: int) -> OrderLog:
    log = OrderLog(folder, rank, size)
    atexit.register(log.close)
    return log
