"""Attention whose keys and values circulate in a ring, in closed form."""

from __future__ import annotations

import pytest

from commfuse_npu.hardware.machine import ITEM_BYTES
from commfuse_npu.tools.simulate.context_parallel import ContextParallel
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.variants import COMPUTE_ONLY, REFERENCE
from tests.tools.simulate.machines import ideal

BLOCK, KEY_VALUE = 120, 16


@pytest.mark.parametrize("speed", [1e3, 1e5])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_round_takes_the_longer_of_its_attention_and_its_transfer(
    ranks: int, speed: float
) -> None:
    shape = LayerShape(
        sequence=BLOCK, attended=ranks * BLOCK, batch=1, hidden=64, feed_forward=128, qkv=96,
        vocabulary=100, ranks=1,
    )  # fmt: skip
    machine = ideal(cube_flops=speed)
    ring = ContextParallel(shape, ranks, KEY_VALUE, 64, ulysses=False, fuses=False)
    attended, alone = ring.attended(machine, REFERENCE), ring.attended(machine, COMPUTE_ONLY)
    assert attended is not None
    assert alone is not None
    # Keys and values go around; backward, their gradients as well.
    for half, free, passed in zip(attended, alone, (1, 2), strict=True):
        transfer = passed * 2 * BLOCK * KEY_VALUE * ITEM_BYTES
        attention = free.seconds / ranks
        # Nothing is sent during the attention over the last block.
        assert half.seconds == pytest.approx((ranks - 1) * max(attention, transfer) + attention)
    assert alone[1].seconds > alone[0].seconds
