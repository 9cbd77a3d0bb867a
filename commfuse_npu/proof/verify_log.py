"""Proves a recorded run, or refutes it in words: ``commfuse-npu verify --log``.

What is shown of the files that :mod:`commfuse_npu.runtime.order_log` wrote:

1. *plans*: each rank posted and awaited exactly the transfers of its plans, each on its lane, with
   its size, in an allowed order;
2. *one programme*: the ranks of a group began the same operations in the same order, and met at the
   same places;
3. *pairing*: on each lane, between each two ranks, the sends are the receives, in order and size;
4. *no deadlock*: with HCCL's rules (:mod:`commfuse_npu.proof.rendezvous`), communicators there
   from the start or created at first use, with all operations under way that were, every rank gets
   to the end.  A run on gloo is played by gloo's rules too; for HCCL's each {send, receive} becomes
   a batch at the moment of its send, which is when it is posted there.

The ranks' files are cut where nothing is under way and all ranks of each group have begun as many
operations; what comes between two cuts is judged by itself, and only once if it repeats itself.

A run that was killed is judged as far as its files go.  A rank whose file just ends may have done
more, so nobody who waits for it is called stuck.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import NamedTuple

from commfuse_npu.plan import Transfer
from commfuse_npu.proof.recorded_order import (
    Event,
    LogError,
    Message,
    Operation,
    RankLog,
    Stretch,
)
from commfuse_npu.proof.rendezvous import (
    Action,
    End,
    Group,
    Meet,
    Post,
    Programme,
    Rendezvous,
    Stuck,
    Wait,
)

__all__ = ["Verdict", "files_of", "verify_logs"]

_MOST_FAULTS = 8

_IN_LINE = ("reduce_scatter_bucket", "all_gather_bucket")
"""Of these no later one posts a batch before an earlier one has posted all of its own; on gloo,
where nothing is posted in batches, they may (:mod:`commfuse_npu.ops.buckets`)."""


@dataclass
class Verdict:
    """What was found.

    Attributes:
        faults: why the run does not hold; empty if nothing was found.
        notes: why nothing more than that is known of a part of it.
        operations, messages: how many were judged, over all ranks; a message has two ends.
    """

    ranks: int
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    operations: int = 0
    messages: int = 0

    @property
    def proved(self) -> bool:
        return not self.faults and not self.notes


def files_of(paths: Iterable[Path]) -> list[Path]:
    """The files of ranks, ``rank_*.jsonl`` of a folder.

    Raises:
        LogError: there are none.
    """
    found: list[Path] = []
    for path in paths:
        files = sorted(path.glob("rank_*.jsonl")) if path.is_dir() else [path]
        if not files:
            raise LogError(f"{path} holds no rank_*.jsonl; give the folder of --commfuse-order-log")
        found += files
    return found


def verify_logs(paths: Sequence[Path]) -> Verdict:
    """Judge the files of all ranks of one run.

    Raises:
        LogError: a file is no order log, or files are missing or not of one run.
        OSError: a file cannot be read.
    """
    logs: list[RankLog] = []
    try:
        for path in paths:
            logs.append(RankLog(path))
        logs.sort(key=lambda log: log.rank)
        _check_set(logs)
        return _Run(logs).judge()
    finally:
        for log in logs:
            log.close()


def _check_set(logs: Sequence[RankLog]) -> None:
    sizes = {log.size: log.path for log in logs}
    if len(sizes) > 1:
        (one, here), (other, there) = list(sizes.items())[:2]
        raise LogError(
            f"{here} is of a job of {one} ranks, {there} of one of {other}; give the files of one "
            "run (an older run may have left some in the folder)"
        )
    by_rank = Counter(log.rank for log in logs)
    twice = [rank for rank, count in by_rank.items() if count > 1]
    if twice:
        raise LogError(f"there are {by_rank[twice[0]]} files of rank {twice[0]}; give one per rank")
    size = logs[0].size
    missing = [rank for rank in range(size) if rank not in by_rank]
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise LogError(
            f"the job had {size} ranks, and the files of ranks {shown} are missing; each machine "
            "has those of its own ranks: collect them all"
        )


# ---------------------------------------------------------------------- where to cut


class _Run:
    """The files of all ranks, read side by side."""

    def __init__(self, logs: Sequence[RankLog]) -> None:
        self._logs = logs
        self._verdict = Verdict(len(logs))
        self._lines: list[list[bytes]] = [[] for _ in logs]
        self._last = [False] * len(logs)
        # What was begun and met before the last cut, and since.
        self._before: list[Counter[tuple[int, str]]] = [Counter() for _ in logs]
        self._counts: list[Counter[tuple[int, str]]] = [Counter() for _ in logs]
        self._generations: list[int] = []
        self._judged: dict[bytes, tuple[int, int]] = {}
        self._opened: set[tuple[Group, object]] = set()

    def judge(self) -> Verdict:
        found = self._verdict
        while not all(self._last) and not found.faults:
            for rank, last in enumerate(self._last):
                if not last:
                    self._read(rank)
            while behind := self._behind():
                for rank in behind:
                    self._read(rank)
            over = all(log.ended and not log.open_operations for log in self._logs)
            self._judge_piece(whole=over or not any(self._last))
        for log, last in zip(self._logs, self._last, strict=True):
            found.notes += self._notes(log, last)
        if not found.faults and not found.notes and found.operations == 0:
            found.notes.append("the ranks recorded no operation: there is nothing to prove")
        return found

    def _read(self, rank: int) -> None:
        stretch: Stretch = self._logs[rank].stretch()
        self._lines[rank] += stretch.lines
        self._counts[rank].update(stretch.counts)
        self._last[rank] = stretch.last

    def _behind(self) -> list[int]:
        """The ranks that have to be read on: another one of a group has begun more, or met more.

        Where one is at its end there is no cut any more: everything is read.
        """
        if any(self._last):
            return [rank for rank, last in enumerate(self._last) if not last]
        most: dict[tuple[Group, str], int] = defaultdict(int)
        for log, counts in zip(self._logs, self._counts, strict=True):
            for (transport, what), count in counts.items():
                key = log.transports[transport].group, what
                most[key] = max(most[key], count)
        return [
            rank
            for rank, (log, counts) in enumerate(zip(self._logs, self._counts, strict=True))
            if any(
                counts[transport, what] < most[facts.group, what]
                for transport, facts in log.transports.items()
                for what in ("start", "meet")
            )
        ]

    def _judge_piece(self, *, whole: bool) -> None:
        """Judge what was read since the last cut."""
        generations = [log.generation for log in self._logs]
        if generations != self._generations:
            self._judged.clear()
            self._generations = generations
        digest = hashlib.sha256()
        for lines in self._lines:
            text = b"".join(lines)
            digest.update(b"%d:" % len(text) + text)
        key, found = digest.digest(), self._verdict
        if not whole or key not in self._judged:
            piece = _Piece(self._logs, self._lines, self._before, whole)
            found.faults += piece.faults(self._opened)[: _MOST_FAULTS - len(found.faults)]
            found.notes += piece.notes
            self._judged[key] = piece.operations, piece.messages
        operations, messages = self._judged[key]
        found.operations += operations
        found.messages += messages
        self._lines = [[] for _ in self._logs]
        for before, counts in zip(self._before, self._counts, strict=True):
            before.update(counts)
            counts.clear()

    def _notes(self, log: RankLog, last: bool) -> Iterator[str]:
        for why in log.failures:
            yield f"a transport of rank {log.rank} broke: {why}"
        if log.torn:
            yield f"the last line of rank {log.rank} is cut off"
        if last and not log.ended:
            yield f"the file of rank {log.rank} ends before its process did"
        elif log.open_operations:
            yield (
                f"rank {log.rank} came to its end with {log.open_operations} operations under way"
            )


# ---------------------------------------------------------------------- one piece of a run


class _Name(NamedTuple):
    """An operation, the same on all its ranks."""

    group: Group
    number: int
    name: str

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.group.ranks))
        return f"operation {self.number} ({self.name}) of the group of ranks {ranks}"


class _Gloo(NamedTuple):
    """On gloo tags tell messages apart: each has a lane of its own."""

    end: End

    def __str__(self) -> str:
        return str(self.end.transfer.lane)


class _Running:
    """An operation of a rank, as it goes on."""

    def __init__(self, of: Operation, name: _Name) -> None:
        self.of = of
        self.name = name
        self.received: list[Message] = []
        self.registered: list[Message] = []
        self.sent: list[Message] = []
        self.awaited: set[Transfer] = set()
        self.held: list[Post] = []

    def end(self, message: Message) -> End:
        return End(self.name, message.transfer)

    def batch(self, message: Message) -> tuple[End, ...]:
        """The ends that are posted together with this one on HCCL."""
        for posted in (self.registered, self.received):
            if message in posted:
                place = posted.index(message)
                both = (self.registered[place : place + 1], self.received[place : place + 1])
                return tuple(self.end(one) for part in both for one in part)
        return (self.end(message),)

    @property
    def complete(self) -> bool:
        """Whether all its batches are registered."""
        return len(self.registered) >= len(self.of.plan.transfers)


class _Piece:
    """What the ranks did between two cuts; ``whole`` if it does not end with a file."""

    def __init__(
        self,
        logs: Sequence[RankLog],
        lines: Sequence[list[bytes]],
        before: Sequence[Counter[tuple[int, str]]],
        whole: bool,
    ) -> None:
        self.notes: list[str] = []
        self.operations = self.messages = 0
        self._whole = whole
        self._ended = [log.ended for log in logs]
        self._ranks = [
            _Rank(log, lines[rank], before[rank], whole) for rank, log in enumerate(logs)
        ]
        for rank in self._ranks:
            self.operations += len(rank.operations)
            self.messages += sum(len(one.received) + len(one.sent) for one in rank.operations)

    def faults(self, opened: set[tuple[Group, object]]) -> list[str]:
        """Why it does not hold.

        Args:
            opened: the lanes that were used before; those of this piece are added.
        """
        found = [fault for rank in self._ranks for fault in rank.faults]
        found += self._programme()
        found += self._pairing()
        plays = [Rendezvous(self._programmes("hccl"))]
        plays.append(Rendezvous(self._programmes("hccl"), opened=opened))
        if any(rank.gloo for rank in self._ranks):
            plays.insert(0, Rendezvous(self._programmes("gloo")))
        stuck = [end for end in (play.play() for play in plays) if end is not None]
        certain = [end for end in stuck if end.certain or self._whole]
        if certain:
            found.insert(0, certain[0].text)
        elif stuck:
            self.notes.append(_so_far(stuck[0]))
        return found

    def _programmes(self, rules: str) -> list[Programme]:
        return [
            Programme(rank.rank, actions, open_ended=not (self._whole or self._ended[rank.rank]))
            for rank in self._ranks
            for actions in (rank.actions[rules] or {0: []}).values()
        ]

    def _programme(self) -> Iterator[str]:
        """The ranks of a group did the same in the same order."""
        operations: dict[Group, dict[int, list[_Running]]] = defaultdict(dict)
        meetings: dict[Group, dict[int, list[tuple[int, str]]]] = defaultdict(dict)
        for rank in self._ranks:
            for facts in rank.log.transports.values():
                operations[facts.group][rank.rank] = [
                    one for one in rank.operations if one.name.group == facts.group
                ]
                meetings[facts.group][rank.rank] = rank.meetings[facts.group]
        for group, by_rank in operations.items():
            absent = [rank for rank in group.ranks if rank not in by_rank]
            if absent:
                yield (
                    f"rank {absent[0]} has no transport {group.name} of ranks "
                    f"{', '.join(map(str, group.ranks))}, which rank {next(iter(by_rank))} has"
                )
                continue
            first = group.ranks[0]
            for other in group.ranks[1:]:
                yield from self._same(first, by_rank[first], other, by_rank[other])
                pairs = zip_longest(meetings[group][first], meetings[group][other])
                for mine, theirs in pairs:
                    if mine is None or theirs is None:
                        yield from self._lacks(
                            first if mine is None else other,
                            f"the meeting {(theirs if mine is None else mine)[1]}",
                            other if mine is None else first,
                        )
                        break
                    if mine != theirs:
                        yield (
                            f"rank {first} comes to {mine[1]} where rank {other} comes to "
                            f"{theirs[1]}"
                        )
                        break

    def _same(
        self, first: int, mine: list[_Running], other: int, theirs: list[_Running]
    ) -> Iterator[str]:
        for one, two in zip_longest(mine, theirs):
            if one is None or two is None:
                there = two if one is None else one
                lacking, having = (first, other) if one is None else (other, first)
                yield from self._lacks(lacking, str(there.name), having)
                return
            differing = [
                f"{what} {value} on rank {first}, {two.of.facts[what]} on rank {other}"
                for what, value in one.of.facts.items()
                if value != two.of.facts[what]
            ]
            if differing:
                yield (
                    f"ranks {first} and {other} do not run the same as operation "
                    f"{one.name.number} of their group: {'; '.join(differing)}"
                )
                return

    def _lacks(self, rank: int, what: str, having: int) -> Iterator[str]:
        """A rank did not do what another one did; not known if its file just ends."""
        if self._whole or self._ended[rank]:
            yield f"rank {rank} lacks {what}, which rank {having} has"

    def _pairing(self) -> Iterator[str]:
        """On each lane the sends of one rank to another are its receives, in order and size."""
        sends: dict[tuple[Group, int, int, int], list[tuple[_Name, Message]]] = defaultdict(list)
        receives: dict[tuple[Group, int, int, int], list[tuple[_Name, Message]]] = defaultdict(list)
        for rank in self._ranks:
            for name, message in rank.order:
                transfer = message.transfer
                here = name.group.ranks.index(rank.rank)
                to = sends if transfer.source == here else receives
                to[name.group, transfer.lane, transfer.source, transfer.target].append(
                    (name, message)
                )
        for key in sends | receives:
            group, lane, source, target = key
            for number, (sent, expected) in enumerate(zip_longest(sends[key], receives[key])):
                # Without a word about a name that differs: that is said of the operations.
                if sent and expected and (sent[0][:2], sent[1]) == (expected[0][:2], expected[1]):
                    continue
                if not self._whole and not (sent and expected):
                    break
                one, other = group.ranks[source], group.ranks[target]
                yield (
                    f"lane {lane}, message {number} from rank {one} to rank {other}: rank {one} "
                    f"{_said('sends', sent)}, rank {other} {_said('expects', expected)}"
                )
                break


def _said(verb: str, message: tuple[_Name, Message] | None) -> str:
    return f"{verb} nothing" if message is None else f"{verb} {message[1]}, in {message[0]}"


def _so_far(stuck: Stuck) -> str:
    return f"when the files end, {stuck.text.partition(': ')[2]}"


# ---------------------------------------------------------------------- one rank in a piece


class _Rank:
    """The events of a rank: held against its plans, and as programmes to be played.

    Attributes:
        operations: in the order of their starts.
        meetings: ``(number, place)`` per group.
        order: the messages in the order in which they go onto their lanes on HCCL.
        actions: per set of rules and thread.
        gloo: whether it posted anything one by one.
    """

    def __init__(
        self, log: RankLog, lines: list[bytes], before: Counter[tuple[int, str]], whole: bool
    ) -> None:
        self.log = log
        self.rank = log.rank
        self.faults: list[str] = []
        self.operations: list[_Running] = []
        self.meetings: dict[Group, list[tuple[int, str]]] = defaultdict(list)
        self.order: list[tuple[_Name, Message]] = []
        self.actions: dict[str, dict[int, list[Action]]] = {
            rules: defaultdict(list) for rules in ("gloo", "hccl")
        }
        self.gloo = False
        self._counts = Counter(before)
        self._slots: dict[int, _Running] = {}
        self._line: dict[Group, list[_Running]] = defaultdict(list)
        self._posted: Counter[tuple[str, Group]] = Counter()
        self._faulty: set[_Name] = set()
        for event in log.events(lines):
            self._take(event)
        if whole:
            for left in self._slots.values():
                self._fault(left, "is never finished")

    def _fault(self, running: _Running, what: str) -> None:
        # One per operation: what follows from it is noise.
        if running.name not in self._faulty:
            self._faulty.add(running.name)
            self.faults.append(f"rank {self.rank}, {running.name}: it {what}")

    def _take(self, event: Event) -> None:
        if event.verb == "start":
            assert event.operation is not None
            facts = self.log.transports[event.operation.transport]
            key = event.operation.transport, "start"
            name = _Name(facts.group, self._counts[key], event.operation.name)
            self._counts[key] += 1
            running = self._slots[event.slot] = _Running(event.operation, name)
            self.operations.append(running)
            if event.operation.name in _IN_LINE:
                self._line[facts.group].append(running)
        elif event.verb == "meet":
            group = self.log.transports[event.transport].group
            number = self._counts[event.transport, "meet"]
            self._counts[event.transport, "meet"] += 1
            self.meetings[group].append((number, event.text))
            for rules in self.actions.values():
                rules[event.thread].append(Meet(group, number, event.text))
        elif event.messages or event.verb == "finish":
            running_or_none = self._slots.get(event.slot)
            if running_or_none is None:
                raise LogError(f"{self.log.path}: {event.verb} in slot {event.slot}, which is free")
            if event.verb == "finish":
                del self._slots[event.slot]
                self._check_finish(running_or_none)
            else:
                self._message(event, running_or_none)

    def _message(self, event: Event, running: _Running) -> None:
        thread, (message, *more) = event.thread, event.messages
        plan = running.of.plan
        for one in event.messages:
            places = {one.transfer.source, one.transfer.target}
            if len(places) < 2 or plan.rank not in places or max(places) >= plan.size:
                raise LogError(
                    f"{self.log.path}: rank {self.rank} has place {plan.rank} of {plan.size} in "
                    f"its group and no part in {one}"
                )
        if event.verb == "wait":
            self._check_wait(running, message)
            running.awaited |= {end.transfer for end in self._together(running, message)}
            self.actions["gloo"][thread].append(Wait((running.end(message),)))
            self.actions["hccl"][thread].append(Wait(running.batch(message)))
            return
        if event.verb == "batch":
            self._check_receive(running, more[0])
            running.received.append(more[0])
            self._check_send(running, message, queued=False)
            running.registered.append(message)
            running.sent.append(message)
            self._batch(running, thread, len(running.registered) - 1)
            return
        self.gloo = True
        if event.verb == "receive":
            self._check_receive(running, message)
            running.received.append(message)
        else:
            registered = message in running.registered
            self._check_send(running, message, queued=registered)
            if not registered:
                running.registered.append(message)
                self._batch(running, thread, len(running.registered) - 1)
            if event.verb == "queue":
                return
            running.sent.append(message)
        end = running.end(message)
        self._post("gloo", thread, Post(running.name.group, _Gloo(end), (end,)))

    def _together(self, running: _Running, message: Message) -> tuple[End, ...]:
        """What a wait for this message is a wait for, as the rank posted it."""
        batched = self.log.transports[running.of.transport].batched
        return running.batch(message) if batched else (running.end(message),)

    def _batch(self, running: _Running, thread: int, place: int) -> None:
        """What HCCL gets at this moment: a batch, unless earlier buckets are to come before it."""
        message = running.registered[place]
        both = [message, *running.received[place : place + 1]]
        ends = tuple(running.end(one) for one in both)
        post = Post(running.name.group, message.transfer.lane, ends)
        line = self._line[running.name.group]
        if running in line and line[0] is not running:
            running.held.append(post)
            return
        self._onto_lane(running, thread, post)
        while line and line[0].complete:
            line.pop(0)
            for held in line[0].held if line else ():
                self._onto_lane(line[0], thread, held)
            if line:
                line[0].held.clear()

    def _onto_lane(self, running: _Running, thread: int, post: Post) -> None:
        for end in post.ends:
            posted = running.registered, running.received
            message = next(m for part in posted for m in part if m.transfer == end.transfer)
            self.order.append((running.name, message))
        self._post("hccl", thread, post)

    def _post(self, rules: str, thread: int, post: Post) -> None:
        key = rules, post.group
        self.actions[rules][thread].append(post._replace(before=self._posted[key]))
        self._posted[key] += 1

    # ------------------------------------------------------------------ against the plan

    def _check_receive(self, running: _Running, message: Message) -> None:
        self._check(running, message, len(running.received), "receive")

    def _check_send(self, running: _Running, message: Message, *, queued: bool) -> None:
        plan = running.of.plan
        if queued:
            lane = [m for m in running.registered if m.transfer.lane == message.transfer.lane]
            due = [m for m in lane if m not in running.sent]
            if message in running.sent:
                self._fault(running, f"sends {message} twice")
            elif due[0] != message:
                self._fault(running, f"sends {message} before {due[0]}, which comes before it")
            return
        place = len(running.registered)
        if not self._check(running, message, place, "send"):
            return
        if place >= len(running.received):
            self._fault(running, f"posts the send of {message} before the receive of its step")
        origin = plan.arrival.get(message.transfer.piece)
        if origin is not None:
            needed = plan.transfers[origin].receive
            if needed is not None and needed not in running.awaited:
                self._fault(running, f"passes on {message} before it has waited for {needed}")

    def _check(self, running: _Running, message: Message, place: int, verb: str) -> bool:
        """Whether this is the transfer of the plan that is due."""
        transfers = running.of.plan.transfers
        posts = f"posts the {verb} of {message}"
        if place >= len(transfers):
            self._fault(running, f"{posts}, which is more than its plan has")
            return False
        step = transfers[place]
        due = step.send if verb == "send" else step.receive
        assert due is not None
        if message.transfer != due:
            self._fault(running, f"{posts} where its plan has {due}")
            return False
        expected = _elements(running.of, due)
        if message.elements not in expected or message.dtype != running.of.dtype:
            sizes = " or ".join(map(str, sorted(expected)))
            self._fault(running, f"{posts} where its plan has {sizes} x {running.of.dtype}")
            return False
        return True

    def _check_wait(self, running: _Running, message: Message) -> None:
        if message not in running.received and message not in running.sent:
            self._fault(running, f"waits for {message}, which it has not posted")
        elif message.transfer in running.awaited:
            self._fault(running, f"waits for {message} twice")

    def _check_finish(self, running: _Running) -> None:
        transfers = running.of.plan.transfers
        for place, step in enumerate(transfers):
            for due, posted in ((step.receive, running.received), (step.send, running.registered)):
                assert due is not None
                if place >= len(posted):
                    verb = "receives" if due is step.receive else "sends"
                    self._fault(running, f"never {verb} {due}, which its plan has")
                    return
        for message in running.registered:
            if message not in running.sent:
                self._fault(running, f"holds back the send of {message} for good")
        for message in (*running.received, *running.sent):
            if message.transfer not in running.awaited:
                self._fault(running, f"never waits for {message}")


def _elements(operation: Operation, transfer: Transfer) -> set[int]:
    """The sizes that a message may have."""
    rows, *rest = operation.block
    pieces = [transfer.piece]
    if operation.name == "all_gather_bucket" and transfer.piece.chunk is not None:
        # With ``last_first`` the chunks of a shard go from its end to its start.
        mirrored = operation.plan.chunks - 1 - transfer.piece.chunk
        pieces.append(transfer.piece._replace(chunk=mirrored))
    inside = [operation.plan.inside(piece, rows) for piece in pieces]
    return {(part.stop - part.start) * prod(rest) for part in inside}
