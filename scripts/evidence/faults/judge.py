"""Whether what the ranks reported is what a fault has to lead to, and what they said, in short.

Times are held against the transport's own limit and a margin.  The margin covers what is not the
product's: the store of the process group looks for an answer once a second only, and there are more
processes than cores.  It is much shorter than the limit of the default group, so that a wait which
forgot the transport's limit shows.
"""

from __future__ import annotations

import re

from scripts.evidence.faults.processes import Played, Report
from scripts.evidence.faults.scenario import Scenario

__all__ = ["MARGIN_SECONDS", "cause", "names_peer", "names_step", "problems", "said", "short"]

MARGIN_SECONDS = 5.0

_NAMES = {
    "Buckets": ("reduce_scatter_bucket", "all_gather_bucket"),
    "wgrad option": ("linear_reduce_scatter",),
    "reduce_dtype option": ("linear_reduce_scatter",),
    "operation": ("linear_reduce_scatter", "all_gather_linear"),
    "rows of the heads": ("linear_all_to_all",),
    "size of a bucket": ("reduce_scatter_bucket",),
    "number of lanes": ("Transport.create",),
}
_STEP = re.compile(
    r"step \d+ of \d+|before step 0|lane \d+ of \d+|before lane 0|the group for comparisons"
    r"|Nothing was sent|None was made"
)
_RANKS = re.compile(r"(?:peer|rank) (\d+(?:, \d+)*)")
_BOTH_VALUES = re.compile(r"(\S+(?: \S+)*?): (.+) here, (.+) there")
_LANES_OF_RANKS = re.compile(r"rank 0: (\d+), rank 1: (\d+)")
_CAUSES = (
    ("Too many open files", "too many open files"),
    ("can't allocate memory", "can't allocate memory"),
    ("Timed out|timeout", "timed out"),
    ("Connection closed|onnection reset|Broken pipe|Connection refused", "connection gone"),
)
_VALUE_LENGTH = 40


def problems(played: Played, *, margin: float = MARGIN_SECONDS) -> list[str]:
    """What is wrong with a row; nothing if all is as it has to be.

    Args:
        margin: seconds beyond the limits that are still right.
    """
    found = [f"left over: {command}" for command in played.left]
    if not played.struck:
        found.append("the fault did not happen")
    for report in played.reports:
        wrong = _wrong(played.scenario, report, margin)
        found += [f"rank {report.rank}: {text}" for text in wrong]
    return found


def _wrong(scenario: Scenario, report: Report, margin: float) -> list[str]:
    if report.exit_code is None:
        return ["it hung and was killed"]
    if scenario.fault == "slow":
        right = report.exit_code == 0 and report.right
        return [] if right else ["it did not finish with the bits of the plain form"]
    faulty = report.rank == scenario.faulty
    if faulty and scenario.fault == "killed":
        return [] if report.exit_code == -9 else [f"exit code {report.exit_code} instead of -9"]
    if not report.kinds:
        return [f"it reported nothing and ended with exit code {report.exit_code}"]
    wrong = _wrong_end(report)
    if faulty and scenario.fault == "user error":
        return wrong + _expect(report, "UserError", "a mistake in the program")
    if faulty and scenario.fault.startswith("no memory"):
        return wrong + _expect(report, "RuntimeError", "can't allocate memory")
    return wrong + _wrong_message(scenario, report) + _wrong_time(scenario, report, margin)


def _expect(report: Report, kind: str, words: str) -> list[str]:
    if report.kinds[0] == kind and words in report.message:
        return []
    return [f"{report.kinds[0]}: {report.message}; it has to be its own {kind}, {words!r}"]


def _wrong_end(report: Report) -> list[str]:
    wrong = []
    if report.exit_code != 1:
        wrong.append(f"exit code {report.exit_code} instead of 1")
    if "Traceback" not in report.output or report.kinds[0] not in report.output:
        wrong.append("no traceback of its error")
    return wrong


def _wrong_message(scenario: Scenario, report: Report) -> list[str]:
    wrong = []
    if "TransportError" not in report.kinds:
        wrong.append(f"{report.kinds[0]} instead of a TransportError: {report.message}")
    for what, named in (
        ("operation", names_operation(scenario, report.message)),
        ("step", names_step(report.message)),
        ("peer", names_peer(report.message, report.rank)),
    ):
        if not named:
            wrong.append(f"its message does not name the {what}: {report.message}")
    # What all ranks know is compared after it was carried out: here they time out before that, and
    # say in what they differ only if the others time out as well.
    if scenario.fault == "mismatch" and "both known" not in scenario.operation:
        both = _BOTH_VALUES.search(report.message) or _LANES_OF_RANKS.search(report.message)
        if "MismatchError" not in report.kinds or both is None:
            wrong.append(f"not a MismatchError with both values: {report.message}")
    return wrong


def _wrong_time(scenario: Scenario, report: Report, margin: float) -> list[str]:
    limit = scenario.timeout + margin
    if report.after is not None and report.after <= limit:
        return []
    return [f"it reported after {report.after} s; the limit is {limit:g} s"]


def names_operation(scenario: Scenario, message: str) -> bool:
    if scenario.phase == "making lanes":
        return "Transport.create" in message
    names = ("all_gather_linear",) if scenario.fault == "mismatch" else (scenario.operation,)
    return any(name in message for name in _NAMES.get(scenario.operation, names))


def names_step(message: str) -> bool:
    """Whether a message says how far the operation was."""
    return _STEP.search(message) is not None


def names_peer(message: str, rank: int) -> bool:
    """Whether a message names a rank other than the one that says it."""
    listed = [number for numbers in _RANKS.findall(message) for number in numbers.split(", ")]
    return any(int(number) != rank for number in listed)


def said(scenario: Scenario, report: Report) -> str:
    """What a rank reported, for a table: kind, operation, peer, step and cause."""
    if report.exit_code is None:
        return "hung"
    if report.exit_code < 0:
        return f"signal {-report.exit_code}"
    if not report.kinds:
        return {True: "right bits", False: "wrong bits", None: "nothing"}[report.right]
    if "TransportError" not in report.kinds:
        return f"{report.kinds[0]}: {cause(report.message) or report.message}"
    return f"{report.kinds[0]}: {short(report.message, report.rank)}"


def short(message: str, rank: int) -> str:
    """Operation, peer, step and cause of a transport's message."""
    name = re.search(
        r"Transport\.create|\w*(?:linear|bucket|scatter|gather|all_to_all)\w*"
        r"(?: backward| dgrad| re-gather| rows)?",
        message,
    )
    listed = [n for numbers in _RANKS.findall(message) for n in numbers.split(", ")]
    peer = next((number for number in listed if int(number) != rank), None)
    step = _STEP.search(message)
    both = _BOTH_VALUES.search(message)
    lanes = re.search(r"\((rank 0: .*?)\)", message)
    parts = [name[0] if name else "", f"peer {peer}" if peer else "", step[0] if step else ""]
    if both:
        what = both[1].split(": ")[-1]
        parts.append(f"{what} {_shortened(both[2])} here, {_shortened(both[3])} there")
    elif lanes and "different numbers" in message:
        parts.append(lanes[1])
    else:
        parts.append(cause(message))
    return ", ".join(part for part in parts if part)


def cause(message: str) -> str:
    """What gloo or the operating system said, in short; empty for what is not known here."""
    return next((text for pattern, text in _CAUSES if re.search(pattern, message)), "")


def _shortened(value: str) -> str:
    half = _VALUE_LENGTH // 2
    return value if len(value) <= _VALUE_LENGTH else f"{value[:half]}...{value[-half:]}"
