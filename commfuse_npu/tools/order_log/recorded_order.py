"""Reads order logs (:mod:`commfuse_npu.runtime.order_log`) and makes scripts to simulate of them.

Each rank is compared with its programs line by line.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Hashable
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from commfuse_npu.plan import Schedule
from commfuse_npu.plan.instructions import Collective, Instruction, Post, Transfer, Wait, line
from commfuse_npu.plan.program import Program
from commfuse_npu.plan.rules import RULES, BucketGather, BucketScatter
from commfuse_npu.plan.schedule import RankSpec
from commfuse_npu.proof import rendezvous as simulation
from commfuse_npu.proof.rendezvous import Group
from commfuse_npu.runtime.order_log import VERSION

__all__ = ["LogError", "Name", "RankLog"]

_MOST_KNOWN = 100_000
_MOST_SHOWN = 300

_INVALID = (LookupError, TypeError, ValueError, ArithmeticError, RecursionError)
"""What an invalid line may raise."""

_IN_LINE = BucketScatter, BucketGather
"""Rules whose programs post in the order in which they began, each all of its own before the next
(:mod:`commfuse_npu.ops.buckets`)."""


class LogError(ValueError):
    """A file is not an order log, or the files do not belong together."""


class Name(NamedTuple):
    """Identifies an operation, a collective or a meeting, equally on all its ranks."""

    kind: str
    group: Group
    number: int
    name: str

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.group.ranks))
        return f"{self.kind} {self.number} ({self.name}) of the group of ranks {ranks}"


class _Begun(NamedTuple):
    """A program or a collective (``None``) in a line, with the facts that have to be equal on all
    ranks."""

    group: Group
    facts: dict[str, Any]
    program: Program | None = None


class _RecordedRun:
    """A program or a collective that a rank began and has not finished.

    Attributes:
        program: ``None`` for a collective.
        left: the indices of the program's remaining posts and waits.
        ends: what was posted in each step.
    """

    def __init__(self, name: Name, program: Program | None) -> None:
        self.name = name
        self.program = program
        code = enumerate(program.code if program else ())
        self.left = {at: step for at, step in code if isinstance(step, Post | Collective | Wait)}
        self.ends: dict[int, tuple[simulation.TransferEnd, ...]] = {}


class RankLog:
    """The file of one rank, and what it did since the last :meth:`cut`.

    Attributes:
        rank, size: global rank of the process, and number of processes.
        counts: numbers of operations, collectives and meetings so far.
        slots: what is under way, by slot.
        over: whether the file was read to its end.
        ended: whether it has the line ``end``.
        failures: the reasons why transports of the rank broke.
        lines: a hash of the lines.
        faults: where it did something else than its programs.
        did: operations, collectives and meetings of a group, with the facts that have to be equal.
        actions: by thread.
        operations, messages: their numbers.

    Raises:
        LogError, OSError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts: Counter[tuple[Group, str]] = Counter()
        self.slots: dict[int, _RecordedRun] = {}
        self.over = self.ended = False
        self.failures: list[str] = []
        self._transports: dict[int, Group] = {}
        # Cached, because most lines repeat.
        self._event = lru_cache(_MOST_KNOWN)(self._parsed)
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
        self.cut()

    def close(self) -> None:
        self._file.close()

    def cut(self) -> None:
        """Forget what was read so far, except the counts."""
        self.lines = hashlib.sha256(b"%d" % self._thread)
        self.faults: list[str] = []
        self.did: defaultdict[tuple[Group, str], list[tuple[Name, dict[str, Any]]]]
        self.did = defaultdict(list)
        self.actions: defaultdict[int, list[simulation.Action]] = defaultdict(list)
        self.operations = self.messages = 0
        self._posted: Counter[Group] = Counter()
        self._faulty: set[Name] = set()

    def behind(self, most: Counter[tuple[Group, str]]) -> bool:
        """Whether another rank of a group has more operations, collectives or meetings so far."""
        groups = self._transports.values()
        return any(self.counts[key] < most[key] for key in most if key[0] in groups)

    def read(self) -> None:
        """Read until no slot is in use, or to the end of the file.

        Raises:
            LogError: a line is invalid.
        """
        while (line := self._next()) is not None:
            try:
                verb = self._take(*self._event(line))
            except _INVALID as error:
                shown = line.decode("utf-8", "replace")[:_MOST_SHOWN].rstrip()
                raise LogError(
                    f"{self.path}, line {self._number}: {type(error).__name__}: "
                    f"{str(error)[:_MOST_SHOWN]}: {shown}"
                ) from error
            self.lines.update(line)
            if verb in ("finish", "await") and not self.slots:
                return
        self.over = True

    def _next(self) -> bytes | None:
        """The next complete line; ``None`` at the end of the file."""
        line = self._file.readline()
        self._number += 1
        return line if line.endswith(b"\n") else None

    def _parsed(self, line: bytes) -> tuple[str, int, Any]:
        """The verb of a line, its slot, transport or thread, and what it says of it."""
        match json.loads(line):
            case [("begin" | "issue") as verb, slot, transport, facts]:
                return verb, slot, self._begun(verb, transport, facts)
            case ["transport" as verb, number, ranks]:
                members = {*ranks}
                if len(members) < len(ranks) or not {self.rank} <= members <= {*range(self.size)}:
                    raise ValueError(f"rank {self.rank} of {self.size} has no such group")
                self._transports[number] = Group(number, tuple(ranks))
                return verb, number, None
            case [("meet" | "fail" | "at") as verb, number, what]:
                return verb, number, what
            case [("finish" | "await" | "close" | "thread") as verb, int(number)]:
                return verb, number, None
            case ["end" as verb]:
                return verb, 0, None
        raise ValueError("this is no event")

    def _begun(self, verb: str, transport: int, facts: dict[str, Any]) -> _Begun:
        group = self._transports[transport]
        facts = {**facts, "name": str(facts["name"])}
        if verb == "issue":
            return _Begun(group, facts | {fact: str(facts[fact]) for fact in ("kind", "bytes")})
        schedule = Schedule(**facts["schedule"])
        rule = RULES[facts["rule"]](*facts["arguments"])
        spec = RankSpec(schedule, group.ranks.index(self.rank), len(group.ranks))
        return _Begun(group, facts, rule.program(spec))

    # ------------------------------------------------------------------ what it did

    def _take(self, verb: str, number: int, what: Any) -> str:
        """Compare a line with the programs, and append it to the scripts; returns its verb."""
        if self.ended:
            raise ValueError("a line after the end")
        running = self.slots.get(number)
        if verb in ("begin", "issue"):
            if running is not None:
                raise ValueError(f"slot {number} is in use")
            self._begin(number, what)
        elif verb in ("at", "finish", "await"):
            if running is None or (running.program is None) != (verb == "await"):
                raise ValueError(f"nothing is under way in slot {number} that can {verb}")
            if verb == "at":
                self._at(running, what)
            else:
                self._finish(running)
                del self.slots[number]
        elif verb == "meet":
            name = self._name("meeting", self._transports[number], what, {"place": what})
            self._act(simulation.Meet(name.group, name.number, what))
        elif verb == "thread":
            self._thread = number
        elif verb == "fail":
            self.failures.append(what)
        elif verb == "end":
            self.ended = True
            for running in self.slots.values():
                if running.program is None:
                    self._fault(running, "began it and never waited for it")
        return verb

    def _name(self, kind: str, group: Group, text: str, facts: dict[str, Any]) -> Name:
        name = Name(kind, group, self.counts[group, kind], text)
        self.counts[group, kind] += 1
        self.did[group, kind].append((name, facts))
        return name

    def _fault(self, running: _RecordedRun, problem: str) -> None:
        # One fault per operation; further ones are consequences of it.
        if running.name not in self._faulty:
            self._faulty.add(running.name)
            self.faults.append(f"rank {self.rank}, {running.name}: it {problem}")

    def _begin(self, slot: int, begun: _Begun) -> None:
        """Begin a program or a collective.

        A collective is simulated as a message to and from every other rank, on a separate lane: its
        collectives have to match in order and size.
        """
        group, facts, program = begun
        kind = "operation" if program else "collective"
        name = self._name(kind, group, facts["name"], facts)
        running = self.slots[slot] = _RecordedRun(name, program)
        self.operations += 1
        if program:
            return
        own = group.ranks.index(self.rank)
        piece = "{kind} ({bytes} bytes)".format(**facts)
        peers = (peer for peer in range(len(group.ranks)) if peer != own)
        pairs = [pair for peer in peers for pair in ((own, peer), (peer, own))]
        ends = tuple(simulation.TransferEnd(name, Transfer(0, 0, *pair, piece)) for pair in pairs)
        running.ends[0] = ends
        self._post(group, "of collectives", ends)

    def _finish(self, running: _RecordedRun) -> None:
        program = running.program
        if program is None:
            self._act(simulation.WaitForEnds(running.ends[0]))
            return
        for place in running.left:
            self._fault(running, f"finishes without {_line(program, place)}")

    def _at(self, running: _RecordedRun, place: int) -> None:
        program = running.program
        assert program is not None
        expected = next(iter(running.left), len(program.code))
        if place != expected:
            actual = _line(program, place)
            wanted = _line(program, expected)
            self._fault(running, f"is at {actual} where its program has {wanted}")
        instruction = running.left.pop(place, None)
        if instruction is not None:
            self._simulate(running, instruction)

    # ------------------------------------------------------------------ scripts

    def _act(self, action: simulation.Action) -> None:
        self.actions[self._thread].append(action)

    def _post(self, group: Group, lane: Hashable, ends: tuple[simulation.TransferEnd, ...]) -> None:
        self._act(simulation.PostBatch(group, lane, ends, before=self._posted[group]))
        self._posted[group] += 1

    def _held(self, running: _RecordedRun) -> bool:
        """Whether an earlier bucket operation has posts left, which have to come first."""
        earlier = takewhile(lambda other: other is not running, self.slots.values())
        return any(
            other.name.group == running.name.group
            and isinstance(other.program.rule, _IN_LINE)
            and isinstance(running.program.rule, _IN_LINE)
            and any(isinstance(step, Post) for step in other.left.values())
            for other in earlier
            if other.program and running.program
        )

    def _simulate(self, running: _RecordedRun, instruction: Instruction) -> None:
        name = running.name
        if isinstance(instruction, Wait):
            ends: list[simulation.TransferEnd] = []
            for step in instruction.steps:
                if step not in running.ends:
                    self._fault(running, f"waits for step {step}, which is not posted")
                ends += running.ends.get(step, ())
            self._act(simulation.WaitForEnds(tuple(ends)))
        elif isinstance(instruction, Post | Collective):
            posted = tuple(
                # With the number of rows, which has to be the same at both ends.
                simulation.TransferEnd(
                    name, transfer._replace(piece=f"{transfer.piece} ({span.rows} rows)")
                )
                for _, (transfer, span) in instruction.ends
                if not transfer.stays
            )
            running.ends[instruction.transfer.step] = posted
            self.messages += len(posted)
            if self._held(running):
                self._fault(running, "posts before an earlier bucket has posted all of its own")
            self._post(name.group, instruction.transfer.lane, posted)


def _line(program: Program, place: int) -> str:
    return repr(line(program.code[place])) if place < len(program.code) else "its end"
