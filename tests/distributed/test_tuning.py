"""Online tuning of schedules: all ranks choose the same one, and results stay correct."""

from pathlib import Path
from typing import Any

import pytest
import torch

from commfuse_npu import Schedule, Transport
from commfuse_npu.ops import LinearOptions, all_gather_linear, linear_reduce_scatter, tuning
from commfuse_npu.ops.call import AnyTransport
from commfuse_npu.ops.tuning import Tuning, decisions
from commfuse_npu.runtime.collective_transport import CollectiveTransport
from tests.distributed.programs import new_link
from tests.distributed.ranks import on_ranks
from tests.random_networks.values import round_once

ROWS, INPUTS, OUTPUTS = 64, 32, 48


def _layer(
    transport: AnyTransport, op: Any, schedule: Schedule, tuning: Tuning | None = None
) -> list[torch.Tensor]:
    """Output and gradients of a layer."""
    generator = torch.Generator().manual_seed(transport.rank)
    rows = ROWS if op is all_gather_linear else ROWS * transport.size
    # A part of the columns of a wider tensor: not contiguous.
    x = torch.randn(rows, 2 * INPUTS, generator=generator)[:, :INPUTS].requires_grad_()
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator).requires_grad_()
    with round_once():
        y = op(x, weight, group=transport, options=LinearOptions(schedule, tuning=tuning))
        return [y.detach(), *torch.autograd.grad(y, [x, weight], torch.ones_like(y))]


def _tuned(
    link: Transport, op: Any, wanted: dict[str, int | None], folder: str | None = None
) -> tuple[list[torch.Tensor], list[Schedule | None], int]:
    """A layer whose halves are fastest with ``wanted`` chunks; rank 1 finds one chunk fast, too."""
    tried = 0

    def timed(transport: Transport, name: str, call: Any) -> float:
        nonlocal tried
        tried += 1
        half, schedule = call.args
        results = call()
        assert half == "forward" or all(grad is not None for grad in results[:2])
        chunks = schedule and schedule.chunks
        # The slowest rank counts: a schedule that is fast on rank 1 alone is not chosen.
        return 1.0 if chunks == wanted[half] else 2.0 if link.rank == 1 and chunks == 1 else 3.0

    decisions(link).clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "_timed", timed)
        tensors = _layer(link, op, Schedule(), Tuning(folder))
        before = tried
        assert all(map(torch.equal, tensors, _layer(link, op, Schedule(), Tuning())))
    assert tried == before, "asked once"
    return tensors, [*decisions(link).values()], tried


@pytest.mark.parametrize("op", [all_gather_linear, linear_reduce_scatter])
@on_ranks(3)
def test_each_half_takes_what_is_fastest_and_computes_the_same(rank: int, op: Any) -> None:
    link = new_link(lanes=1)  # fewer than the default schedule's two
    for wanted in ((None, None), (4, 4), (4, None), (None, 4)):
        chunks = dict(zip(("forward", "backward"), wanted, strict=True))
        tensors, decided, _ = _tuned(link, op, chunks)
        assert [schedule and schedule.chunks for schedule in decided] == [*wanted]
        assert link.share("decided", decided) == [decided] * 3
        reference = _layer(CollectiveTransport(link.group), op, Schedule())
        assert all(map(torch.equal, tensors, reference)), wanted


@on_ranks(2)
def test_what_was_found_is_kept_for_the_next_run(rank: int, tmp_path: Path) -> None:
    """Rank 1 names another folder; the folder of rank 0 is used."""
    link, folder = new_link(), tmp_path / str(rank)
    chunks = {"forward": 2, "backward": 2}
    for tries in (True, False):
        _, decided, tried = _tuned(link, all_gather_linear, chunks, str(folder))
        assert [schedule and schedule.chunks for schedule in decided] == [2, 2]
        assert (tried > 0) == tries
    assert folder.exists() == (rank == 0)
