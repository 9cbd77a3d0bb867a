"""Orders that hang HCCL are reported, with who waits for whom; those that do not hang pass.

The table of orders comes from a model of HCCL's rules; nothing of this was run on an NPU.
"""

from __future__ import annotations

import pytest

from tests.emulator import planted
from tests.emulator.settings import Settings

ALIASED = Settings(streams=1)


@pytest.mark.parametrize(
    ("program", "size", "warm", "cycle", "words"),
    [
        # Opening the communicators of the pairs: each host waits for the next one.
        ("ring_all_send_first", 3, False, "0 -> 1 -> 2 -> 0", "opens the pair communicator"),
        # A send waits for its receive, which is posted after a send that waits.
        ("ring_blocking_sends", 3, True, "0 -> 1 -> 2 -> 0", "has not posted the receive"),
        # Both directions of a pair share a stream.
        ("ring_all_send_first", 2, True, "0 -> 1 -> 0", "queued that behind its send"),
        ("shifted_send_then_receive", 3, False, "0 -> 1 -> 2 -> 0", "opens the pair"),
        ("shifted_send_then_receive", 4, False, "0 -> 1 -> 2 -> 3 -> 0", "opens the pair"),
        ("shifted_send_then_receive", 4, True, "0 -> 2 -> 0", "queued that behind its send"),
        ("even_odd_over_two_groups", 3, False, "0 -> 2 -> 0", "opens the pair communicator"),
        ("receives_first", 3, False, "0 -> 2 -> 1 -> 0", "opens the pair communicator"),
        ("receives_first", 2, True, "0 -> 1 -> 0", "queued that behind its receive"),
        ("batch_and_collective", 3, True, "0 -> 1 -> 0", "queued that behind its all_reduce"),
    ],
)
def test_a_cycle_is_named(
    emulated, program: str, size: int, warm: bool, cycle: str, words: str
) -> None:
    reports = emulated(size).outcomes(planted.told, getattr(planted, program), warm)
    first = reports[0].value
    assert first.startswith(f"DeadlockError: deadlock: a cycle of ranks {cycle}\n")
    assert words in first
    for report in reports:
        assert report.value.startswith("DeadlockError: "), report.value


def test_a_cycle_is_told_in_full(emulated) -> None:
    report = emulated(2).outcomes(planted.told, planted.ring_all_send_first, True)[0].value
    lines = report.split("\n")[1:]
    pair = "on the pair communicator of ranks 0 and 1"
    assert lines == [
        f"- rank 0 has to send 4 x float32 to rank 1 {pair}, but rank 1 has queued that behind its "
        f"send 4 x float32 to rank 0 {pair}",
        f"- rank 1 has to send 4 x float32 to rank 0 {pair}, but rank 0 has queued that behind its "
        f"send 4 x float32 to rank 1 {pair}",
    ]


@pytest.mark.parametrize("streams", [None, 1, 2])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("program", ["in_one_order", "batch_per_step"])
def test_one_order_passes(emulated, program: str, size: int, streams: int | None) -> None:
    """Cold and warm, with streams of their own and with shared ones."""
    settings = Settings(streams=streams, max_delay=0.001)
    for warm in (False, True):
        found = emulated(size, settings).run(planted.told, getattr(planted, program), warm)
        assert found == [""] * size


@pytest.mark.parametrize(
    ("program", "size", "warm"),
    [
        ("even_odd", 2, False),
        ("even_odd", 3, False),
        ("even_odd", 4, False),
        ("even_odd_over_two_groups", 2, False),
        ("even_odd_over_two_groups", 4, False),
        ("ring_all_send_first", 3, True),
        ("shifted_send_then_receive", 3, True),
    ],
)
def test_what_the_rules_let_through(emulated, program: str, size: int, warm: bool) -> None:
    assert emulated(size).run(planted.told, getattr(planted, program), warm) == [""] * size


def test_pairs_on_one_stream_wait_for_each_other(emulated) -> None:
    """The ring that passes on streams of its own (above) hangs when its pairs share one."""
    found = emulated(3, ALIASED).outcomes(planted.told, planted.ring_all_send_first, True)
    assert "a cycle of ranks 0 -> 1 -> 2 -> 0" in found[0].value
    assert "queued that behind its send" in found[0].value
