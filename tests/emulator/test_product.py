"""The product on an emulated HCCL: nothing hangs, and the bits are those of the plain collectives.

Every schedule runs forward and backward, posted in batches, with receive buffers that hold NaN
until they are waited for, send buffers that are read at the wait, and transfers that take a random
time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import product
from typing import Any

import pytest
import torch

from commfuse_npu.ops import LinearOptions, linear
from commfuse_npu.plan import Schedule
from commfuse_npu.reference import linear as plain_linear
from commfuse_npu.runtime.transport import Transport
from tests.distributed import test_attention, test_ulysses
from tests.distributed.test_linear import COLUMN, FULL, ROW, Case, inputs, run
from tests.emulator.settings import Settings
from tests.limits import PATIENT


@lru_cache
def transport(size: int) -> Transport:
    """With as many lanes as there are peers."""
    return Transport.create(lanes=size - 1, timeout=PATIENT, batched=True)


def schedules(size: int) -> Iterator[Schedule]:
    """All of them up to 4 ranks, a few for more."""
    if size <= 4:
        for lanes, chunks in product(range(1, size), (1, 2, 4)):
            yield Schedule("shifted", lanes, chunks)
    else:
        yield Schedule("shifted", size - 1, 1)
        yield Schedule("shifted", 2, 2)
    if size % 2 == 0:
        yield Schedule("two_level", size - 1, 2, node_size=2)


def linears(rank: int, size: int, chosen: list[Schedule], dtype: torch.dtype) -> None:
    link = transport(size)
    for schedule, op in product(chosen, (COLUMN, ROW, FULL)):
        options = LinearOptions(schedule)
        # Two levels add in an order of their own: whole numbers, which are not rounded.
        whole = schedule.shape == "two_level"
        case = Case(op, shape=(4 * size, 32), dtype=dtype, options=options, ones=whole)
        fused = partial(getattr(linear, op), transport=link, options=options)
        plain = partial(
            getattr(plain_linear, f"plain_{op}"), group=link.group, options=options, same_gemms=True
        )
        ours = run(case, inputs(rank, size, case), fused)
        reference = run(case, inputs(rank, size, case), plain)
        assert ours.keys() == reference.keys()
        for name, value in reference.items():
            assert torch.equal(ours[name], value), (case, name)
    assert not link._in_flight


@pytest.mark.parametrize("size", range(2, 9))
def test_linears(emulated: Any, size: int) -> None:
    settings = Settings(max_delay=0.0005, seed=size)
    ranks = emulated(size, settings)
    ranks.run(linears, size, list(schedules(size)), torch.float32)


def test_linears_in_bf16_on_shared_streams(emulated: Any) -> None:
    """Lanes that are not side by side after all, as when a pool of streams is used up."""
    ranks = emulated(4, Settings(max_delay=0.0005, streams=2))
    ranks.run(linears, 4, list(schedules(4))[::3], torch.bfloat16)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_attention_and_its_projection(emulated: Any, size: int) -> None:
    cases = [
        test_attention.Case(heads, options=LinearOptions(Schedule(shape, lanes, chunks)))
        for heads, shape, lanes, chunks in (
            ("GQA", "shifted", 1, 1),
            ("MHA", "shifted", 3, 2),
            ("MQA", "shifted", 2, 2),
        )
    ]
    emulated(size, Settings(max_delay=0.0005)).run(test_attention.compared, cases)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ulysses_layers(emulated: Any, size: int) -> None:
    cases = [
        test_ulysses.Case(op, options=LinearOptions(Schedule(shape, lanes, chunks)))
        for op, shape, lanes, chunks in (
            ("a-bc", "shifted", 2, 2),
            ("a-b-c", "shifted", 3, 1),
            ("a-bc", "shifted", 1, 2),
        )
    ]
    emulated(size, Settings(max_delay=0.0005)).run(test_ulysses.compared, cases)


def closed_and_made_again(rank: int) -> None:
    for _ in range(2):
        link = Transport.create(lanes=2, timeout=PATIENT)
        case = Case(ROW, shape=(8, 32), options=LinearOptions(Schedule(lanes=2)))
        call = partial(linear.linear_reduce_scatter, transport=link, options=case.options)
        run(case, inputs(rank, link.size, case), call)
        link.close()


def test_lanes_given_up_and_made_again(emulated: Any) -> None:
    emulated(2).run(closed_and_made_again)
