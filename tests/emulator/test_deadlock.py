"""What is hopeless in a graph of waits, and how it is told."""

from __future__ import annotations

from tests.emulator.deadlock import Edge, Graph, Needs, hopeless, report


def waits(rank: int, *targets: str, mode: str = "all") -> Needs:
    edges = tuple(Edge(target, f"rank {rank} waits for {target}") for target in targets)
    return Needs(rank, mode, edges, note=f"rank {rank} rests")  # type: ignore[arg-type]


def test_a_cycle_and_what_hangs_on_it() -> None:
    graph: Graph = {
        "a": waits(0, "b"),
        "b": waits(1, "c"),
        "c": waits(2, "b"),
        "running": waits(3),
        "patient": waits(4, "running"),
    }
    vain = hopeless(graph)
    assert vain == {"a", "b", "c"}
    assert report(graph, "a", vain) == (
        "a cycle of ranks 1 -> 2 -> 1\n- rank 1 waits for c\n- rank 2 waits for b"
    )


def test_all_are_needed_or_any() -> None:
    graph: Graph = {
        "batch": waits(0, "running", "gone"),
        "host": waits(1, "running", "gone", mode="any"),
        "running": waits(2),
        "gone": waits(3, mode="never"),
    }
    vain = hopeless(graph)
    assert vain == {"batch", "gone"}
    assert report(graph, "batch", vain) == ("ranks 0 -> 3\n- rank 0 waits for gone\n- rank 3 rests")


def test_a_rank_that_waits_for_itself() -> None:
    graph: Graph = {"host": waits(0, "send"), "send": waits(0, "host")}
    assert report(graph, "host", hopeless(graph)).startswith("rank 0 waits for itself\n")


def test_nothing_is_hopeless_while_somebody_runs() -> None:
    graph: Graph = {"a": waits(0, "b"), "b": waits(1, "running"), "running": waits(2)}
    assert not hopeless(graph)
