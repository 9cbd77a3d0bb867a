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
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, partial
from itertools import count
from pathlib import Path

from commfuse_npu.plan.program import Program

__all__ = ["VERSION", "Entry", "OrderLog", "shared_order_log"]

VERSION = 3

_logger = logging.getLogger(__name__)
_json = json.JSONEncoder(separators=(",", ":")).encode

Entry = Callable[..., None]
"""Writes a line about a program, or a collective, under way: ``entry(verb, *numbers)``, before what
it says is carried out; ``finish`` or ``await`` is its last."""

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

    def transport(self, ranks: Sequence[int], lanes: int, batched: bool) -> int:
        """The number of a transport.  All ranks number theirs in the same order."""
        with self._lock:
            number, self._transports = self._transports, self._transports + 1
            self._line(
                {"transport": number, "ranks": list(ranks), "lanes": lanes, "batched": batched}
            )
        return number

    def program(
        self,
        transport: int,
        program: Program,
        name: str,
        dtype: Hashable,
        sum_dtype: Hashable = None,
        options: Hashable = (),
    ) -> Entry:
        """A program begins; the arguments are those of :meth:`Transport.begin`."""
        rule, schedule, *arguments = program.rule
        key = program, dtype, sum_dtype, options
        return self._begun(
            "begin",
            "program",
            transport,
            name,
            key,
            lambda: {
                "rule": rule,
                "schedule": dataclasses.asdict(schedule),
                "arguments": arguments,
                "dtype": str(dtype),
                "sum_dtype": str(sum_dtype),
                "options": repr(options),
            },
        )

    def collective(self, transport: int, kind: str, name: str, size: int, dtype: Hashable) -> Entry:
        """This rank is about to begin a collective of the group.

        Args:
            kind: ``all_gather``, ``reduce_scatter_tensor`` and the like.
            name: what is transferred.
            size: bytes that this rank gives or gets.
        """
        facts = {"kind": kind, "bytes": size, "dtype": str(dtype)}
        return self._begun(
            "issue", "collective", transport, name, (kind, size, dtype), lambda: facts
        )

    def write(self, verb: str, *more: str | int) -> None:
        """Write a line; of a transport ``meet`` and its name, ``fail`` and why, ``close``."""
        with self._lock:
            thread = threading.get_ident()
            if thread != self._thread:
                if thread not in self._threads:
                    self._threads.append(thread)
                self._thread = thread
                self._line(["thread", self._threads.index(thread)])
            self._line([verb, *more])

    def close(self) -> None:
        """The process has come to its end; nothing more is written."""
        with self._lock:
            self.write("end")
            self._stop()

    def _begun(
        self,
        verb: str,
        what: str,
        transport: int,
        name: str,
        key: Hashable,
        definition: Callable[[], Mapping[str, object]],
    ) -> Entry:
        """Take a slot for what begins, which is defined before if it is not yet."""
        with self._lock:
            # With nothing under way, so that what is remembered stays within bounds.
            if len(self._defined) >= _MOST_DEFINED and not self._in_use:
                self._defined.clear()
                self._line(["forget"])
            number = self._defined.get((transport, name, key))
            if number is None:
                number = self._defined[transport, name, key] = len(self._defined)
                self._line({what: number, "transport": transport, "name": name, **definition()})
            # The lowest free one, so that what repeats itself leaves the same lines.
            slot = next(slot for slot in count() if slot not in self._in_use)
            self._in_use.add(slot)
            self.write(verb, slot, number)
        return partial(self._about, slot)

    def _about(self, slot: int, verb: str, *more: int) -> None:
        with self._lock:
            if verb in ("finish", "await"):
                self._in_use.discard(slot)
            self.write(verb, slot, *more)

    def _line(self, content: object) -> None:
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
