"""Which sequences flow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mindspeed_patches.flow import FlowWrappers

RANKS, CHUNKS = 4, 2


@pytest.mark.parametrize(
    ("min_rows", "batch", "rows", "reason"),
    [
        (0, 1, 8, ""),
        (0, 1, 12, "a sequence of 12 cannot be cut into 2 chunks for 4 ranks"),
        # A block has the rows of all sequences of a micro-batch.
        (16, 1, 64, ""),
        (16, 2, 32, ""),
        (16, 1, 56, "a block has fewer rows than the 16 of --commfuse-min-rows"),
    ],
)
@pytest.mark.parametrize("later_stage", [False, True])
def test_a_sequence_flows_if_it_divides_and_is_long_enough(
    min_rows: int, batch: int, rows: int, reason: str, later_stage: bool
) -> None:
    left: list[tuple[str, str]] = []
    linears = SimpleNamespace(
        lanes=lambda: SimpleNamespace(size=RANKS), leave=lambda *of: left.append(of)
    )
    wrappers = FlowWrappers(cast(Any, linears), CHUNKS, min_rows=min_rows)
    labels = torch.arange(batch * rows).view(batch, rows)
    # What the stage before sent: this rank's rows.
    shape = torch.empty(rows // RANKS, batch, 3)
    model = SimpleNamespace(
        training=True, post_process=True, decoder=SimpleNamespace(input_tensor=shape)
    )
    seen: list[torch.Tensor] = []

    def forward(model: Any, input_ids: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor:
        seen.append(labels)
        return labels

    ids = None if later_stage else labels
    found = wrappers.gpt_forward_wrapper(forward)(model, ids, labels)
    assert torch.equal(found, labels)
    assert torch.equal(seen[0], labels) == bool(reason)
    assert left == ([("flow", reason)] if reason else [])
