"""Simple cases whose time has a closed form, and properties that have to follow."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_npu.plan import Schedule
from commfuse_npu.tools.hardware.machine import ITEM_BYTES, Level, Machine, min_outputs_to_hide
from commfuse_npu.tools.simulate import linear_layers
from commfuse_npu.tools.simulate.engine import Links
from commfuse_npu.tools.simulate.rank import Rank, collective_seconds, rest, simulate
from commfuse_npu.tools.simulate.variants import MC2, MC2_RANKS, MEGATRON, REFERENCE, Variant
from tests.tools.simulate.machines import ideal, work

ROWS = FEATURES = 840
"""Rows of a block, features of a layer's input and output; divisible by 1, 2, ..., 8."""
BLOCK = ROWS * FEATURES * ITEM_BYTES

times = st.floats(0.001, 1000.0)
Part = Callable[[Machine, int, Variant, float, float], float]
Expected = Callable[[float, float, int, int], float]


def fused(lanes: int, chunks: int = 1) -> Variant:
    return Variant("fused", "fused", Schedule("shifted", lanes, chunks))


def layer(
    part: str, machine: Machine, size: int, variant: Variant, compute: float, block: float
) -> float:
    """Seconds of a part of a layer, where a GEMM over all rows takes ``compute`` seconds and the
    transfer of a block over a link of rate 1 takes ``block``.
    """
    flops = 2.0 * size * ROWS * FEATURES**2
    inside = replace(machine.inside, rate=machine.inside.rate * BLOCK / block)
    machine = replace(machine, cube_flops=flops / compute if compute else math.inf, inside=inside)
    build = getattr(linear_layers, part)

    def add(rank: Rank) -> None:
        rest(build(rank, "x", ROWS, FEATURES, FEATURES) or iter(()))

    return simulate(Links(machine, size), variant, add).seconds


gather, scatter = partial(layer, "column"), partial(layer, "row")
column, row = partial(layer, "column_gradients"), partial(layer, "row_gradients")


def gathered(c: float, t: float, size: int, chunks: int) -> float:
    """The own block, then a GEMM per chunk of all peers; a lane for each peer."""
    part, ahead = c * (size - 1) / (size * chunks), max(1, 8 // (size - 1))
    ends, arrived = [c / size], 0.0
    for chunk in range(chunks):
        # Posted before the first work, or before the chunk that it follows is used.
        posted = 0.0 if chunk < ahead else ends[chunk - 1]
        arrived = max(arrived, posted) + t / chunks
        ends.append(max(ends[-1], arrived) + part)
    return ends[-1]


def scattered(c: float, t: float, size: int, chunks: int) -> float:
    """Groups of columns, two in flight; own rows of the last group come last."""
    time, arrivals = 0.0, [0.0]
    for group in range(chunks):
        if group >= 2:
            time = max(time, arrivals[group - 1])  # the group two before has to be summed first
        time += c / chunks
        own = c / (size * chunks) if group == chunks - 1 else 0.0
        arrivals.append(max(arrivals[-1], time - own) + t / chunks)
    return max(time, arrivals[-1])


def beside(c: float, own: float, size: int) -> float:
    """The own block beside a transfer, both ended after ``own`` seconds, then all others."""
    return own + c * (size - 1) / size


def tiled(c: float, t: float, size: int, kind: str, rounds: float = 0.0) -> float:
    """MC2 in the best number of tiles; a tile takes ``rounds`` seconds besides its bytes."""
    if size not in MC2_RANKS:  # for which it has no form
        return c + t

    def seconds(tiles: int) -> float:
        time, arrived = c / size if kind == "gather" else 0.0, 0.0
        for _ in range(tiles):
            if kind == "gather":
                arrived += t / tiles + rounds
                time = max(time, arrived) + c * (size - 1) / size / tiles
            else:
                time += c / tiles
                arrived = max(arrived, time) + t / tiles
        return max(time, arrived)

    # Of at least 128 rows each.
    return min(map(seconds, range(1, 7)))


def column_of_two(c: float, t: float, size: int, chunks: int) -> float:
    """The gather, hidden by dgrad; then groups of columns of dgrad, hidden by wgrad."""
    link = t
    for group in range(1, chunks + 1):
        link = max(link, group * c / chunks) + t / chunks
    return max(max(c, t) + c, link)


VARIANTS: dict[str, Callable[[int, int], Variant]] = {
    "plain": lambda n, k: REFERENCE,
    "megatron": lambda n, k: MEGATRON,
    "mc2": lambda n, k: MC2,
    "slices": lambda n, k: Variant("coc", "sliced", k),
    "mesh": lambda n, k: fused(n - 1, k),
    "mesh, whole": lambda n, k: fused(n - 1),
    "lane": lambda n, k: fused(1, k),
    "lane, whole": lambda n, k: fused(1),
}
"""By name, for ``n`` ranks and ``k`` chunks."""
SWITCHED, LATE = ideal("switched"), ideal("switched", latency=1.0)
ORDERED = ideal(ordered_sums=0.4)
BESIDE = replace(ideal(), inside=Level("full_mesh", 1.0, 0.0, beside_work=2.0))
CLOSED: list[tuple[Part, Machine, str, Expected]] = [
    (gather, ideal(), "mesh", gathered),
    # The first rank has all other blocks on one side, and multiplies them together.
    (gather, ideal(latency=3.0), "lane, whole",
     lambda c, t, n, k: beside(c, max(c / n, (n - 1) * (t + 3)), n)),
    (gather, ORDERED, "plain", lambda c, t, n, k: c + t),
    (gather, SWITCHED, "plain", lambda c, t, n, k: c + (n - 1) * t),
    # Sums in a fixed order take longer; those of our programs have one anyway.
    (scatter, ORDERED, "plain", lambda c, t, n, k: c + (1 + 0.4 * n / 8) * t),
    (scatter, ORDERED, "mesh", scattered),
    # Slices leave a tail.
    (gather, ideal(), "slices", lambda c, t, n, k: max(c, t) + min(c, t) / k),
    (scatter, ideal(), "slices", lambda c, t, n, k: max(c, t) + min(c, t) / k),
    (scatter, ideal(), "mc2", lambda c, t, n, k: tiled(c, t, n, "scatter")),
    # Around a ring every tile takes a few rounds.
    (gather, LATE, "mc2",
     lambda c, t, n, k: tiled(c, (n - 1) * t, n, "gather", min(4, n - 1)) + (n not in MC2_RANKS)),
    # A transfer slows work, and work a transfer.
    (gather, ideal(transfer_slowdown=0.2), "mesh, whole",
     lambda c, t, n, k: beside(c, max(c / n + 0.2 * t, t), n)),
    (gather, BESIDE, "mesh, whole", lambda c, t, n, k: beside(c, max(c / n, t + c / n / 2), n)),
    # dgrad and wgrad take c each; Megatron gathers during dgrad and scatters during wgrad.
    (column, ideal(), "plain", lambda c, t, n, k: 2 * (c + t)),
    (column, ideal(), "megatron", lambda c, t, n, k: 2 * max(c, t)),
    (column, ideal(), "lane", column_of_two),
    (row, ideal(), "plain", lambda c, t, n, k: t + 2 * c),
    (row, ideal(), "lane, whole", lambda c, t, n, k: max(c / 2, t) + c / 2 + c),
]  # fmt: skip


@pytest.mark.parametrize(("part", "machine", "variant", "expected"), CLOSED)
@settings(max_examples=20, deadline=None)
@given(c=times, t=times, n=st.integers(2, 8), k=st.integers(1, 8))
def test_a_closed_form(part, machine, variant, expected, c, t, n: int, k: int) -> None:
    n = 2 if part in (column, row) else n
    time = part(machine, n, VARIANTS[variant](n, k), c, t)
    assert time == pytest.approx(expected(c, t, n, k))


def test_copies_take_memory_traffic() -> None:
    """The results of both peers are read and written, those of the last chunk with no transfer."""
    machine, work = ideal(rate=math.inf, hbm_bandwidth=3.0), 1e8
    copied = gather(machine, 3, fused(2, 2), work, BLOCK)
    assert copied == pytest.approx(work + 2 * 2 * BLOCK / 3 / 2)
    # Columns of a weight are copied before they are multiplied.
    unsplit, split = (column(machine, 2, fused(1, chunks), work, BLOCK) for chunks in (1, 2))
    assert split - unsplit == pytest.approx(2 * ITEM_BYTES * FEATURES**2 / 3, rel=1e-6)


def test_an_npu_has_a_nic_of_its_own() -> None:
    between = Level("nic_per_npu", 1.0, 0.0)
    machine = replace(ideal(rate=math.inf), npus_per_node=4, between=between)
    # Three peers in other nodes.
    assert collective_seconds(Links(machine, 4, stride=4), 2.0) == pytest.approx(6.0)
    # Both ranks of a node send to both ranks of the other node.
    machine = replace(machine, npus_per_node=2)
    assert collective_seconds(Links(machine, 4), 2.0) == pytest.approx(4.0)


@pytest.mark.parametrize("topology", ["full_mesh", "switched"])
def test_from_so_many_outputs_on_nothing_is_left_to_hide(topology: str) -> None:
    machine = ideal(topology, rate=10.0, cube_flops=1e6)  # type: ignore[arg-type]
    least = min_outputs_to_hide(machine, 4)
    assert least is not None
    for outputs, hidden in ((least, True), (least // 2, False)):
        simulated = simulate(
            Links(machine, 4),
            MEGATRON,
            lambda rank, outputs=outputs: rest(
                linear_layers.column_gradients(rank, "x", 8, 16, outputs)
            ),
        )
        assert (simulated.seconds <= work(simulated) * (1 + 1e-9)) is hidden
    for without in 1, 2 * machine.npus_per_node:
        assert min_outputs_to_hide(machine, without) is None


@pytest.mark.parametrize("build", [linear_layers.column, linear_layers.row])
@pytest.mark.parametrize("topology", ["full_mesh", "switched"])
def test_a_kernel_of_mc2_is_one_launch(build: Callable[..., Any], topology: str) -> None:
    rank = Rank(Links(ideal(topology, hbm_bandwidth=4.0), 8), 0, MC2)  # type: ignore[arg-type]
    build(rank, "x", 4096, 4096, 3584)
    operations = rank.finish()
    assert sum(launched.launches for launched in operations) == 1
    # The weight is read and written.
    (layout,) = (work for work in operations if work.name == "x layout of the weight")
    assert layout.seconds == 2 * ITEM_BYTES * 4096 * 3584 / 4.0
