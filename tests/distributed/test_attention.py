"""Query-split attention: masks and planted faults, on gloo processes.

Bad input other than masks is asked in :mod:`tests.distributed.test_ulysses`, of all attention.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from commfuse_npu.ops import Documents
from commfuse_npu.ops.attention import attention_linear_reduce_scatter
from tests.attention_masks import MASKS
from tests.distributed.programs import correct, transport
from tests.distributed.ranks import on_ranks
from tests.random_networks.case import Network, one_layer
from tests.random_networks.compare import differences, run_case

OP = "attention_linear_reduce_scatter"
KEYS = {"MHA": 4, "GQA": 2, "MQA": 1}
"""Key heads of a rank, of 4 query heads."""


def attention(size: int, heads: str = "GQA", mask: str = "causal", **changes: object) -> Network:
    """Of four heads over 24 rows; blocks of ranks are cut into chunks of rows."""
    given = {"queries": 4, "keys": KEYS[heads], "mask": mask, "rows": 24 // size}
    return one_layer(OP, size, **given | changes)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_masks_and_heads(ranks, size: int) -> None:
    cases = [attention(size, *of) for of in product(KEYS, ("causal", "full"))]
    cases += [attention(size, *of) for of in product(("GQA", "MHA"), MASKS)]
    cases += [attention(size, dtype=torch.bfloat16, mask=mask) for mask in ("causal", *MASKS)]
    cases += [attention(size, "MHA", mask, batch=1, scale=0.3) for mask in MASKS]
    ranks(size).run(correct, cases)


@on_ranks(4)
def test_one_document_is_the_causal_mask(rank: int) -> None:
    """One document per sample is the causal mask, bit for bit."""
    found = [run_case(attention(4, mask=mask), "fused") for mask in ("causal", "one document")]
    assert not differences(*found)


def heads() -> list[torch.Tensor]:
    """q, k, v and the weight of a rank."""
    return [torch.ones(24, 2, count, 16) for count in (4, 2, 2)] + [torch.ones(32, 64)]


@on_ranks(2)
def test_masks_that_do_not_fit_are_refused(rank: int) -> None:
    tensors = heads()
    hidden = torch.zeros(2, 1, 24, 24, dtype=torch.bool)
    for mask, words in (
        ({"causal": True, "documents": Documents([24], 24)}, "documents of 1 samples of 24 are"),
        ({"causal": False, "documents": Documents([24, 48], 24, 2)}, "documents are causal"),
        (
            {"causal": True, "documents": Documents([24, 48], 24, 2), "hidden": hidden},
            "have no other mask",
        ),
        ({"causal": True, "hidden": hidden[:, 0]}, r"hidden is torch.bool \(2, 24, 24\) on cpu"),
        ({"causal": True, "hidden": hidden.float()}, r"hidden is torch.float32 \(2, 1, 24, 24\)"),
    ):
        with pytest.raises(ValueError, match=words):
            attention_linear_reduce_scatter(*tensors, **mask, transport=transport())
    correct(rank, [attention(2)])
