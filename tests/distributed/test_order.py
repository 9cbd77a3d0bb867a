"""What runs while transfers are under way: the order of work and waits, recorded on real ranks.

Timings on a shared machine prove nothing; the order in which work is done, sends are posted and
receives are waited for decides what can be hidden at all.
"""

from __future__ import annotations

import pytest
import torch

from commfuse_npu import Schedule, Transport
from commfuse_npu.ops import LinearOptions, all_gather_linear, linear_reduce_scatter
from commfuse_npu.ops import linear as module
from commfuse_npu.ops.weight_gradient import WeightGradient
from commfuse_npu.runtime.transport import Exchange
from tests.distributed.calls import watch_calls
from tests.limits import PATIENT


def recorded(
    rank: int, op: str, options: LinearOptions, batched: bool = False
) -> tuple[list[str], list[str]]:
    """Events of the forward and of the backward of one layer."""
    lanes = options.schedule.lanes
    link = Transport.create(lanes=lanes, timeout=PATIENT, batched=batched)
    column = op == "all_gather_linear"
    x = torch.ones(4 if column else 4 * link.size, 8, requires_grad=True)
    weight = torch.ones(8, 8, requires_grad=True)
    events: list[str] = []

    def note(word: str, exchange: object) -> None:
        part = f" {exchange.name.split()[-1]}" if isinstance(exchange, Exchange) else ""
        if not events or events[-1] != word + part or word != "wait":
            events.append(word + part)

    with pytest.MonkeyPatch.context() as patch:
        calls = (
            (Exchange, "send", "send"),
            (Exchange, "wait_receive", "wait"),
            (WeightGradient, "add", "wgrad"),
            (module, "gemm_into", "gemm"),
        )
        watch_calls(patch, calls, note)
        call = all_gather_linear if column else linear_reduce_scatter
        y = call(x, weight, transport=link, options=options)
        forward = list(events)
        events.clear()
        y.sum().backward()
    return forward, events


@pytest.mark.parametrize("size", [2, 3])
def test_column(ranks, size: int) -> None:
    options = LinearOptions(Schedule(chunks=1))
    for forward, backward in ranks(size).run(recorded, "all_gather_linear", options):
        # Everything that can be sent is on its way, then the own block is worked on.
        sends = forward.index("gemm")
        assert forward[:sends] == ["send all_gather_linear"] * (size - 1)
        assert forward.index("wait all_gather_linear") > sends
        # The input travels while dgrad blocks are made; each dgrad block leaves as it is made.
        assert backward[: size - 1] == ["send re-gather"] * (size - 1)
        first_wait = next(i for i, event in enumerate(backward) if event.startswith("wait"))
        made = [event for event in backward[size - 1 : first_wait] if event != "wait re-gather"]
        assert made == ["gemm", "send dgrad"] * (size - 1) + ["gemm"]
        # The weight gradient runs with the last dgrad transfers under way.
        wgrad = backward.index("wgrad")
        assert "wait dgrad" not in backward[:wgrad]
        assert "wait dgrad" in backward[wgrad:]
        assert "wait re-gather" in backward[:wgrad]


def test_column_in_batches(ranks) -> None:
    """On an in-order lane the re-gather and the dgrad blocks take turns: none holds the other."""
    options = LinearOptions(Schedule(lanes=1))
    for _, backward in ranks(4).run(recorded, "all_gather_linear", options, True):
        sends = [event for event in backward if event.startswith("send")]
        gather, dgrad = "send re-gather", "send dgrad"
        assert sends == [gather, gather, dgrad, gather, dgrad, dgrad]
        assert backward.index("wgrad") > max(
            i for i, event in enumerate(backward) if event == "wait re-gather"
        )


def test_column_on_a_ring(ranks) -> None:
    """What has to be passed on is passed on between dgrad blocks, not after them."""
    options = LinearOptions(Schedule("ring", lanes=1))
    for _, backward in ranks(4).run(recorded, "all_gather_linear", options):
        last_dgrad = max(i for i, event in enumerate(backward) if event == "gemm")
        passed_on = [i for i, event in enumerate(backward) if event == "send re-gather"]
        assert len(passed_on) == 3
        assert max(passed_on) < last_dgrad


@pytest.mark.parametrize("wgrad", ["whole", "blocks"])
def test_row(ranks, wgrad: str) -> None:
    options = LinearOptions(Schedule(chunks=1), wgrad=wgrad)
    for forward, backward in ranks(3).run(recorded, "linear_reduce_scatter", options):
        name = "linear_reduce_scatter"
        # Each partial leaves as it is made; nothing is waited for before the own one is.
        assert forward[:5] == ["gemm", f"send {name}", "gemm", f"send {name}", "gemm"]
        assert forward[5] == f"wait {name}"
        work = ["gemm", "wgrad"] if wgrad == "blocks" else ["gemm"]
        expected = ["send backward"] * 2 + work + (["wait backward", *work]) * 2
        assert backward[: len(expected)] == expected
        assert backward.count("wgrad") == (3 if wgrad == "blocks" else 1)


def _waits_between_dgrads(rank: int) -> list[str]:
    link = Transport.create(lanes=2, timeout=PATIENT)
    options = LinearOptions(Schedule(lanes=2, chunks=4))
    x = torch.ones(8, 8, requires_grad=True)
    weight = torch.ones(8, 8, requires_grad=True)
    y = all_gather_linear(x, weight, transport=link, options=options)
    events: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        calls = (
            (Exchange, "wait_send", "wait"),
            (module, "gemm_into", "dgrad"),
            (WeightGradient, "add", "wgrad"),
        )
        watch_calls(patch, calls, lambda word, _: events.append(word))
        y.sum().backward()
    return events


def test_dgrad_does_not_wait_for_links_that_are_busy_with_the_input(ranks) -> None:
    for events in ranks(3).run(_waits_between_dgrads):
        # Two peers with four chunks each, the own block: their sends queue behind the input's.
        assert events[:9] == ["dgrad"] * 9
        assert events.count("dgrad") == 9
        assert "wgrad" in events
