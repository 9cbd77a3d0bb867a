"""Proves a recorded run, or refutes it in words: ``commfuse-npu verify --log``.

It checks the files that :mod:`commfuse_npu.runtime.order_log` wrote:

1. *programs*: each rank executed exactly the posts and waits of its programs, in order, to their
   ends, and waited for each collective that it started;
2. *one job*: the ranks of a group began the same programs in the same order, started the same
   collectives of the same sizes, and met at the same places;
3. *pairing*: on each lane, between each two ranks, sends and receives match in order and rows;
4. *no deadlock*: with the programs and collectives that were in flight, every rank finishes.

1 is checked line by line (:mod:`.recorded_order`).  3 and 4 follow HCCL's rules
(:mod:`commfuse_npu.proof.rendezvous`), with communicators created at first use, also for a run on
gloo, which posts the same.

The part between two cuts (:func:`_read_to_cuts`) is checked by itself, and only once if it repeats.

A run that was killed is checked as far as its files go.  A rank whose file has no ``end`` may have
done more, so a rank that waits for it is not reported as stuck.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from commfuse_npu.proof.rendezvous import Group, Rendezvous, Script
from commfuse_npu.tools.order_log.recorded_order import LogError, RankLog

__all__ = ["Verdict", "verify_logs"]

_MOST_FAULTS = 8
_Link = tuple[Group, Hashable]


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
    """Verify the files of all ranks of one run, part by part, up to the first part with faults.

    Args:
        paths: files, or folders with ``rank_*.jsonl``.

    Raises:
        LogError: a file is not an order log, or files are missing or from different runs.
        OSError: a file cannot be read.
    """
    with _opened(paths) as logs:
        verdict = Verdict(len(logs))
        links = set[_Link]()
        judged = set[tuple[bytes, ...]]()
        for _ in _read_to_cuts(logs):
            whole = all(log.ended for log in logs) or not any(log.over for log in logs)
            part = tuple(log.lines.digest() for log in logs)
            if part not in judged:
                _hold_together(logs, whole, links, verdict)
                judged.add(part)
            verdict.operations += sum(log.operations for log in logs)
            verdict.messages += sum(log.messages for log in logs)
            if verdict.faults:
                break
        for log in logs:
            verdict.notes += _notes(log)
        if verdict.proved and verdict.operations == 0:
            verdict.notes.append("the ranks recorded no operation: there is nothing to prove")
        return verdict


def _hold_together(
    ranks: Sequence[RankLog], whole: bool, links: set[_Link], found: Verdict
) -> None:
    """Check one part on all ranks; ``whole``: the files do not end here, or all with ``end``."""
    faults = [fault for rank in ranks for fault in rank.faults]
    for key in dict.fromkeys(key for rank in ranks for key in rank.did):
        first, *peers = (ranks[rank] for rank in key[0].ranks)
        for peer in peers:
            faults += _difference(key, first, peer, whole)
    scripts = [
        Script(rank.rank, actions, open_ended=not (whole or rank.ended))
        for rank in ranks
        for actions in (rank.actions or {0: []}).values()
    ]
    stuck = Rendezvous(scripts, links).simulate()
    if stuck is not None and stuck.certain:
        faults.insert(0, stuck.text)
    elif stuck is not None:
        found.notes.append(f"when the files end, {stuck.text.partition(': ')[2]}")
    found.faults += faults[:_MOST_FAULTS]


def _difference(
    key: tuple[Group, str], first: RankLog, other: RankLog, whole: bool
) -> Iterator[str]:
    """The first difference between the operations, or meetings, of two ranks of a group."""
    for a, b in zip_longest(first.did[key], other.did[key]):
        if a is None or b is None:
            lacking, having = (first, other) if a is None else (other, first)
            # A rank whose file has no ``end`` may have done more.
            if whole or lacking.ended:
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
    if log.over and not log.ended:
        yield f"the file of rank {log.rank} ends before its process did"
    elif log.slots:
        yield f"rank {log.rank} came to its end with {len(log.slots)} operations under way"


# ---------------------------------------------------------------------- files


@contextmanager
def _opened(paths: Iterable[Path]) -> Iterator[list[RankLog]]:
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


def _read_to_cuts(logs: Sequence[RankLog]) -> Iterator[None]:
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
