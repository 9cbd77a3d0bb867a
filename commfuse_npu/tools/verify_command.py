"""Prove the programs of all groups up to a size, or the order that a run recorded."""

import time
from collections.abc import Sequence
from pathlib import Path

from commfuse_npu.launch.options import whole
from commfuse_npu.plan.rules import RULES, forget_programs
from commfuse_npu.proof.cases import CHUNKS, LANES, cases
from commfuse_npu.proof.verify import counter_examples
from commfuse_npu.tools.option_types import Parser, refuse
from commfuse_npu.tools.order_log.recorded_order import LogError
from commfuse_npu.tools.order_log.verify_log import verify_logs
from commfuse_npu.tools.terminal import tell

_MOST_RANKS = 1024
"""No group is larger, and a larger proof would not end."""


def main(words: Sequence[str]) -> int:
    """Run the subcommand: 0 proved, 1 refuted, 2 an invalid request."""
    parser = Parser(prog="commfuse-npu verify", description=__doc__)
    add = parser.add_argument
    add("--log", type=Path, nargs="+", metavar="PATH",
        help="prove what a run with --commfuse-order-log FOLDER did: that folder, or its files of "
        "all ranks; 0: proved, 1: refuted, 2: unreadable, or not known to its end")  # fmt: skip
    add("--max-ranks", type=whole(2, _MOST_RANKS), help="default 16: every rule with every shape; "
        "in larger groups the other options take turns")  # fmt: skip
    options = parser.parse_args(words)
    if options.log and options.max_ranks:
        parser.error("--max-ranks: no effect on a recorded run; leave it out, or --log")
    try:
        return _verify_log(options.log) if options.log else _verify(options.max_ranks or 16)
    except LogError as error:
        return refuse("verify", error)


def _verify(most: int) -> int:
    start = time.perf_counter()
    sets = 0
    programs = 0
    for size in range(2, most + 1):
        for case in cases(size):
            tell(f"{size} ranks, up to {most}: {sets:,} sets of programs are proved")
            group = case.programs()
            if examples := counter_examples(group):
                print(f"refuted: {case}:\n", *examples, sep="\n- ")
                return 1
            sets += 1
            programs += len(group)
            # Otherwise they would stay cached, as for a run.
            forget_programs()
    of_lanes = ", ".join("one per peer" if lane is None else str(lane) for lane in LANES)
    print(
        f"proved: all programs of 2 to {most} ranks: {len(RULES)} rules, chunks "
        f"{', '.join(map(str, CHUNKS))}, lanes {of_lanes}; every row is what it has to be, one "
        "order for all ranks, no deadlock"
    )
    print(f"\n{sets:,} sets of {programs:,} programs, {time.perf_counter() - start:.0f} s")
    return 0


def _verify_log(paths: Sequence[Path]) -> int:
    start = time.perf_counter()
    try:
        result = verify_logs(paths)
    except OSError as error:
        raise LogError(f"cannot read {error.filename}: {error.strerror}") from error
    verdict = "proved"
    code = 0
    if result.faults:
        verdict = "refuted"
        code = 1
    elif result.notes:
        verdict = "no fault as far as it is known, which is no proof"
        code = 2
    summary = (
        f"{verdict}: {result.ranks} ranks, {result.operations} operations, {result.messages} "
        f"posts, {time.perf_counter() - start:.0f} s\n"
    )
    print(summary, *result.faults, *result.notes, sep="\n- ")
    return code
