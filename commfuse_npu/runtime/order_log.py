"""Records the order of posts and waits of a rank, for ``commfuse-npu verify --log``.

Off unless an :class:`OrderLog` is passed to :meth:`Transport.create`; the option
``--commfuse-order-log FOLDER`` does so.  Each process writes a file of JSON lines.  It writes each
line at once, so that the log of a run that hangs or is killed is complete up to there::

    ["log", version, rank, size]        the first line
    ["transport", number, ranks]
    ["meet", transport, name]           the ranks of the group wait for each other
    ["begin", slot, transport, {...}]   a program begins: its name, rule, arguments, ...; slots are
                                        reused
    ["at", slot, index]                 about to execute this post or wait of the program's code
    ["finish", slot]                    the program has finished
    ["issue", slot, transport, {...}]   about to start a collective of the group, in a pair
                                        of forward-backward overlap
    ["await", slot]                     about to wait for it
    ["fail", transport, why]            the transport is broken
    ["close", transport]                the transport was closed
    ["thread", number]                  the following lines are from another thread
    ["end"]                             the process has exited

The reader compiles a program again from its rule and arguments, for this rank in the transport's
group; ``ranks`` are global ranks.  The log does not contain other communication of the job, such as
collectives of other groups, nor the collectives of an op that runs without lanes.

A post costs a line of about 12 bytes and some microseconds, the start of a program about 450 bytes.
If a line cannot be written (a full disk), recording ends with a warning and the job continues.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from itertools import count
from pathlib import Path

from commfuse_npu.plan.program import Program

__all__ = ["VERSION", "Entry", "OrderLog", "shared_order_log"]

VERSION = 6

_logger = logging.getLogger(__name__)
_json = json.JSONEncoder(separators=(",", ":")).encode

Entry = Callable[..., None]
"""Writes a line about one program or collective in flight: ``entry(verb, *numbers)``, called before
the action; the last verb is ``finish`` or ``await``."""


class OrderLog:
    """The file of one process, ``folder/rank_00000.jsonl``; an existing file is overwritten.

    Args:
        folder: created if it does not exist.  Every rank writes its own file, in a shared folder or
            in one on its machine; to verify a run, collect the files in one folder.
        rank, size: global rank of the process, and number of processes.

    Raises:
        OSError: the file cannot be created.
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
        self._in_use: set[int] = set()
        self._line(["log", VERSION, rank, size])

    def transport(self, ranks: Sequence[int]) -> int:
        """Record a transport and return its number.  All ranks call it in the same order."""
        with self._lock:
            number = self._transports
            self._transports = self._transports + 1
            self._line(["transport", number, list(ranks)])
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
        """Record that a program begins; arguments as for :meth:`Transport.begin`."""
        facts: dict[str, object] = {
            "name": name,
            "rule": type(program.rule).__name__,
            "schedule": dataclasses.asdict(program.spec.schedule),
            "arguments": list(vars(program.rule).values()),
            "dtype": str(dtype),
            "sum_dtype": str(sum_dtype),
            "options": repr(options),
        }
        return self._begun("begin", transport, facts)

    def collective(self, transport: int, kind: str, name: str, size: int, dtype: Hashable) -> Entry:
        """Record that this rank is about to start a collective of the group.

        Args:
            kind: name of the torch.distributed function, such as ``all_gather``.
            name: description, for errors.
            size: bytes of the first tensor; 0 if the ranks may have different sizes.
        """
        facts = {"name": name, "kind": kind, "bytes": size, "dtype": str(dtype)}
        return self._begun("issue", transport, facts)

    def write(self, verb: str, *more: object) -> None:
        """Write a line, for example ``write("fail", transport, why)``."""
        with self._lock:
            thread = threading.get_ident()
            if thread != self._thread:
                if thread not in self._threads:
                    self._threads.append(thread)
                self._thread = thread
                self._line(["thread", self._threads.index(thread)])
            self._line([verb, *more])

    def close(self) -> None:
        """Write ``end`` and close the file; later lines are ignored."""
        with self._lock:
            self.write("end")
            self._stop()

    def _begun(self, verb: str, transport: int, facts: dict[str, object]) -> Entry:
        """Take a slot and write that a program or collective begins."""
        with self._lock:
            # The lowest free slot, so that repeated steps write equal lines.
            slot = next(slot for slot in count() if slot not in self._in_use)
            self._in_use.add(slot)
            self.write(verb, slot, transport, facts)
        return partial(self._about, slot)

    def _about(self, slot: int, verb: str, *more: int) -> None:
        with self._lock:
            if verb in ("finish", "await"):
                self._in_use.discard(slot)
            self.write(verb, slot, *more)

    def _line(self, content: list[object]) -> None:
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
    """The log of this process in ``folder``: one object for all calls, closed when Python exits.

    Raises:
        OSError: the file cannot be created.
    """
    return _shared(Path(folder).absolute(), rank, size)


@cache
def _shared(folder: Path, rank: int, size: int) -> OrderLog:
    log = OrderLog(folder, rank, size)
    atexit.register(log.close)
    return log
