"""Reads the files of :mod:`commfuse_npu.runtime.order_log`, which anybody may have written.

A file is read in *stretches*, each up to a moment at which its rank has nothing under way.  What is
defined in a stretch is checked and kept; its events stay bytes until somebody asks for them, so
that a stretch that repeats itself is known by its bytes and need not be looked at again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from commfuse_npu.plan import Kind, Own, Piece, Plan, PlanError, Schedule, Transfer
from commfuse_npu.proof.rendezvous import Group
from commfuse_npu.runtime.order_log import VERSION

__all__ = ["Event", "LogError", "Message", "Operation", "RankLog", "Stretch", "TransportFacts"]

_LONGEST_LINE = 1 << 20
_MOST_RANKS = 1 << 16
_MOST_TRANSFERS = 1_000_000
_MOST_KNOWN = 100_000


class LogError(ValueError):
    """A file that is none of an order log, or files that do not belong together."""


class TransportFacts(NamedTuple):
    """A transport: its group, the number of its lanes, and whether it posts batches."""

    group: Group
    lanes: int
    batched: bool


class Message(NamedTuple):
    """One end of a transfer as it was posted; ``elements`` of ``dtype``."""

    transfer: Transfer
    elements: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.transfer}, {self.elements} x {self.dtype}"


@dataclass(frozen=True)
class Operation:
    """A plan as a rank began it; ``block`` is the shape of one block."""

    transport: int
    name: str
    plan: Plan
    block: tuple[int, ...]
    dtype: str
    options: str

    @property
    def facts(self) -> dict[str, object]:
        """What the ranks of the group have to have in common."""
        return {
            "name": self.name,
            "kind": self.plan.kind,
            "own block": self.plan.own,
            "size of the group": self.plan.size,
            "schedule": self.plan.schedule,
            "shape of a block": self.block,
            "dtype": self.dtype,
            "options": self.options,
        }


class Event(NamedTuple):
    """A line about a slot; ``operation`` of a start, ``messages`` of what is posted or awaited."""

    verb: str
    thread: int
    slot: int = -1
    operation: Operation | None = None
    messages: tuple[Message, ...] = ()
    transport: int = -1
    text: str = ""


class Stretch(NamedTuple):
    """Lines up to a moment with nothing under way, or to the end of the file (``last``)."""

    lines: list[bytes]
    counts: Counter[tuple[int, str]]
    last: bool


_POSTS = {"receive": 1, "send": 1, "queue": 1, "batch": 2, "wait": 1}


class RankLog:
    """The file of one rank.

    Attributes:
        rank, size: of the process in the job.
        transports: by number.
        ended: whether the file says that the process came to its end.
        torn: whether its last line is cut off.
        failures: what the rank said of transports that broke.
        generation: grows when operations and messages are defined anew.

    Raises:
        LogError, OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.transports: dict[int, TransportFacts] = {}
        self.ended = self.torn = False
        self.failures: list[str] = []
        self.generation = 0
        self._operations: dict[int, Operation] = {}
        self._messages: dict[int, Message] = {}
        self._known: dict[bytes, Event] = {}
        self._number = 0
        self._thread = 0
        self._open: dict[int, int] = {}
        self._file = path.open("rb")
        line = self._next()
        if line is None:
            raise LogError(f"{path} holds no line; it is not the log of a rank")
        header = self._parse(line)
        if not isinstance(header, dict) or "order_log" not in header:
            raise LogError(f"{path} does not begin with the line of an order log")
        if header["order_log"] != VERSION:
            raise LogError(
                f"{path} is an order log of version {header['order_log']!r}, this reads {VERSION}; "
                "use the version of commfuse-npu that wrote it"
            )
        self.size = self._whole(header, "size", 1, _MOST_RANKS)
        self.rank = self._whole(header, "rank", 0, self.size - 1)

    def close(self) -> None:
        self._file.close()

    def stretch(self) -> Stretch:
        """The next stretch; its definitions are known from now on.

        Raises:
            LogError: a line makes no sense.
        """
        lines: list[bytes] = []
        if self._thread:
            lines.append(b'["thread",%d]\n' % self._thread)
        counts: Counter[tuple[int, str]] = Counter()
        while (line := self._next()) is not None:
            if line.startswith(b"{"):
                self._define(self._fields(line))
                continue
            if self.ended:
                raise self._wrong("a line after the end")
            lines.append(line)
            begin = line[:5]
            if begin in (b'["sen', b'["rec', b'["bat', b'["wai', b'["que'):
                continue
            event = self._event(line)
            if event.verb == "start":
                assert event.operation is not None
                if event.slot in self._open:
                    raise self._wrong(f"slot {event.slot} is in use")
                self._open[event.slot] = event.operation.transport
                counts[event.operation.transport, "start"] += 1
            elif event.verb == "finish":
                if self._open.pop(event.slot, None) is None:
                    raise self._wrong(f"nothing is under way in slot {event.slot}")
                if not self._open:
                    return Stretch(lines, counts, last=False)
            elif event.verb == "meet":
                counts[event.transport, "meet"] += 1
            elif event.verb == "thread":
                self._thread = event.slot
            elif event.verb == "fail":
                self.failures.append(event.text)
            elif event.verb == "forget":
                if self._open:
                    raise self._wrong("definitions are forgotten while they are in use")
                self._operations, self._messages = {}, {}
                self.generation += 1
            elif event.verb == "end":
                self.ended = True
        return Stretch(lines, counts, last=True)

    @property
    def open_operations(self) -> int:
        """How many are under way at the end of what was read."""
        return len(self._open)

    def events(self, lines: list[bytes]) -> Iterator[Event]:
        """The events of a stretch, each with the thread that it is of.

        Raises:
            LogError: a line makes no sense.
        """
        thread = 0
        for line in lines:
            event = self._event(line)
            if event.verb == "thread":
                thread = event.slot
            else:
                yield event._replace(thread=thread)

    # ------------------------------------------------------------------ lines

    def _next(self) -> bytes | None:
        """The next line that is whole."""
        line = self._file.readline(_LONGEST_LINE)
        self._number += 1
        if not line:
            return None
        if not line.endswith(b"\n"):
            if len(line) == _LONGEST_LINE:
                raise self._wrong(f"it is longer than {_LONGEST_LINE} bytes")
            self.torn = True
            return None
        return line

    def _wrong(self, why: str) -> LogError:
        return LogError(f"{self.path}, line {self._number}: {why}")

    def _parse(self, line: bytes) -> Any:
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._wrong(f"{_shown(line)} is not JSON: {error}") from error

    def _fields(self, line: bytes) -> dict[str, Any]:
        """Of a line that begins as an object."""
        return cast("dict[str, Any]", self._parse(line))

    def _whole(self, fields: dict[str, Any], name: str, least: int = 0, most: int = 1 << 62) -> int:
        value = fields.get(name)
        if type(value) is not int or not least <= value <= most:
            raise self._wrong(f"{name} is {value!r}, not a whole number from {least} to {most}")
        return value

    def _text(self, fields: dict[str, Any], name: str) -> str:
        value = fields.get(name)
        if type(value) is not str:
            raise self._wrong(f"{name} is {value!r}, not a text")
        return value

    def _list(self, fields: dict[str, Any], name: str, fits: Callable[[Any], bool]) -> list[Any]:
        value = fields.get(name)
        if not isinstance(value, list) or not all(map(fits, value)):
            raise self._wrong(f"{name} is {value!r}, which it cannot be")
        return value

    def _event(self, line: bytes) -> Event:
        """What a line says; the same lines come again and again."""
        event = self._known.get(line)
        if event is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            event = self._known[line] = self._parsed(line)
        return event

    def _parsed(self, line: bytes) -> Event:
        content = self._parse(line)
        if not isinstance(content, list) or not content or type(content[0]) is not str:
            raise self._wrong(f"{_shown(line)} is neither a definition nor an event")
        verb, *rest = content
        if verb in ("forget", "end") and not rest:
            return Event(verb, 0)
        numbers = 1 + _POSTS.get(verb, 0) if verb not in ("meet", "fail") else 1
        if verb == "start":
            numbers = 2
        texts = 1 if verb in ("meet", "fail") else 0
        known = verb in _POSTS or verb in ("start", "finish", "meet", "fail", "close", "thread")
        fits = len(rest) == numbers + texts and all(
            type(value) is int and value >= 0 for value in rest[:numbers]
        )
        if not known or not fits or not all(type(text) is str for text in rest[numbers:]):
            raise self._wrong(f"{_shown(line)} is no event")
        if verb in _POSTS:
            unknown = [number for number in rest[1:] if number not in self._messages]
            if unknown:
                raise self._wrong(f"message {unknown[0]} is not defined")
            return Event(verb, 0, rest[0], messages=tuple(self._messages[n] for n in rest[1:]))
        if verb == "start":
            if rest[1] not in self._operations:
                raise self._wrong(f"operation {rest[1]} is not defined")
            return Event(verb, 0, rest[0], operation=self._operations[rest[1]])
        if verb in ("meet", "fail", "close"):
            if rest[0] not in self.transports:
                raise self._wrong(f"transport {rest[0]} is not defined")
            return Event(verb, 0, transport=rest[0], text=rest[1] if texts else "")
        return Event(verb, 0, rest[0])

    # ------------------------------------------------------------------ definitions

    def _define(self, fields: dict[str, Any]) -> None:
        self._known.clear()
        if "transport" in fields and "operation" not in fields:
            self._define_transport(fields)
        elif "operation" in fields:
            self._operations[self._whole(fields, "operation")] = self._operation(fields)
        elif "message" in fields:
            self._messages[self._whole(fields, "message")] = self._message(fields)
        else:
            raise self._wrong("it defines nothing")

    def _define_transport(self, fields: dict[str, Any]) -> None:
        number = self._whole(fields, "transport")
        ranks = self._list(fields, "ranks", lambda r: type(r) is int and 0 <= r < self.size)
        if number in self.transports or self.rank not in ranks or len(set(ranks)) < len(ranks):
            raise self._wrong(f"transport {number} of ranks {ranks} cannot be rank {self.rank}'s")
        lanes, batched = self._whole(fields, "lanes", 1), fields.get("batched")
        if type(batched) is not bool:
            raise self._wrong(f"batched is {batched!r}, not true or false")
        self.transports[number] = TransportFacts(Group(number, tuple(ranks)), lanes, batched)

    def _operation(self, fields: dict[str, Any]) -> Operation:
        transport = self._whole(fields, "transport")
        if transport not in self.transports:
            raise self._wrong(f"transport {transport} is not defined")
        ranks = self.transports[transport].group.ranks
        asked = fields.get("schedule")
        if not isinstance(asked, dict):
            raise self._wrong(f"schedule is {asked!r}, not its options")
        if isinstance(asked.get("costs"), list):
            asked = {**asked, "costs": tuple(asked["costs"])}
        block = self._list(fields, "block", lambda rows: type(rows) is int and rows >= 0)
        if not block:
            raise self._wrong("the block has no dimension")
        rank, size = self._whole(fields, "rank"), self._whole(fields, "size", 1, _MOST_RANKS)
        if (size, rank) != (len(ranks), ranks.index(self.rank)):
            raise self._wrong(
                f"the plan is of rank {rank} of {size}, its transport of ranks {ranks}"
            )
        kind, own = self._text(fields, "kind"), self._text(fields, "own")
        try:
            schedule = Schedule(**asked)
            if _transfers(schedule, kind, size) > _MOST_TRANSFERS:
                raise PlanError(f"it has more than {_MOST_TRANSFERS} transfers")
            plan = schedule.plan(cast("Kind", kind), rank, size, cast("Own", own))
            plan.inside(Piece(None, None, 0), block[0])
        except (PlanError, TypeError, OverflowError) as error:
            raise self._wrong(f"no plan can be made of {asked}: {error}") from error
        return Operation(
            transport,
            self._text(fields, "name"),
            plan,
            tuple(block),
            self._text(fields, "dtype"),
            self._text(fields, "options"),
        )

    def _message(self, fields: dict[str, Any]) -> Message:
        step, lane, source, target, elements = (
            self._whole(fields, name) for name in ("step", "lane", "source", "target", "elements")
        )
        piece = self._list(fields, "piece", lambda part: part is None or type(part) is int)
        if len(piece) != 3:
            raise self._wrong(f"piece is {piece}, which has not three parts")
        transfer = Transfer(step, lane, source, target, Piece(*piece))
        return Message(transfer, elements, self._text(fields, "dtype"))


def _transfers(schedule: Schedule, kind: str, size: int) -> int:
    """How many the plan of a rank has, so that nobody builds one that does not fit into memory."""
    distances = size * (size - 1) // 2 if (schedule.shape, kind) == ("ring", "all_to_all") else size
    return distances * schedule.chunks


def _shown(line: bytes) -> str:
    text = line.decode("utf-8", "replace").strip()
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
