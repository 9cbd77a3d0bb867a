"""What the page about Python shows runs as it stands there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_npu import Transport

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def snippet(word: str) -> str:
    """The code block with this word in it."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    (found,) = [block for block in blocks if word in block]
    return str(found)


def linears() -> dict[str, Any]:
    return {
        "tensor_parallel_group": dist.group.WORLD,
        "x": torch.ones(4, 1, 8, requires_grad=True),
        "up_weight": torch.ones(8, 8, requires_grad=True),
        "down_weight": torch.ones(8, 8, requires_grad=True),
        "activation": torch.relu,
    }


def model() -> dict[str, Any]:
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    return {
        "torch": torch,
        "model": layers,
        "batches": [torch.ones(3, 8)] * 2,
        "loss": lambda made, batch: made(batch).square().sum(),
    }


def run(rank: int, word: str, before: str | None, folder: str) -> None:
    # What is written goes into the working directory, as it would for a user.
    os.chdir(folder)
    names: dict[str, Any] = {"dist": dist, "Path": Path, "Transport": Transport, **linears()}
    names |= model() if word == "AdamW" else {}
    if before is not None:
        exec(snippet(before), names)
    names |= {"rows": 4, "columns": 8, "shard": torch.ones(4, 8)}
    exec(snippet(word), names)
    if word == "trace.json" and rank == 0:
        assert Path("trace.json").exists()
    names["transport"].close()


@pytest.mark.parametrize(
    ("word", "before"),
    [
        ("linear_reduce_scatter(", None),
        ("rules.gather_use", "linear_reduce_scatter("),
        ("AdamW", None),
        ("OrderLog", None),
        ("trace.json", "linear_reduce_scatter("),
    ],
)
def test_the_page_runs(ranks: Any, tmp_path: Path, word: str, before: str | None) -> None:
    ranks(2).run(run, word, before, str(tmp_path))
