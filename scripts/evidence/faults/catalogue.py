"""The rows of the table: which faults are planted where."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.evidence.faults.mismatches import MISMATCHES
from scripts.evidence.faults.scenario import Place, Scenario

__all__ = ["scenarios"]

_OPERATIONS = (
    "all_gather_linear",
    "linear_reduce_scatter",
    "attention_linear_reduce_scatter",
    "linear_all_to_all",
    "Buckets",
)
_PLACES: tuple[Place, ...] = ("first", "middle", "last")


def scenarios(*, quick: bool) -> list[Scenario]:
    """All rows, or the short table's; no two have the same name."""
    return [scenario for scenario in _all() if scenario.quick or not quick]


def _all() -> Iterator[Scenario]:
    yield from _killed()
    yield from _slow()
    yield from _user_errors()
    yield from _lost_connections()
    yield from _mismatches()
    yield from _lanes()
    yield from _no_memory()


def _killed() -> Iterator[Scenario]:
    for operation in _OPERATIONS:
        for phase in ("forward", "backward"):
            for place in _PLACES:
                quick = (phase, place) == ("backward", "middle")
                yield Scenario("killed", operation, phase, place, quick=quick)
    yield Scenario("killed", "attention_all_to_all_linear", "forward")
    yield Scenario("killed", "attention_all_to_all_linear", "backward")
    yield Scenario("killed", "all_gather_linear", "forward", ranks=2)
    yield Scenario("killed", "linear_reduce_scatter", "backward", ranks=2)
    yield Scenario("killed", "Buckets", "forward", ranks=4, lanes=3, stay=True)
    for operation in ("all_gather_linear", "linear_reduce_scatter"):
        quick = operation == "all_gather_linear"
        yield Scenario("killed", operation, ranks=4, stay=True, quick=quick)
    yield Scenario("killed", "all_gather_linear", "first use", quick=True)
    yield Scenario("killed", "linear_all_to_all", "first use")
    # The rank whose process holds what others may depend on.
    yield Scenario("killed", "linear_reduce_scatter", "backward", "first", faulty=0, ranks=4)


def _slow() -> Iterator[Scenario]:
    for operation in _OPERATIONS:
        yield Scenario("slow", operation, "forward", quick=operation == "Buckets")
        yield Scenario("slow", operation, "backward")
    for operation in _OPERATIONS:
        yield Scenario("too slow", operation, "forward")
        quick = operation == "linear_reduce_scatter"
        yield Scenario("too slow", operation, "backward", stay=True, quick=quick)
    yield Scenario("too slow", "all_gather_linear", "first use", stay=True, quick=True)


def _user_errors() -> Iterator[Scenario]:
    for operation in _OPERATIONS:
        quick = operation == "all_gather_linear"
        yield Scenario("user error", operation, "between", quick=quick)
    yield Scenario("user error", "all_gather_linear", "first use")
    # In a callback, with transfers under way; and so that nobody learns of it by an exit.
    yield Scenario("user error", "gather_use", quick=True)
    yield Scenario("user error", "gather_use", place="first", ranks=2, stay=True)
    yield Scenario("user error", "Buckets", "forward", "last")


def _lost_connections() -> Iterator[Scenario]:
    for operation in _OPERATIONS:
        quick = operation == "all_gather_linear"
        yield Scenario("all connections lost", operation, "forward", quick=quick)
        yield Scenario("all connections lost", operation, "backward", "last")
    for operation in ("all_gather_linear", "linear_reduce_scatter"):
        quick = operation == "linear_reduce_scatter"
        yield Scenario(
            "one connection lost", operation, ranks=4, peer=0, lanes=3, stay=True, quick=quick
        )


def _mismatches() -> Iterator[Scenario]:
    for name in MISMATCHES:
        yield Scenario("mismatch", name, quick=name in ("shape", "dtype", "number of lanes"))
    yield Scenario("mismatch", "shape", ranks=2, faulty=0)


def _lanes() -> Iterator[Scenario]:
    where = "Transport.create"
    yield Scenario("no lane: too many open files", where, "making lanes", "first")
    yield Scenario("no lane: too many open files", where, "making lanes", "middle", quick=True)
    yield Scenario("no lane: too many open files", where, "making lanes", "last", ranks=2)
    yield Scenario("killed", where, "making lanes", "middle")
    yield Scenario("user error", where, "making lanes", "first")


def _no_memory() -> Iterator[Scenario]:
    for operation in _OPERATIONS:
        quick = operation == "linear_reduce_scatter"
        yield Scenario("no memory for scratch", operation, "forward", quick=quick)
    yield Scenario("no memory for scratch", "all_gather_linear", "backward", "last")
    yield Scenario("no memory for the output", "all_gather_linear", "forward", "first")
    yield Scenario("no memory for the output", "linear_reduce_scatter", "backward", quick=True)
