"""The fully sharded linear layer against its plain form and against one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from commfuse_npu import MismatchError, TransportError
from commfuse_npu.ops import ShardedOptions, sharded_linear
from commfuse_npu.plan import Schedule
from commfuse_npu.plan.rules import sharded_backward
from commfuse_npu.plan.schedule import Place
from commfuse_npu.runtime.collective_transport import CollectiveTransport
from commfuse_npu.runtime.executor import Running
from commfuse_npu.runtime.transport import Transport
from tests.distributed.calls import watch_calls
from tests.distributed.programs import watch_posts
from tests.limits import BRIEF, PATIENT

# The package exports the function of this name.
module = import_module("commfuse_npu.ops.sharded_linear")


@lru_cache
def transport(batched: bool = False) -> Transport:
    return Transport.create(lanes=3, timeout=PATIENT, batched=batched)


@dataclass(frozen=True)
class Case:
    """One call, and everything about its inputs."""

    # Rows of I and of the blocks of W are multiples of 64 bytes in every dtype.
    shape: tuple[int, ...] = (6, 2, 32)
    features: int = 96
    dtype: torch.dtype = torch.float32
    options: ShardedOptions = ShardedOptions()
    bias: bool = True
    x_grad: bool = True
    weight_grad: bool = True
    strided: bool = False
    recompute: bool = False
    ones: bool = False
    batched: bool = False
    other_rows: bool = False


def draw(seed: int, shape: tuple[int, ...], case: Case) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if case.ones:
        return torch.randint(0, 2, shape, generator=generator).to(case.dtype)
    return torch.randn(shape, generator=generator).to(case.dtype)


@dataclass
class Inputs:
    x: torch.Tensor
    whole: torch.Tensor
    shard: torch.Tensor
    bias: torch.Tensor | None
    grad: torch.Tensor


def inputs(rank: int, size: int, case: Case) -> Inputs:
    """A part of the batch of its own for every rank, and its rows of the common weight."""
    length, *rest, features = case.shape
    if case.other_rows:
        length += 3 * rank - 3 if rank else -length  # none at all on rank 0
    x = draw(10 + rank, (length, *rest, features), case)
    grad = draw(20 + rank, (length, *rest, case.features), case)
    if case.strided:
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
        grad = grad.transpose(0, -1).contiguous().transpose(0, -1)
    whole = draw(30, (case.features, features), case)
    shard = whole.chunk(size)[rank].clone().requires_grad_(case.weight_grad)
    bias = draw(40, (case.features,), case) if case.bias else None
    if bias is not None:
        bias.requires_grad_(case.weight_grad)
    return Inputs(x.requires_grad_(case.x_grad), whole, shard, bias, grad)


def run(case: Case, given: Inputs, how: str) -> dict[str, torch.Tensor]:
    """Forward and backward: everything that comes out."""
    link: Any = transport(case.batched)
    if how != "fused":
        link = CollectiveTransport(link.group, same_pieces=how == "same_pieces")

    def forward(x: torch.Tensor) -> torch.Tensor:
        return sharded_linear(x * 1, given.shard, given.bias, transport=link, options=case.options)

    y = checkpoint(forward, given.x, use_reentrant=False) if case.recompute else forward(given.x)
    found = {"y": y.detach()}
    if y.requires_grad:
        y.backward(given.grad)
    for name, tensor in (("x", given.x), ("weight", given.shard), ("bias", given.bias)):
        if tensor is not None and tensor.grad is not None:
            found[f"{name}.grad"] = tensor.grad
    return found


def single(rank: int, size: int, case: Case) -> dict[str, torch.Tensor]:
    """What one process computes in fp64 from the batches of all ranks, with one torch.nn.Linear."""
    every = [inputs(r, size, replace(case, strided=False)) for r in range(size)]
    features = case.shape[-1]
    linear = torch.nn.Linear(features, case.features, bias=case.bias, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(every[0].whole)
        if linear.bias is not None:
            linear.bias.copy_(every[0].bias)
    xs = [given.x.detach().double().requires_grad_() for given in every]
    batch = linear(torch.cat([x.reshape(-1, features) for x in xs]))
    grads = [given.grad.double().reshape(-1, case.features) for given in every]
    batch.backward(torch.cat(grads))
    rows = [len(grad) for grad in grads]
    own = grads[rank]
    divisor = size if case.options.average else 1
    return {
        "y": batch.detach().split(rows)[rank].view(*every[rank].x.shape[:-1], case.features),
        "x.grad": xs[rank].grad,
        "weight.grad": linear.weight.grad.chunk(size)[rank] / divisor,
        "bias.grad": own.sum(0),
    }


def variants() -> list[Case]:
    """Every option at least once, most of them crossed with the dtypes."""
    base = Case()
    cases = []
    for schedule in (
        *(Schedule(lanes=lanes, chunks=chunks) for lanes, chunks in product((1, 3), (1, 2, 3))),
        Schedule(lanes=2, chunks=256),
        Schedule(lanes=1, chunks=3, taper=2.0),
        Schedule("two_level", 2, node_size=1),
    ):
        cases.append(replace(base, options=ShardedOptions(schedule)))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        case = replace(base, dtype=dtype, options=ShardedOptions(Schedule(chunks=2)))
        wide = replace(case.options, reduce_dtype=torch.float32)
        cases += [
            case,
            replace(case, shape=(12, 32)),
            replace(case, strided=True),
            replace(case, weight_grad=False),
            replace(case, x_grad=False),
            replace(case, x_grad=False, weight_grad=False),
            replace(case, bias=False),
            replace(case, recompute=True),
            replace(case, other_rows=True),
            replace(case, batched=True),
            replace(case, options=replace(case.options, average=False)),
            replace(case, options=wide),
            replace(case, options=replace(wide, average=False)),
        ]
    for lanes, chunks in product((1, 2), (1, 3)):
        options = ShardedOptions(Schedule(lanes=lanes, chunks=chunks))
        cases.append(replace(base, options=options, batched=True))
    return cases


def check_bits(rank: int) -> None:
    for case in variants():
        size = transport().size
        ours = run(case, inputs(rank, size, case), "fused")
        reference = run(case, inputs(rank, size, case), "same_pieces")
        assert ours.keys() == reference.keys(), case
        for name, value in reference.items():
            assert ours[name].dtype == value.dtype
            assert torch.equal(ours[name], value), (case, name)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_bits_of_the_plain_form_with_the_same_pieces(ranks, size: int) -> None:
    ranks(size).run(check_bits)


def check_case(rank: int, case: Case, how: str) -> float:
    """Against one process: exactly with ones, else the largest error, in eps of the dtype."""
    worst, size = 0.0, transport().size
    ours = run(case, inputs(rank, size, case), how)
    reference = single(rank, size, case)
    expected = {"y"} | ({"x.grad"} if case.x_grad else set())
    if case.weight_grad:
        expected |= {"weight.grad"} | ({"bias.grad"} if case.bias else set())
    assert ours.keys() == expected, case
    for name in sorted(expected):
        wanted = reference[name]
        if case.ones:
            # Sums of ones are exact; the average of a weight gradient is rounded once.
            assert torch.equal(ours[name], wanted.float().to(case.dtype)), (case, how, name)
        elif wanted.numel():
            eps = torch.finfo(case.dtype).eps * max(1.0, wanted.abs().max().item())
            error = (ours[name].double() - wanted).abs().max().item() / eps
            assert error <= 6, (case, how, name, error)
            worst = max(worst, error)
    return worst


def check_single(rank: int, exact: bool) -> float:
    return max(
        check_case(rank, replace(case, ones=exact), how)
        for case, how in product(variants(), ("fused", "plain"))
    )


@pytest.mark.parametrize("exact", [True, False], ids=["ones", "random"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equals_one_process(ranks, size: int, exact: bool) -> None:
    # Measured: 3.4 eps at most.
    ranks(size).run(check_single, exact)


def faults(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Faults planted in the product, one after the other, alike on all ranks."""
    ending, add = module.sum_ending, module.InputGradient.add
    columns, wgrad = module.columns_into, module.wgrad_into

    def not_divided(divisor: int) -> Any:
        return ending(1)

    def bias_of_the_first_block(y: Any, x: Any, block: Any, bias: Any, run: slice) -> None:
        columns(y, x, block, None, run)
        y[:, run].add_(bias[: run.stop - run.start])

    def last_block_missing(self: Any, block: Any, run: slice) -> None:
        if run.stop != self._grad.shape[1]:
            add(self, block, run)

    def for_another_rank(out: Any, grad: Any, x: Any, run: slice) -> None:
        wgrad(out, grad.roll(out.shape[0], 1), x, run)

    for owner, name, fault in (
        (module, "sum_ending", not_divided),
        (module, "columns_into", bias_of_the_first_block),
        (module.InputGradient, "add", last_block_missing),
        (module, "wgrad_into", for_another_rank),
    ):
        patch.setattr(owner, name, fault)
        yield
        patch.undo()


def every_fault_is_seen(rank: int) -> None:
    case = Case(ones=True)
    check_case(rank, case, "fused")
    with pytest.MonkeyPatch.context() as patch:
        for _ in faults(patch):
            with pytest.raises(AssertionError):
                check_case(rank, case, "fused")


def test_planted_faults_are_seen(ranks) -> None:
    ranks(2).run(every_fault_is_seen)


def reduced_in_fp32(rank: int) -> list[float]:
    errors = []
    for reduce_dtype in (None, torch.float32):
        case = Case((64, 64), 64, torch.bfloat16, ShardedOptions(reduce_dtype=reduce_dtype))
        ours = run(case, inputs(rank, transport().size, case), "fused")["weight.grad"]
        exact = single(rank, transport().size, case)["weight.grad"]
        errors.append((ours.double() - exact).pow(2).mean().sqrt().item())
    return errors


def test_reduce_dtype_rounds_once(ranks) -> None:
    for own, wide in ranks(4).run(reduced_in_fp32):
        assert wide < own


def without_gradients(rank: int) -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        case = Case(options=ShardedOptions(Schedule(chunks=2)))
        given = inputs(rank, transport().size, case)
        with mode():
            ours = run(case, given, "fused")["y"]
            assert torch.equal(ours, run(case, given, "same_pieces")["y"])


def under_autocast(rank: int) -> None:
    case = Case()
    low = replace(case, dtype=torch.bfloat16)
    given, size = inputs(rank, transport().size, case), transport().size
    given.grad = given.grad.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        ours = run(case, given, "fused")
    reference = run(low, inputs(rank, size, low), "fused")
    assert ours["weight.grad"].dtype == torch.float32
    for name, value in reference.items():
        if name != "bias.grad":  # drawn in fp32, rounded at another place
            assert torch.equal(ours[name].bfloat16(), value), name


def test_without_gradients_and_under_autocast(ranks) -> None:
    ranks(2).run(without_gradients)
    ranks(2).run(under_autocast)


def order_of_backward(rank: int, batched: bool) -> tuple[bool, list[str]]:
    """How it posts; posts and waits of the weight's blocks and of its gradient's, and the work."""
    lanes = 1 if batched else 2
    link = Transport.create(lanes=lanes, timeout=PATIENT, batched=batched)
    options = ShardedOptions(Schedule(lanes=lanes))
    x = torch.ones(4, 8, requires_grad=True)
    shard = torch.ones(4, 8, requires_grad=True)
    y = sharded_linear(x, shard, transport=link, options=options)
    events: list[str] = []

    def what(transfer: Any) -> str:
        return "weight" if transfer.piece.startswith("block") else "wgrad"

    with pytest.MonkeyPatch.context() as patch:
        wait = Running._wait

        def posted(self: Running, one: Any) -> None:
            for verb, end in (("receive", one.receive), ("send", one.send)):
                if end is not None:
                    events.append(f"{verb} {what(end.transfer)}")

        def waits(self: Running, receives: tuple[int, ...], sends: tuple[int, ...]) -> None:
            events.extend(f"wait {what(self.program.transfers[step][1])}" for step in receives)
            wait(self, receives, sends)

        watch_posts(patch, posted)
        patch.setattr(Running, "_wait", waits)
        calls = ((module, "wgrad_into", "make"), (module.InputGradient, "add", "dgrad"))
        watch_calls(patch, calls, lambda word, _: events.append(word))
        y.sum().backward()
    return link.batched, events


def test_both_exchanges_of_the_backward_are_covered(ranks) -> None:
    for batched, events in ranks(3).run(order_of_backward, False):
        assert [event for event in events if not event.startswith("receive")] == [
            # The weight is on its way before work begins, every wgrad block leaves as it is made.
            *("send weight", "send weight"),
            *("make", "send wgrad", "make", "send wgrad", "make"),
            # The own block of the weight needs no wait; the sums come behind all dgrad blocks.
            *("dgrad", "wait weight", "dgrad", "wait weight", "dgrad"),
            *("wait wgrad", "wait wgrad"),
        ]
        assert events.count("receive weight") == events.count("receive wgrad") == 2
        # By themselves receives are posted as soon as they have memory, in front of all work.
        first = events.index("make")
        assert batched or events[:first].count("receive wgrad") == 2


def test_backward_in_batches_takes_turns_on_the_lane(ranks) -> None:
    """In-order lanes: no more of the weight than two blocks, until the own block is used."""
    for _, events in ranks(4).run(order_of_backward, True):
        sends = [event.removeprefix("send ") for event in events if event.startswith("send")]
        assert sends == ["weight", "weight", "wgrad", "wgrad", "wgrad", "weight"]


def only_what_is_needed(rank: int) -> list[set[str]]:
    """What a backward sends."""
    found = []
    for x_grad, weight_grad in ((True, True), (True, False), (False, True), (False, False)):
        case = Case(x_grad=x_grad, weight_grad=weight_grad)
        given = inputs(rank, transport().size, case)
        assert given.bias is not None
        given.bias.requires_grad_()
        y = sharded_linear(given.x, given.shard, given.bias, transport=transport())
        sent: set[str] = set()
        with pytest.MonkeyPatch.context() as patch:

            def logged(self: Any, one: Any, sent: set[str] = sent) -> None:
                if one.send is not None:
                    sent.add(one.send.transfer.piece.rpartition(" ")[0])

            watch_posts(patch, logged)
            y.backward(given.grad)
        found.append(sent)
    return found


def test_frozen_weights_and_inputs_without_gradient_transfer_nothing(ranks) -> None:
    for found in ranks(2).run(only_what_is_needed):
        assert found == [{"block", "partial for"}, {"block"}, {"partial for"}, set()]


@pytest.mark.parametrize("batched", [False, True])
def test_the_whole_weight_exists_nowhere(batched: bool) -> None:
    """Of 64 blocks of 128 rows two have memory, or a piece more than there are lanes."""
    for schedule, arriving, leaving in (
        (Schedule(lanes=1), 256, 256),
        (Schedule(lanes=1, chunks=4), 256, 256),
        (Schedule(lanes=5), 6 * 128, 6 * 128),
        # Chunks of 80, 32 and 16 rows, in two stacks of two pieces.
        (Schedule(lanes=2, chunks=3, taper=2.0), 3 * 80, 4 * 80),
    ):
        program = sharded_backward(Place(schedule, 5, 64, batched), 128, 16, True, True)
        slots: dict[str, int] = {}
        for one in program.scratch:
            slots[one.slot] = max(slots.get(one.slot, 0), one.rows)
        rows: Counter[str] = Counter()
        for slot, length in slots.items():
            rows[slot.split()[0]] += length
        assert rows == {
            "arriving": arriving,
            "made": leaving,
            "partials": leaving,
            "own": 128,
            "total": 128,
        }


def fresh() -> Transport:
    return Transport.create(lanes=2, timeout=PATIENT)


def refused(rank: int) -> None:
    link = fresh()
    x, shard = torch.ones(3, 4), torch.ones(2, 4)
    for kind, words, call in (
        (
            ValueError,
            r"the bias has shape \(2,\); it has to be \(4,\), that of all 2 shards of 2 rows",
            lambda: sharded_linear(x, shard, torch.ones(2), transport=link),
        ),
        (
            TypeError,
            "x is torch.float32, the bias torch.bfloat16; cast one of them",
            lambda: sharded_linear(x, shard, torch.ones(4).bfloat16(), transport=link),
        ),
        (
            ValueError,
            "x has 4 features, the weight takes 5",
            lambda: sharded_linear(x, torch.ones(2, 5), transport=link),
        ),
        (
            ValueError,
            "reduce_dtype is torch.int32; partial sums need a floating-point dtype",
            lambda: ShardedOptions(reduce_dtype=torch.int32),
        ),
    ):
        with pytest.raises(kind, match=words):
            call()
    shard.requires_grad_()
    y = sharded_linear(x, shard, transport=link)
    with torch.no_grad():
        shard.mul_(2)
    with pytest.raises(RuntimeError, match="the weight was modified in place between"):
        y.sum().backward()


def test_inputs_that_cannot_work_are_refused(ranks) -> None:
    ranks(2).run(refused)


def disagree(rank: int) -> None:
    x, shard = torch.ones(3, 4, requires_grad=True), torch.ones(2, 4, requires_grad=True)
    frozen = torch.ones(2, 4, requires_grad=rank == 0)
    average = ShardedOptions(average=bool(rank))
    with pytest.raises(MismatchError, match=r"rows: .* here, .* there"):
        sharded_linear(x, torch.ones(2 + rank, 4), transport=fresh())
    with pytest.raises(MismatchError, match=r"options: .*average.* here, .*average.* there"):
        sharded_linear(x, shard, transport=fresh(), options=average)
    y = sharded_linear(x, frozen, transport=fresh())
    with pytest.raises(MismatchError):
        y.sum().backward()


def test_ranks_that_disagree_are_told(ranks) -> None:
    ranks(2).run(disagree)


def absent_in_backward(rank: int) -> str:
    x, shard = torch.ones(3, 4, requires_grad=True), torch.ones(2, 4, requires_grad=True)
    link = fresh()
    sharded_linear(x, shard, transport=link).sum().backward()
    y = sharded_linear(x, shard, transport=link)
    if rank == 1:
        return "failed"
    link.timeout = BRIEF
    with pytest.raises(TransportError) as caught:
        y.sum().backward()
    return str(caught.value)


def test_a_rank_that_does_not_come_to_its_backward_becomes_an_error(ranks) -> None:
    waiting, _ = ranks(2).run(absent_in_backward)
    assert "sharded_linear" in waiting
    assert "peer 1" in waiting
