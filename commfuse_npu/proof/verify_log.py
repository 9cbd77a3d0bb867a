"""Proves a recorded run, or refutes it in words: ``commfuse-npu verify --log``.

It checks the files that :mod:`commfuse_npu.runtime.order_log` wrote:

1. *programs*: each rank executed exactly the posts and waits of its programs, in order, to their
   ends, and waited for each collective that it started;
2. *one job*: the ranks of a group began the same programs in the same order, started the same
   collectives of the same sizes, and met at the same places;
3. *pairing*: on each lane, between each two ranks, sends and receives match in order and rows;
4. *no deadlock*: with the programs and collectives that were in flight, every rank finishes.

3 and 4 follow HCCL's rules (:mod:`commfuse_npu.proof.rendezvous`), with communicators created at
first use.  A run on gloo is simulated twice: by gloo's rules as recorded, and by HCCL's with the
batched program of the same rule, each batch at the time of its send.

The part between two cuts (:func:`~commfuse_npu.proof.recorded_order.read_to_cuts`) is checked by
itself, and only once if it repeats.

A run that was killed is checked as far as its files go.  A rank whose file has no ``end`` may have
done more, so a rank that waits for it is not reported as stuck.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

from commfuse_npu.plan.instructions import Collective, End, Instruction, Post, Transfer, Wait, line
from commfuse_npu.plan.program import Program
from commfuse_npu.proof import rendezvous as simulation
from commfuse_npu.proof.recorded_order import Event, RankLog, opened, read_to_cuts

__all__ = ["Verdict", "verify_logs"]

_MOST_FAULTS = 8
_ALL = 1 << 62

_IN_LINE = {"bucket_scatter", "bucket_gather"}
"""Rules whose programs post batches in the order in which they began, each all of its own before
the next; on gloo, without batches, posts may interleave (:mod:`commfuse_npu.ops.buckets`)."""


@dataclass
class Verdict:
    """The result of a verification.

    Attributes:
        faults: what refutes the run; empty if nothing does.
        notes: why a part of the run could not be proved.
        operations, messages: numbers checked, summed over all ranks.  Collectives count as
            operations; each message counts once at each end.
    """

    ranks: int
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    operations: int = 0
    messages: int = 0

    @property
    def proved(self) -> bool:
        return not self.faults and not self.notes


def verify_logs(paths: Iterable[Path]) -> Verdict:
    """Verify the files of all ranks of one run.

    Args:
        paths: files, or folders with ``rank_*.jsonl``.

    Raises:
        LogError: a file is not an order log, or files are missing or from different runs.
        OSError: a file cannot be read.
    """
    with opened(paths) as logs:
        return _judge(logs)


# ---------------------------------------------------------------------- all ranks


def _judge(logs: Sequence[RankLog]) -> Verdict:
    """Check the files part by part, and stop at the first part with faults."""
    verdict, links = Verdict(len(logs)), set[_Link]()
    judged: dict[bytes, tuple[int, int]] = {}
    for _ in read_to_cuts(logs):
        ended = all(log.ended and not log.under_way for log in logs)
        whole = ended or not any(log.over for log in logs)
        lines = repr([log.lines for log in logs])
        key = hashlib.sha256(lines.encode()).digest()
        if not whole or key not in judged:
            ranks = [_Rank(log) for log in logs]
            _hold_together(ranks, whole, links, verdict)
            counts = ((rank.operations, rank.messages) for rank in ranks)
            operations, messages = map(sum, zip(*counts, strict=True))
            judged[key] = operations, messages
        operations, messages = judged[key]
        verdict.operations += operations
        verdict.messages += messages
        if verdict.faults:
            break
    for log in logs:
        verdict.notes += _notes(log)
    if verdict.proved and verdict.operations == 0:
        verdict.notes.append("the ranks recorded no operation: there is nothing to prove")
    return verdict


def _hold_together(ranks: Sequence[_Rank], whole: bool, links: set[_Link], found: Verdict) -> None:
    """Check one part on all ranks; ``whole``: the files do not end here, or all with ``end``."""
    faults = [fault for rank in ranks for fault in rank.faults]
    for key in dict.fromkeys(key for rank in ranks for key in rank.did):
        first, *peers = (ranks[rank] for rank in key[0].ranks)
        for peer in peers:
            faults += _difference(key, first, peer, whole)
    stuck = [_stuck(ranks, "recorded", None, whole)] if any(rank.gloo for rank in ranks) else []
    # A rank that blocks with open links also blocks with closed ones.
    stuck.append(_stuck(ranks, "hccl", links, whole))
    ends = [end for end in stuck if end is not None]
    certain = [end for end in ends if end.certain or whole]
    if certain:
        faults.insert(0, certain[0].text)
    elif ends:
        found.notes.append(f"when the files end, {ends[0].text.partition(': ')[2]}")
    found.faults += faults[:_MOST_FAULTS]


def _stuck(
    ranks: Sequence[_Rank], rules: _Rules, opened: set[_Link] | None, whole: bool
) -> simulation.Stuck | None:
    scripts = [
        simulation.Script(rank.rank, actions, open_ended=not (whole or rank.log.ended))
        for rank in ranks
        for actions in (rank.actions[rules] or {0: []}).values()
    ]
    return simulation.Rendezvous(scripts, opened=opened).simulate()


def _difference(
    key: tuple[simulation.Group, str], first: _Rank, other: _Rank, whole: bool
) -> Iterator[str]:
    """The first difference between the operations, or meetings, of two ranks of a group."""
    for a, b in zip_longest(first.did[key], other.did[key]):
        if a is None or b is None:
            lacking, having = (first, other) if a is None else (other, first)
            # A rank whose file has no ``end`` may have done more.
            if whole or lacking.log.ended:
                yield f"rank {lacking.rank} lacks {(a or b)[0]}, which rank {having.rank} has"
            return
        differing = [fact for fact, value in a[1].items() if value != b[1].get(fact)]
        if differing:
            values = "; ".join(
                f"{fact} {a[1][fact]} on rank {first.rank}, {b[1].get(fact)} on rank {other.rank}"
                for fact in differing
            )
            ranks = f"ranks {first.rank} and {other.rank}"
            yield f"{ranks} do not do the same as {a[0]}: {values}"
            return


def _notes(log: RankLog) -> Iterator[str]:
    for why in log.failures:
        yield f"a transport of rank {log.rank} broke: {why}"
    if log.torn:
        yield f"the last line of rank {log.rank} is cut off"
    if log.over and not log.ended:
        yield f"the file of rank {log.rank} ends before its process did"
    elif log.under_way:
        yield f"rank {log.rank} came to its end with {len(log.under_way)} operations under way"


# ---------------------------------------------------------------------- one rank in a part

_Rules = Literal["recorded", "hccl"]
_Link = tuple[simulation.Group, Hashable]


class _Name(NamedTuple):
    """Identifies an operation, a collective or a meeting, equally on all its ranks."""

    kind: str
    group: simulation.Group
    number: int
    name: str

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.group.ranks))
        return f"{self.kind} {self.number} ({self.name}) of the group of ranks {ranks}"


class _Running:
    """A program of a rank in execution.

    Attributes:
        left: the indices of its remaining posts and waits.
        ends: the ends that were posted together with a step's send or receive.
        at, posted, due: of the batched program: next index, posts so far, posts allowed so far.
    """

    def __init__(self, name: _Name, program: Program, batched: Program) -> None:
        self.name, self.program, self.batched = name, program, batched
        posts_or_waits = Post | Collective | Wait
        places = (
            at
            for at, instruction in enumerate(program.code)
            if isinstance(instruction, posts_or_waits)
        )
        self.left = dict.fromkeys(places)
        self.ends: dict[tuple[_Rules, str, int], tuple[simulation.End, ...]] = {}
        self.at = self.posted = self.due = 0

    def line(self, place: int) -> str:
        code = self.program.code
        return repr(line(code[place])) if place < len(code) else "its end"


class _Rank:
    """The events of a rank: compared with its programs, and turned into scripts to simulate.

    Attributes:
        did: operations, collectives and meetings of a group, with the facts that have to be equal.
        actions: by set of rules and thread; ``recorded`` are the rules of the run's own backend.
        gloo: whether a program was not batched.
        operations, messages: their numbers.
    """

    def __init__(self, log: RankLog) -> None:
        self.log = log
        self.rank = log.rank
        self.faults: list[str] = []
        self.did: dict[tuple[simulation.Group, str], list[tuple[_Name, dict[str, Any]]]]
        self.did = defaultdict(list)
        self.actions: dict[_Rules, defaultdict[int, list[simulation.Action]]]
        self.actions = {"recorded": defaultdict(list), "hccl": defaultdict(list)}
        self.gloo = False
        self.operations = self.messages = self._thread = 0
        self._slots: dict[int, _Running] = {}
        self._collectives: dict[int, tuple[_Name, tuple[simulation.End, ...]]] = {}
        self._posted: Counter[tuple[_Rules, simulation.Group]] = Counter()
        self._faulty: set[_Name] = set()
        for text in log.lines:
            self._take(log.event(text))
        if log.ended:
            for name, _ in self._collectives.values():
                self.faults.append(f"rank {self.rank}, {name}: it began it and never waited for it")

    def _fault(self, running: _Running, problem: str) -> None:
        # One fault per operation; further ones are consequences of it.
        if running.name not in self._faulty:
            self._faulty.add(running.name)
            self.faults.append(f"rank {self.rank}, {running.name}: it {problem}")

    def _take(self, event: Event) -> None:
        verb, number, at, text, begun = event
        if begun is not None:
            name = self._name(begun.kind, begun.group, begun.facts["name"], begun.facts)
            self.operations += 1
            if begun.program is None or begun.batched is None:
                self._issue(number, name, begun.facts)
            else:
                self._slots[number] = _Running(name, begun.program, begun.batched)
                self.gloo |= not begun.program.batched
        elif verb == "await":
            _, ends = self._collectives.pop(number)
            for threads in self.actions.values():
                threads[self._thread].append(simulation.Wait(ends))
        elif verb == "meet":
            name = self._name("meeting", self.log.groups[number], text, {"place": text})
            for threads in self.actions.values():
                threads[self._thread].append(simulation.Meet(name.group, name.number, text))
        elif verb == "thread":
            self._thread = number
        elif verb == "at":
            self._at(self._slots[number], at)
        elif verb == "finish":
            running = self._slots[number]
            for place in running.left:
                self._fault(running, f"finishes without {running.line(place)}")
            if not running.program.batched:
                self._go_on(running, _ALL, in_line=False)
            del self._slots[number]
            for other in self._slots.values():
                self._go_on(other)

    def _issue(self, slot: int, name: _Name, facts: dict[str, Any]) -> None:
        """Simulate a collective as a message to and from every other rank, on a separate lane: its
        collectives have to match in order and size."""
        group = name.group
        own, peers = group.ranks.index(self.rank), range(len(group.ranks))
        piece = "{kind} ({bytes} bytes)".format(**facts)
        pairs = [pair for peer in peers if peer != own for pair in ((own, peer), (peer, own))]
        ends = tuple(simulation.End(name, Transfer(0, 0, *pair, piece)) for pair in pairs)
        self._collectives[slot] = name, ends
        for rules in self.actions:
            self._post(rules, group, "of collectives", ends)

    def _post(
        self,
        rules: _Rules,
        group: simulation.Group,
        lane: Hashable,
        ends: tuple[simulation.End, ...],
    ) -> None:
        post = simulation.Post(group, lane, ends, before=self._posted[rules, group])
        self.actions[rules][self._thread].append(post)
        self._posted[rules, group] += 1

    def _name(self, kind: str, group: simulation.Group, text: str, facts: dict[str, Any]) -> _Name:
        items = self.did[group, kind]
        items.append((_Name(kind, group, self.log.before[group, kind] + len(items), text), facts))
        return items[-1][0]

    def _at(self, running: _Running, place: int) -> None:
        program = running.program
        expected = next(iter(running.left), len(program.code))
        if place != expected:
            actual, wanted = running.line(place), running.line(expected)
            self._fault(running, f"is at {actual} where its program has {wanted}")
        if place in running.left:
            del running.left[place]
            instruction = program.code[place]
            self._simulate("recorded", running, instruction)
            if program.batched:
                self._simulate("hccl", running, instruction)
            elif isinstance(instruction, Collective) or (
                isinstance(instruction, Post) and instruction.send is not None
            ):
                self._go_on(running, running.due + 1)

    def _go_on(self, running: _Running, due: int = 0, *, in_line: bool = True) -> None:
        """Simulate the batched program of a run on gloo, up to ``due`` posts."""
        running.due = max(running.due, due)
        code = running.batched.code
        if in_line and self._held(running):
            return
        while running.at < len(code) and running.posted < running.due:
            running.at += 1
            self._simulate("hccl", running, code[running.at - 1])

    def _held(self, running: _Running) -> bool:
        """Whether an earlier bucket operation has posts left, which have to come first."""
        earlier = takewhile(lambda other: other is not running, self._slots.values())
        return any(
            other.name.group == running.name.group
            and {other.program.rule[0], running.program.rule[0]} <= _IN_LINE
            and other.posted < len(other.batched.transfers)
            for other in earlier
        )

    def _simulate(self, rules: _Rules, running: _Running, instruction: Instruction) -> None:
        name = running.name
        if isinstance(instruction, Wait):
            keys = [(rules, way, step) for way, step in instruction.ends]
            for _, way, step in (key for key in keys if key not in running.ends):
                self._fault(running, f"waits for what step {step} {way}s, which is not posted")
            ends = (running.ends.get(key, ()) for key in keys)
            wait = simulation.Wait(tuple(end for group in ends for end in group))
            self.actions[rules][self._thread].append(wait)
        elif isinstance(instruction, Post | Collective):
            posted = tuple(_end(name, end) for _, end in instruction.ends if not end.transfer.stays)
            running.ends |= {
                (rules, way, end.transfer.step): posted for way, end in instruction.ends
            }
            if rules == "recorded":
                self.messages += len(posted)
            else:
                running.posted += 1
                if self._held(running):
                    self._fault(running, "posts before an earlier bucket has posted all of its own")
            step, lane, source, *_ = posted[0].transfer
            # On gloo messages match by tag, as if each had its own lane.
            alone = rules == "recorded" and not running.program.batched
            tagged = alone and isinstance(instruction, Post)
            queue = f"{lane}, tag {name.number}.{step}.{source}," if tagged else lane
            self._post(rules, name.group, queue, posted)


def _end(name: _Name, end: End) -> simulation.End:
    """An end with its number of rows in the piece, so that both ends have to have the same."""
    piece = f"{end.transfer.piece} ({end.span.rows} rows)"
    return simulation.End(name, end.transfer._replace(piece=piece))
