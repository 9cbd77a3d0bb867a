"""The cost of work, of buffers and of transfers beside work, checked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commfuse_npu.hardware.machine import Level, Machine, min_outputs_to_hide
from commfuse_npu.tools.simulate.group import Group
from commfuse_npu.tools.simulate.linear import column, column_gradients
from commfuse_npu.tools.simulate.rank import Rank, rest
from commfuse_npu.tools.simulate.variants import REFERENCE, Variant
from tests.tools.simulate.machines import IDEAL, ideal
from tests.tools.simulate.test_closed_forms import fused
from tests.tools.simulate.timeline_checks import work

ROUND = 2.0 * 4 * 128 * 256 * 64
"""FLOP of a round of tiles on 4 cores, 64 deep."""
CORES = replace(IDEAL, cores=4)


@pytest.mark.parametrize(
    ("rows", "outer", "rounds"),
    [(128, 256, 1), (1, 1, 1), (512, 256, 1), (513, 256, 2), (256, 512, 1), (256, 513, 2)],
)
def test_gemms_are_whole_rounds_of_tiles(rows: int, outer: int, rounds: int) -> None:
    assert CORES.gemm(rows, 64, outer) == rounds * ROUND
    machine = replace(CORES, gemm_start=3.0)
    assert machine.gemm(rows, 64, outer) == 3 + rounds * ROUND
    assert machine.gemm(0, 64, outer) == 0


def gathered(machine: Machine, *, steady: bool = False) -> float:
    """Two ranks: the own block's GEMM beside the transfer, then the other's."""

    def build(rank: Rank) -> None:
        column(rank, "x", 8, 8, 8)

    return Group(machine, 2).simulate(fused(1), build, steady=steady).seconds


def test_a_transfer_is_slower_beside_work() -> None:
    """128 bytes at 2 bytes/s beside 32 seconds of work: of them 16 at half of the rate."""
    machine = ideal(rate=2.0, cube_flops=2.0 * 8 * 8 * 8 / 32)
    assert gathered(machine) == 64 + 32
    slower = replace(machine, inside=Level("full_mesh", 2.0, 0.0, beside_work=2.0))
    assert gathered(slower) == 32 + (64 - 16) + 32


def test_buffers_at_both_ends_of_a_batch_and_none_of_a_collective() -> None:
    """A copy reads and writes: 4 bytes of traffic per byte of a message, over both ends."""
    machine = ideal(hbm_bandwidth=4.0, cube_flops=1e30)
    copied = replace(machine, message_copies=1.0)
    assert gathered(copied) == pytest.approx(gathered(machine) + 4 * 128 / 4)

    def build(rank: Rank) -> None:
        rank.need(rank.collective("x", 64.0))

    plain = [Group(m, 2).simulate(REFERENCE, build).seconds for m in (machine, copied)]
    assert plain[0] == plain[1]


def test_a_collective_is_a_launch_and_four_events_and_a_batch_a_post() -> None:
    machine = ideal(launch_overhead=1.0, post_overhead=10.0, event_overhead=100.0)

    def host(variant: Variant) -> float:
        simulated = Group(machine, 2).simulate(
            variant, lambda rank: column(rank, "x", 8, 8, 8), steady=True
        )
        return simulated.host(machine)

    assert host(REFERENCE) == 1 + 400 + 1
    assert host(fused(1)) == 10 + 2 * 1


def test_a_host_that_runs_on_is_ahead_or_is_what_limits() -> None:
    machine = ideal(launch_overhead=1.0)
    # One post, two GEMMs; the second follows the transfer.
    assert gathered(machine) > gathered(machine, steady=True) == gathered(ideal(), steady=True)
    assert gathered(ideal(launch_overhead=1e6, post_overhead=4e6), steady=True) == 6e6


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("topology", ["full_mesh", "switched"])
def test_from_so_many_outputs_on_nothing_is_left_to_hide(topology: str, size: int) -> None:
    machine = replace(IDEAL, inside=Level(topology, 10.0, 0.0), cube_flops=1e6)  # type: ignore[arg-type]
    least = min_outputs_to_hide(machine, size)
    assert least is not None

    def waits(outputs: int) -> float:
        def build(rank: Rank) -> None:
            rest(column_gradients(rank, "x", 8, 16, outputs))

        simulated = Group(machine, size).simulate(Variant("megatron", "megatron"), build)
        return simulated.seconds - work(simulated)

    assert waits(least) == pytest.approx(0.0, abs=1e-9)
    assert waits(least // 2) > 0
    for without in 1, 2 * machine.npus_per_node:
        assert min_outputs_to_hide(machine, without) is None


def test_cocs_kernel_hides_a_share_of_the_shorter_of_gemm_and_transfer() -> None:
    shares = {"coc_fused_hidden": 0.9, "coc_fused_hidden_gemm": 0.8, "coc_fused_efficiency": 0.5}
    machine = ideal("switched", latency=1.0, **shares)
    transfer = 1 + 2 * (4 - 1) * 10
    assert machine.coc_kernel(100.0, 10.0, 4) == pytest.approx(100 + transfer * 0.1)
    assert machine.coc_kernel(50.0, 10.0, 4) == pytest.approx(50 * 0.2 + transfer)
