"""Reads order logs (:mod:`commfuse_npu.runtime.order_log`); the files are not trusted.

The files of all ranks are read side by side (:func:`read_to_cuts`).  Lines are kept as bytes, so
that repeated parts are recognized and not parsed again.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from commfuse_npu.plan import Schedule
from commfuse_npu.plan.program import Program
from commfuse_npu.plan.rules import RULES
from commfuse_npu.plan.schedule import RankSpec
from commfuse_npu.proof.rendezvous import Group
from commfuse_npu.runtime.order_log import VERSION

__all__ = ["Begun", "Event", "LogError", "RankLog", "opened", "read_to_cuts"]

_LONGEST_LINE = 1 << 20
_MOST_RANKS = 1 << 16
_MOST_TRANSFERS = 1 << 13
_MOST_KNOWN = 100_000
_MOST_SHOWN = 300


class LogError(ValueError):
    """A file is not an order log, or the files do not belong together."""


class Begun(NamedTuple):
    """A program, or a collective of a group, as a rank defined it.

    Attributes:
        facts: what has to be equal on all ranks.
        program, batched: the program, and the one that HCCL would run; ``None`` for a collective.
    """

    group: Group
    name: str
    facts: dict[str, Any]
    program: Program | None = None
    batched: Program | None = None

    @property
    def kind(self) -> str:
        return "operation" if self.program else "collective"


class Event(NamedTuple):
    """A line.  ``number`` is a slot, transport or thread; ``more`` are indices or steps."""

    verb: str
    number: int = 0
    more: tuple[int, ...] = ()
    text: str = ""
    begun: Begun | None = None


_EVENTS = {
    "begin": "nn", "at": "nn", "finish": "n", "issue": "nn", "await": "n",
    "meet": "nt", "fail": "nt", "close": "n", "thread": "n", "forget": "", "end": "",
}  # fmt: skip
"""The arguments of each verb: ``n`` for a number, ``t`` for a text, as a regular expression."""

_DEFINED = {"begin": "program", "issue": "collective"}
"""The kind of definition that a verb refers to."""
_LASTS = {"at": "begin", "finish": "begin", "await": "issue"}
"""The verb that has to have taken the slot that a verb is about."""
_OF_PROGRAM = {"transport": int, "schedule": dict, "arguments": list, "name": str, "rule": str,
               "dtype": str, "sum_dtype": str, "options": str}  # fmt: skip
_OF_COLLECTIVE = {"transport": int, "name": str, "kind": str, "bytes": int, "dtype": str}
"""Fields of a definition and their types; all but ``transport`` have to be equal on all ranks."""


class RankLog:
    """The file of one rank.

    Attributes:
        rank, size: global rank of the process, and number of processes.
        groups: of its transports, by their numbers.
        lines: those read since the last :meth:`cut`; they start in thread 0.
        counts, before: numbers of operations, collectives and meetings so far, and up to the cut.
        under_way: the slots in use at the current line, with the verb that took them.
        over: whether the file was read to its end.
        ended: whether it has the line ``end``.
        torn: whether its last line is incomplete.
        failures: the reasons why transports of the rank broke.
        generation: number of ``forget`` lines, after which numbers are defined again.

    Raises:
        LogError, OSError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.groups: dict[int, Group] = {}
        self.lines: list[bytes] = []
        self.counts: Counter[tuple[Group, str]] = Counter()
        self.before = self.counts.copy()
        self.under_way: dict[int, str] = {}
        self.over = self.ended = self.torn = False
        self.failures: list[str] = []
        self.generation = 0
        self._batched: dict[int, bool] = {}
        self._defined: dict[int, Begun] = {}
        # Cached, because most lines repeat.
        self.event = lru_cache(_MOST_KNOWN)(self._event)
        self._number = self._thread = 0
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
        self.size, self.rank = self._fields(header, {"size": int, "rank": int})
        if not 0 <= self.rank < self.size <= _MOST_RANKS:
            raise self._wrong(f"there is no rank {self.rank} of {self.size}")

    def close(self) -> None:
        self._file.close()

    def cut(self) -> None:
        """Drop the lines read so far; counts start from here."""
        self.lines = [b'["thread",%d]\n' % self._thread] if self._thread else []
        self.before = self.counts.copy()

    def behind(self, most: Counter[tuple[Group, str]]) -> bool:
        """Whether another rank of a group has more operations, collectives or meetings so far."""
        groups = self.groups.values()
        return any(self.counts[key] < most[key] for key in most if key[0] in groups)

    def read(self) -> None:
        """Read until no slot is in use, or to the end of the file.

        Raises:
            LogError: a line is invalid.
        """
        while (line := self._next()) is not None:
            if line.startswith(b"{"):
                self._define(self._parse(line))
                continue
            if self.ended:
                raise self._wrong("a line after the end")
            self.lines.append(line)
            verb, number, _, text, begun = self.event(line)
            if verb in _LASTS:
                if self.under_way.get(number) != _LASTS[verb]:
                    raise self._wrong(f"nothing is under way in slot {number} that can {verb}")
                if verb in ("finish", "await"):
                    del self.under_way[number]
                    if not self.under_way:
                        return
            elif begun is not None:
                if number in self.under_way:
                    raise self._wrong(f"slot {number} is in use")
                self.under_way[number] = verb
                self.counts[begun.group, begun.kind] += 1
            elif verb == "meet":
                self.counts[self.groups[number], "meeting"] += 1
            elif verb == "thread":
                self._thread = number
            elif verb == "fail":
                self.failures.append(text)
            elif verb == "forget":
                if self.under_way:
                    raise self._wrong("definitions are forgotten while they are in use")
                self._defined = {}
                self.event.cache_clear()
                self.generation += 1
            elif verb == "end":
                self.ended = True
        self.over = True

    # ------------------------------------------------------------------ lines

    def _next(self) -> bytes | None:
        """The next complete line; ``None`` at the end of the file."""
        line = self._file.readline(_LONGEST_LINE)
        self._number += 1
        if line.endswith(b"\n"):
            return line
        if len(line) == _LONGEST_LINE:
            raise self._wrong(f"it is longer than {_LONGEST_LINE} bytes")
        self.torn = bool(line)
        return None

    def _wrong(self, why: str) -> LogError:
        text = why if len(why) <= _MOST_SHOWN else f"{why[:_MOST_SHOWN]}..."
        return LogError(f"{self.path}, line {self._number}: {text}")

    def _parse(self, line: bytes) -> Any:
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._wrong(f"not JSON, {error}: {line.decode('utf-8', 'replace')!r}") from error

    def _event(self, line: bytes) -> Event:
        content = self._parse(line)
        verb: Any = content[0] if isinstance(content, list) and content else None
        values: list[Any] = content[1:] if type(verb) is str else []
        kinds = "".join(
            "n" if type(value) is int and value >= 0 else "t" if type(value) is str else "?"
            for value in values
        )
        if type(verb) is not str or verb not in _EVENTS or not re.fullmatch(_EVENTS[verb], kinds):
            raise self._wrong(f"{content} is no event")
        text = values.pop() if kinds.endswith("t") else ""
        if verb in ("meet", "fail", "close") and values[0] not in self.groups:
            raise self._wrong(f"transport {values[0]} is not defined")
        begun = None
        if verb in _DEFINED:
            begun = self._defined.get(values[1])
            if begun is None or (begun.kind == "operation") != (verb == "begin"):
                raise self._wrong(f"{_DEFINED[verb]} {values[1]} is not defined")
        return Event(verb, values[0] if values else 0, tuple(values[1:]), text, begun)

    # ------------------------------------------------------------------ definitions

    def _fields(self, fields: dict[str, Any], kinds: dict[str, type]) -> list[Any]:
        """The values of these fields, checked for their types."""
        for name, kind in kinds.items():
            if type(fields.get(name)) is not kind:
                raise self._wrong(f"{name} is {fields.get(name)!r}, not of type {kind.__name__}")
        return [fields[name] for name in kinds]

    def _define(self, fields: dict[str, Any]) -> None:
        kind = next((kind for kind in _DEFINED.values() if kind in fields), None)
        if kind is None:
            kinds = {"transport": int, "ranks": list, "batched": bool}
            number, ranks, batched = self._fields(fields, kinds)
            fits = all(type(rank) is int and 0 <= rank < self.size for rank in ranks)
            fits = fits and self.rank in ranks and len({*ranks}) == len(ranks)
            if number in self.groups or not fits:
                raise self._wrong(
                    f"transport {number} of ranks {ranks} cannot be rank {self.rank}'s"
                )
            self.groups[number], self._batched[number] = Group(number, tuple(ranks)), batched
            return
        (number,) = self._fields(fields, {kind: int})
        if number in self._defined:
            raise self._wrong(f"{kind} {number} is defined already")
        kinds = _OF_PROGRAM if kind == "program" else _OF_COLLECTIVE
        transport, *_ = self._fields(fields, kinds)
        if transport not in self.groups:
            raise self._wrong(f"transport {transport} is not defined")
        facts = {fact: fields[fact] for fact in kinds if fact != "transport"}
        begun = Begun(self.groups[transport], fields["name"], facts)
        if kind == "program":
            begun = self._compiled(begun, self._batched[transport])
        self._defined[number] = begun

    def _compiled(self, begun: Begun, batched: bool) -> Begun:
        size, facts = len(begun.group.ranks), begun.facts
        rule, options, arguments = facts["rule"], facts["schedule"], facts["arguments"]
        try:
            schedule = Schedule(**{option: _frozen(value) for option, value in options.items()})
            if size * schedule.chunks > _MOST_TRANSFERS:
                raise ValueError(f"it would have more than {_MOST_TRANSFERS} transfers")
            spec = RankSpec(schedule, begun.group.ranks.index(self.rank), size, batched)
            program, as_batched = (
                RULES[rule](spec._replace(batched=way), *_frozen(arguments))
                for way in (batched, True)
            )
        # An untrusted file may cause any exception.
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise self._wrong(f"no {rule} ({why}) can be made of {options}, {arguments}") from error
        facts = {"batched": batched, **facts}
        return begun._replace(facts=facts, program=program, batched=as_batched)


def _frozen(value: Any) -> Any:
    """A JSON value with tuples in place of lists."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


@contextmanager
def opened(paths: Iterable[Path]) -> Iterator[list[RankLog]]:
    """Open the files of all ranks of one run; yields them in rank order.

    Args:
        paths: files, or folders with ``rank_*.jsonl``.

    Raises:
        LogError: a file is not an order log, or files are missing or from different runs.
        OSError: a file cannot be read.
    """
    with ExitStack() as files:
        logs: list[RankLog] = []
        for path in paths:
            matches = sorted(path.glob("rank_*.jsonl")) if path.is_dir() else [path]
            if not matches:
                raise LogError(
                    f"{path} holds no rank_*.jsonl; give the folder of --commfuse-order-log"
                )
            logs += [files.enter_context(closing(RankLog(file))) for file in matches]
        sizes = sorted({log.size for log in logs})
        counts = Counter(log.rank for log in logs)
        wrong = [f"{counts[r] or 'none'} of rank {r}" for r in range(sizes[-1]) if counts[r] != 1]
        if sizes[1:] or wrong:
            raise LogError(
                f"these files are not of one run: jobs of {' and '.join(map(str, sizes))} ranks, "
                f"with {', '.join(wrong[:8]) or 'one of each'}; give one of each rank of one run "
                "(other machines have those of their ranks, an older run may have left some in "
                "the folder)"
            )
        yield sorted(logs, key=lambda log: log.rank)


def read_to_cuts(logs: Sequence[RankLog]) -> Iterator[None]:
    """Read the files of all ranks side by side, and yield at each cut.

    At a cut nothing is in flight, and all ranks of each group have the same numbers of operations,
    collectives and meetings.  Once a file ends before such a point, the others are read to their
    ends.
    """
    while behind := [log for log in logs if not log.over]:
        while behind:
            for log in behind:
                log.read()
            behind = [log for log in logs if not log.over]
            if len(behind) == len(logs):
                most: Counter[tuple[Group, str]] = Counter()
                for log in logs:
                    most |= log.counts
                behind = [log for log in logs if log.behind(most)]
        yield
        for log in logs:
            log.cut()
