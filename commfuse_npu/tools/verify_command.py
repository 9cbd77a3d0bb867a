"""``commfuse-npu verify``: prove the plans of all groups up to a size, or a recorded run."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from commfuse_npu.plan import Kind, Order, Own, Plan, PlanError, Schedule
from commfuse_npu.proof.recorded_order import LogError
from commfuse_npu.proof.verify import counter_examples, lane_counter_examples
from commfuse_npu.proof.verify_log import files_of, verify_logs

__all__ = ["main"]

_KINDS: tuple[tuple[Kind, Own | None], ...] = (
    ("gather", None),
    ("reduce_scatter", None),
    ("all_to_all", "first"),
    ("all_to_all", "last"),
)


def main(words: Sequence[str]) -> int:
    """Run the subcommand: 0 proved, 1 refuted, 2 a question that makes no sense."""
    parser = argparse.ArgumentParser(prog="commfuse-npu verify", description=__doc__)
    parser.add_argument(
        "--log",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="prove what a run with --commfuse-order-log FOLDER did: that folder, or its files of "
        "all ranks; 0: proved, 1: refuted, 2: unreadable, or not known to its end",
    )
    parser.add_argument("--min-ranks", type=int, default=1)
    parser.add_argument("--max-ranks", type=int, default=16)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--lanes", type=int, nargs="+", help="besides 1; default: every number")
    parser.add_argument(
        "--ring-all-to-all-ranks",
        type=int,
        default=16,
        help="its messages grow with the square of the ranks: prove it up to this size only",
    )
    given = parser.parse_args(words)
    try:
        return _verify(given) if given.log is None else _verify_log(given.log)
    except (PlanError, LogError) as error:
        print(f"commfuse-npu verify: {error}", file=sys.stderr)
        return 2


def _schedules(size: int, chunks: int) -> Iterator[Schedule]:
    """Every shape, order and node size, on one lane."""
    # With one chunk there is only one order.
    orders: tuple[Order, ...] = ("block", "interleaved") if chunks > 1 else ("block",)
    for order in orders:
        yield Schedule("shifted", 1, chunks, order)
        yield Schedule("ring", 1, chunks, order)
        for node in range(1, size + 1):
            if size % node == 0:
                yield Schedule("two_level", 1, chunks, order, node)


def _more_lanes(schedule: Schedule, size: int, wanted: Sequence[int] | None) -> Iterator[Schedule]:
    """The same with every wanted number of lanes that makes a difference."""
    # The lanes of a ring follow its chunks, those of the others the distance to the peer.
    most = schedule.chunks if schedule.shape == "ring" else size - 1
    for lanes in range(2, most + 1):
        if wanted is None or lanes in wanted:
            yield replace(schedule, lanes=lanes)


def _plans(schedule: Schedule, kind: Kind, size: int, own: Own | None) -> list[Plan]:
    return [schedule.plan(kind, rank, size, own) for rank in range(size)]


def _verify(given: argparse.Namespace) -> int:
    start, proved = time.perf_counter(), 0
    for size in range(given.min_ranks, given.max_ranks + 1):
        for chunks in given.chunks:
            for schedule in _schedules(size, chunks):
                for kind, own in _KINDS:
                    quadratic = schedule.shape == "ring" and kind == "all_to_all"
                    if quadratic and size > given.ring_all_to_all_ranks:
                        continue
                    plans = _plans(schedule, kind, size, own)
                    found = counter_examples(plans)
                    proved += 1
                    for other in _more_lanes(schedule, size, given.lanes):
                        if not found:
                            found = lane_counter_examples(_plans(other, kind, size, own), plans)
                            proved += 1
                    if found:
                        print(f"{kind}, {size} ranks, {schedule}:", *found, sep="\n- ")
                        return 1
        elapsed = time.perf_counter() - start
        print(f"{size:>3} ranks: {proved} sets of plans in {elapsed:.0f} s", flush=True)
    return 0


def _verify_log(paths: Sequence[Path]) -> int:
    start = time.perf_counter()
    try:
        found = verify_logs(files_of(paths))
    except OSError as error:
        raise LogError(f"cannot read {error.filename}: {error.strerror}") from error
    elapsed = time.perf_counter() - start
    judged = (
        f"{found.ranks} ranks, {found.operations} operations, {found.messages} posts, "
        f"{elapsed:.0f} s"
    )
    if found.faults:
        print(f"refuted ({judged}):", *found.faults, *found.notes, sep="\n- ")
        return 1
    if found.notes:
        print(f"no fault as far as it is known, which is no proof ({judged}):", end="")
        print("", *found.notes, sep="\n- ")
        return 2
    print(f"proved: {judged}")
    return 0
