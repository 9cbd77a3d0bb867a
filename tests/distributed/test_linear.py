"""Fused linear layers on gloo processes: views that are copies, and reuse of buffers."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from commfuse_npu.ops import linear
from commfuse_npu.plan import Schedule
from commfuse_npu.runtime.transport import Transport
from tests.distributed.programs import correct, transport
from tests.distributed.ranks import on_ranks
from tests.limits import PATIENT
from tests.random_networks.case import one_layer
from tests.random_networks.network_run import Call, input_of


@on_ranks(4)
def test_views_may_be_copies(rank: int) -> None:
    """MindSpeed patches ``Tensor.view`` to copy tensors that are not contiguous."""
    view, ops = torch.Tensor.view, ("all_gather_linear", "linear_reduce_scatter")
    for op, shape in product((*ops, "linear_all_reduce"), ("shifted", "collective")):
        case = one_layer(op, 4, wgrad="blocks", schedule=Schedule(shape, chunks=3))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "view", lambda x, *shape: view(x.contiguous(), *shape))
            correct(rank, [case])


@on_ranks(2)
def test_training_after_inference(rank: int) -> None:
    """Buffers that were allocated in inference mode can be used by a later training."""
    link = Transport.create(timeout=PATIENT)
    x, weight = torch.ones(4, 32), torch.ones(32, 32, requires_grad=True)
    for _ in range(2):
        with torch.inference_mode():
            linear.linear_reduce_scatter(x, weight, transport=link)
        linear.linear_reduce_scatter(x, weight, transport=link).sum().backward()


@on_ranks(3)
def test_buffers_are_used_again(rank: int) -> None:
    link, case = transport(), one_layer("all_gather_linear", transport().size)

    def several() -> int:
        for _ in range(3):
            y = Call(case, link=link)(input_of(case, link=link))
            y.backward(torch.ones_like(y))
        return link.scratch.idle_bytes

    idle = several()
    assert several() == idle, "buffers are not used again"
    assert not link._in_flight
