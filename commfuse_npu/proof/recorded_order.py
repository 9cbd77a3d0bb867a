"""Reads order logs (:mod:`commfuse_npu.runtime.order_log`).

The files of all ranks are read side by side (:func:`read_to_cuts`).  Lines are kept as bytes, so
that repeated parts are recognized and not parsed again.
"""

from __future__ import annotations

import json
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

_MOST_KNOWN = 100_000
_MOST_SHOWN = 300

_INVALID = (KeyError, TypeError, ValueError, IndexError, RecursionError)
"""What an invalid line may raise."""

_BEGUN_BY = {"at": "begin", "finish": "begin", "await": "issue"}
"""The verb that has to have taken the slot that a verb is about."""


class LogError(ValueError):
    """A file is not an order log, or the files do not belong together."""


class Begun(NamedTuple):
    """A program, or a collective of a group, that a rank began.

    Attributes:
        facts: what has to be equal on all ranks.
        program, batched: the program, and the one that HCCL would run; ``None`` for a collective.
    """

    group: Group
    facts: dict[str, Any]
    program: Program | None = None
    batched: Program | None = None

    @property
    def kind(self) -> str:
        return "operation" if self.program else "collective"


class Event(NamedTuple):
    """A line.  ``number`` is a slot, transport or thread; ``at`` is the index of an instruction."""

    verb: str
    number: int = 0
    at: int = 0
    text: str = ""
    begun: Begun | None = None


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
        self._batched: dict[int, bool] = {}
        # Cached, because most lines repeat.
        self.event = lru_cache(_MOST_KNOWN)(self._event)
        self._number = self._thread = 0
        self._file = path.open("rb")
        line = self._next()
        try:
            verb, version, self.rank, self.size = json.loads(line or b"null")
            if (verb, version) != ("log", VERSION):
                raise ValueError(f"{verb} of version {version}")
            if self.rank not in range(self.size):
                raise ValueError(f"rank {self.rank} of {self.size}")
        except _INVALID as error:
            raise LogError(
                f"{path} does not begin with the line of an order log of version {VERSION} "
                f"({error}); use the version of commfuse-npu that wrote it"
            ) from error

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
            try:
                event = self.event(line)
                self._take(event)
            except _INVALID as error:
                shown = line.decode("utf-8", "replace")[:_MOST_SHOWN].rstrip()
                raise LogError(
                    f"{self.path}, line {self._number}: {type(error).__name__}: "
                    f"{str(error)[:_MOST_SHOWN]}: {shown}"
                ) from error
            self.lines.append(line)
            if event.verb in ("finish", "await") and not self.under_way:
                return
        self.over = True

    def _next(self) -> bytes | None:
        """The next complete line; ``None`` at the end of the file."""
        line = self._file.readline()
        self._number += 1
        if line.endswith(b"\n"):
            return line
        self.torn = bool(line)
        return None

    def _take(self, event: Event) -> None:
        verb, number, _, text, begun = event
        if self.ended:
            raise ValueError("a line after the end")
        if begun is not None:
            if number in self.under_way:
                raise ValueError(f"slot {number} is in use")
            self.under_way[number] = verb
            self.counts[begun.group, begun.kind] += 1
        elif verb in _BEGUN_BY:
            if self.under_way.get(number) != _BEGUN_BY[verb]:
                raise ValueError(f"nothing is under way in slot {number} that can {verb}")
            if verb != "at":
                del self.under_way[number]
        elif verb == "meet":
            self.counts[self.groups[number], "meeting"] += 1
        elif verb == "thread":
            self._thread = number
        elif verb == "fail":
            self.failures.append(text)
        elif verb == "end":
            self.ended = True

    def _event(self, line: bytes) -> Event:
        verb, *values = json.loads(line)
        match verb:
            case "begin" | "issue":
                slot, transport, facts = values
                return Event(verb, slot, begun=self._begun(verb, transport, facts))
            case "transport":
                number, ranks, self._batched[number] = values
                if not {self.rank} <= {*ranks} <= {*range(self.size)}:
                    raise ValueError(f"rank {self.rank} of {self.size} has no such group")
                self.groups[number] = Group(number, tuple(ranks))
                return Event(verb, number)
            case "meet" | "fail":
                number, text = values
                return Event(verb, number, text=text)
            case "at":
                slot, at = map(int, values)
                return Event(verb, slot, at)
            case "finish" | "await" | "close" | "thread":
                (number,) = map(int, values)
                return Event(verb, number)
            case "end":
                return Event(verb)
        raise ValueError(f"{verb} is no event")

    def _begun(self, verb: str, transport: int, facts: dict[str, Any]) -> Begun:
        group, batched = self.groups[transport], self._batched[transport]
        facts = {**facts, "name": str(facts["name"])}
        if verb == "issue":
            return Begun(group, facts | {fact: str(facts[fact]) for fact in ("kind", "bytes")})
        schedule, rule = Schedule(**facts["schedule"]), RULES[facts["rule"]]
        spec = RankSpec(schedule, group.ranks.index(self.rank), len(group.ranks), batched)
        program, as_batched = (
            rule(spec._replace(batched=way), *facts["arguments"]) for way in (batched, True)
        )
        return Begun(group, {**facts, "batched": batched}, program, as_batched)


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
