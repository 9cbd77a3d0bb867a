"""Fused layers on gloo processes: rounding, buffers, and what is posted when.

Their results are compared in :mod:`tests.random_networks`.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from commfuse_npu.ops import LinearOptions, all_gather_linear, linear_reduce_scatter
from commfuse_npu.ops.call import AnyTransport, WeightGradient
from commfuse_npu.plan import Schedule
from commfuse_npu.plan.rules import sharded_backward
from commfuse_npu.plan.schedule import RankSpec
from commfuse_npu.runtime.collective_transport import CollectiveTransport
from commfuse_npu.runtime.executor import Running
from commfuse_npu.runtime.transport import Transport
from tests.distributed.programs import new_link, transport, watch_calls, watch_posts
from tests.distributed.ranks import on_ranks
from tests.random_networks.case import Layer, Network, one_layer
from tests.random_networks.compare import run_case
from tests.random_networks.network_run import Call, input_of
from tests.random_networks.values import round_once

COLUMN, ROW = "all_gather_linear backward", "linear_reduce_scatter backward"
USUAL = LinearOptions(Schedule(chunks=2))
OUT = "micro-batch 0, layer 0 y"

# ------------------------------------------------------------------------- rounding


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("linear_all_to_all", "micro-batch 0, layer 0 x.grad"),
        ("linear_all_to_all", "layer 0 bias.grad"),
        ("all_to_all_linear", OUT),
    ],
)
@on_ranks(3)
def test_sums_over_ranks_are_rounded_once(rank: int, op: str, name: str) -> None:
    """Results summed in fp32 over ranks or chunks whose inputs were not rounded before."""
    case = one_layer(op, 3, dtype=torch.bfloat16)
    ours, exact = (run_case(case, form)[name] for form in ("fused", "exact"))
    half = torch.finfo(case.dtype).eps / 2 * exact.abs()
    assert ((ours - exact).abs() <= half + 1e-5 * exact.abs().max()).all(), case


# -------------------------------------------------------------------------- buffers


@on_ranks(2)
def test_training_after_inference(rank: int) -> None:
    """Buffers that were allocated in inference mode can be used by a later training."""
    link, x, weight = new_link(), torch.ones(4, 32), torch.ones(32, 32, requires_grad=True)
    for _ in range(2):
        with torch.inference_mode():
            linear_reduce_scatter(x, weight, transport=link)
        linear_reduce_scatter(x, weight, transport=link).sum().backward()


@pytest.mark.parametrize("batched", [False, True])
def test_the_whole_weight_exists_nowhere(batched: bool) -> None:
    """Of 64 blocks of 128 rows, memory holds two, or one piece more than there are lanes."""
    for schedule, arriving, leaving in (
        (Schedule(lanes=1), 256, 256),
        (Schedule(lanes=1, chunks=4), 256, 256),
        (Schedule(lanes=5), 6 * 128, 6 * 128),
        # Chunks of 80, 32 and 16 rows, in two stacks of two pieces.
        (Schedule(lanes=2, chunks=3, taper=2.0), 3 * 80, 4 * 80),
    ):
        program = sharded_backward(RankSpec(schedule, 5, 64, batched), 128, 16, True, True)
        slots = Counter[str]()
        for buffer in program.scratch:
            slots |= Counter({buffer.slot: buffer.rows})
        rows = Counter[str]()
        for slot, length in slots.items():
            rows[slot.split()[0]] += length
        made = {"made": leaving, "partials": leaving, "own": 128, "total": 128}
        assert rows == {"arriving": arriving, **made}


# ------------------------------------------------------------------------ transfers


@on_ranks(2)
def test_frozen_weights_and_inputs_without_gradient_transfer_nothing(rank: int) -> None:
    """The kinds of pieces that the backward of a sharded layer sends."""
    pieces = []
    for x_grad, weight_grad in ((True, True), (True, False), (False, True), (False, False)):
        case = one_layer("sharded_linear", 2, x_grad=x_grad, weight_grad=weight_grad)
        y, posts = Call(case)(input_of(case)), list[Any]()
        with pytest.MonkeyPatch.context() as patch:
            watch_posts(patch, lambda _, post, posts=posts: posts.append(post))
            y.backward(torch.ones_like(y))
        pieces.append({post.send.transfer.piece.split()[0] for post in posts if post.send})
    assert pieces == [{"block", "partial"}, {"block"}, {"partial"}, set()]


def leaves(rank: int) -> list[torch.Tensor]:
    """``x [s, H]`` and the weights of two pairs of layers."""
    generator = torch.Generator().manual_seed(rank)
    shapes = (8, 32), (64, 32), (32, 64), (64, 32), (32, 64)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def two_pairs(
    given: list[torch.Tensor], transport: AnyTransport, options: LinearOptions = USUAL
) -> torch.Tensor:
    x, how = given[0], {"transport": transport, "options": options}
    for first, second in (given[1:3], given[3:]):
        x = x + linear_reduce_scatter(torch.tanh(all_gather_linear(x, first, **how)), second, **how)
    return x


@on_ranks(3)
def test_a_gather_begins_before_the_weight_gradient_of_the_layer_after(rank: int) -> None:
    """Programs that begin, posts ahead and weight gradients, in order."""
    wgrads, events = ["wgrad of 64 inputs", "wgrad of 32 inputs"], list[str]()

    def begun(link: Transport, program: object, name: str, *_: object) -> None:
        events.append(f"begin {name}")

    def ran(running: Running, *_: object, ahead: bool = False, **__: object) -> None:
        events.extend([f"ahead {running.name}"] * ahead)

    def added(gradient: WeightGradient, grad: torch.Tensor, x: torch.Tensor) -> None:
        events.append(f"wgrad of {x.shape[1]} inputs")

    for options, expected in (
        (USUAL, [f"begin {ROW}", f"begin {COLUMN}", f"ahead {COLUMN}", *wgrads]),
        # A column-parallel backward by collectives has nothing to send ahead.
        (replace(USUAL, collectives_from=64), [f"begin {ROW}", *wgrads]),
        # With blocks: before the last of them.
        (
            replace(USUAL, wgrad="blocks"),
            [f"begin {ROW}", *wgrads[:1] * 2, f"begin {COLUMN}", f"ahead {COLUMN}", *wgrads],
        ),
    ):
        y = two_pairs(leaves(rank), transport(), options)
        events.clear()
        with pytest.MonkeyPatch.context() as patch:
            watch_calls(patch, Transport, "begin", begun)
            watch_calls(patch, Running, "run", ran)
            watch_calls(patch, WeightGradient, "add", added)
            y.sum().backward()
        assert events == expected * 2


@on_ranks(2)
def test_a_pair_has_one_row_parallel_layer(rank: int) -> None:
    """The second one after a column-parallel layer gathers nothing early."""
    begun, row = list[str](), "linear_reduce_scatter"
    layers = tuple(Layer(op, 32, 32) for op in ("all_gather_linear", row, row))
    with pytest.MonkeyPatch.context() as patch:
        watch_calls(patch, Transport, "begin", lambda _, __, name, *more: begun.append(name))
        run_case(Network(2, layers, rows=8), "fused")
    assert begun[len(layers) :] == [ROW, ROW, COLUMN]


@on_ranks(3)
def test_a_pruned_backward(rank: int) -> None:
    """Only the last weight's gradient is requested: a gather is begun and never used."""
    link, plain = transport(), CollectiveTransport(transport().group)
    for wanted in (slice(-1, None), slice(-1, None), slice(None)):
        tensors = leaves(rank)
        with round_once():
            ours, reference = (
                torch.autograd.grad(two_pairs(tensors, carrier).sum(), tensors[wanted])
                for carrier in (link, plain)
            )
        assert all(map(torch.equal, ours, reference))
        assert (link.scratch.lent > 0) == (wanted != slice(None)), "its input is under way"
