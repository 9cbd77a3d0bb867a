"""Who waits for whom, and which of them waits in vain.

A node is a host or an operation.  An operation needs *all* that it waits for; a host goes on as
soon as *any* of its threads does; a host that is gone or at its end does nothing any more.  What
cannot be reached from the nodes that need nothing is hopeless: it waits for a cycle, or for the
end of a rank.  A host that runs its own code may still do anything, so nothing that waits for it is
hopeless yet.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Node = Hashable


class Edge(NamedTuple):
    """A node waits for ``target``; ``why`` is a sentence."""

    target: Node
    why: str


@dataclass(frozen=True)
class Needs:
    """What a node waits for.  ``note`` describes one that waits for nothing."""

    rank: int
    mode: Literal["all", "any", "never"]
    edges: tuple[Edge, ...] = ()
    note: str = ""


Graph = Mapping[Node, Needs]


def hopeless(graph: Graph) -> set[Node]:
    """The nodes that wait in vain, and those that never do anything any more."""
    hopeful: set[Node] = set()
    left = dict(graph)
    while True:
        found = {
            node
            for node, needs in left.items()
            if (needs.mode == "all" and all(edge.target in hopeful for edge in needs.edges))
            or (needs.mode == "any" and any(edge.target in hopeful for edge in needs.edges))
        }
        if not found:
            return set(left)
        hopeful |= found
        for node in found:
            del left[node]


def report(graph: Graph, start: Node, vain: set[Node] | None = None) -> str:
    """Who waits for whom, beginning at ``start``, in words.

    Args:
        vain: the hopeless nodes, which are followed; without them the first edge is.
    """
    path: list[Node] = []
    lines: list[str] = []
    node = start
    while node not in path:
        needs = graph[node]
        path.append(node)
        edges = [edge for edge in needs.edges if vain is None or edge.target in vain]
        if needs.mode == "never" or not edges:
            lines.append(needs.note)
            return _told(graph, path, lines, cycle=False)
        lines.append(edges[0].why)
        node = edges[0].target
    first = path.index(node)
    return _told(graph, [*path[first:], node], lines[first:], cycle=True)


def _told(graph: Graph, path: list[Node], lines: list[str], cycle: bool) -> str:
    ranks = [graph[node].rank for node in path]
    chain = [rank for place, rank in enumerate(ranks) if place == 0 or rank != ranks[place - 1]]
    if cycle and len(chain) > 1:
        head = f"a cycle of ranks {' -> '.join(map(str, chain))}"
    elif cycle:
        head = f"rank {chain[0]} waits for itself"
    else:
        head = f"ranks {' -> '.join(map(str, chain))}" if len(chain) > 1 else f"rank {chain[0]}"
    return "\n".join([head, *(f"- {line}" for line in lines)])
