"""Fused linear layers against their plain forms and against one process, on real gloo processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from commfuse_npu.ops import LinearOptions, linear
from commfuse_npu.plan import Schedule
from commfuse_npu.runtime.collective_transport import CollectiveTransport
from commfuse_npu.runtime.collectives import all_gather_rows
from commfuse_npu.runtime.transport import Transport
from tests.limits import PATIENT

COLUMN, ROW, FULL = "all_gather_linear", "linear_reduce_scatter", "linear_all_reduce"


@lru_cache
def transport(batched: bool = False) -> Transport:
    return Transport.create(lanes=3, timeout=PATIENT, batched=batched)


@dataclass(frozen=True)
class Case:
    """One call of one op, and everything about its inputs."""

    op: str
    # S, B, I of the whole input, and O.  Rows are multiples of 64 bytes in every dtype: MKL's
    # kernels for few rows round differently for blocks that begin elsewhere.
    shape: tuple[int, ...] = (12, 2, 32)
    features: int = 32
    dtype: torch.dtype = torch.float32
    options: LinearOptions = LinearOptions()
    bias: bool = True
    x_grad: bool = True
    weight_grad: bool = True
    main_grad: torch.dtype | None = None
    flags: tuple[str, ...] = ()
    strided: bool = False
    recompute: bool = False
    ones: bool = False
    batched: bool = False


@dataclass
class Inputs:
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    grad: torch.Tensor


def draw(seed: int, shape: tuple[int, ...], case: Case) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if case.ones:
        return torch.randint(0, 2, shape, generator=generator).to(case.dtype)
    return torch.randn(shape, generator=generator).to(case.dtype)


def inputs(rank: int, size: int, case: Case) -> Inputs:
    """The tensors of one rank: a shard of x where the op gathers, of its gradient where it sums."""
    length, *rest, features = case.shape
    shard = slice(rank * length // size, (rank + 1) * length // size)
    x_seed = 1 if case.op == COLUMN else 10 + rank
    x = draw(x_seed, case.shape, case)
    out_shape = (length, *rest, case.features)
    grad = draw(20 + rank if case.op == COLUMN else 2, out_shape, case)
    if case.op == COLUMN:
        x = x[shard]
    elif case.op == ROW:
        grad = grad[shard]
    x, grad = x.contiguous(), grad.contiguous()
    if case.strided:
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
        grad = grad.transpose(0, -1).contiguous().transpose(0, -1)
    weight = draw(30 + rank, (case.features, features), case)
    bias = None
    if case.bias:
        bias = draw(40 + rank if case.op == COLUMN else 40, (case.features,), case)
        bias.requires_grad_(case.weight_grad)
    x.requires_grad_(case.x_grad)
    weight = torch.nn.Parameter(weight, requires_grad=case.weight_grad)
    if case.main_grad is not None:
        weight.main_grad = draw(50 + rank, tuple(weight.shape), case).to(case.main_grad)
        for flag in case.flags:
            setattr(weight, flag, flag == "zero_out_wgrad")
    return Inputs(x, weight, bias, grad)


def run(case: Case, given: Inputs, call: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    """Forward and backward of ``call(x, weight, bias)``: everything that comes out."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        # As in a layer: what is recomputed includes the producer of the input.
        return call(x * 1, given.weight, given.bias)

    y = checkpoint(forward, given.x, use_reentrant=False) if case.recompute else forward(given.x)
    found = {"y": y}
    if y.requires_grad:
        y.backward(given.grad)
    for name, tensor in (("x", given.x), ("weight", given.weight), ("bias", given.bias)):
        if tensor is not None and tensor.grad is not None:
            found[f"{name}.grad"] = tensor.grad
    if case.main_grad is not None:
        found["main_grad"] = given.weight.main_grad
        assert getattr(given.weight, "grad_added_to_main_grad", True), "flag was not set"
        if "zero_out_wgrad" in case.flags:
            assert not given.weight.grad.any()
        if "grad_added_to_main_grad" in case.flags:
            # Its contents are undefined; Megatron asks for its shape only.
            assert found.pop("weight.grad").shape == given.weight.shape
        else:
            assert given.weight.grad is None
    return found


def fused(case: Case) -> Callable[..., torch.Tensor]:
    op = getattr(linear, case.op)
    return lambda *args: op(*args, transport=transport(case.batched), options=case.options)


def plain(case: Case, same_gemms: bool) -> Callable[..., torch.Tensor]:
    op = getattr(linear, case.op)
    link = CollectiveTransport(transport(case.batched).group, same_pieces=same_gemms)
    return lambda *args: op(*args, transport=link, options=case.options)


def single(rank: int, size: int, case: Case) -> dict[str, torch.Tensor]:
    """What one process computes in fp64 from the tensors of all ranks."""
    wide = replace(case, strided=False, recompute=False)
    every = [inputs(r, size, wide) for r in range(size)]
    xs = [given.x.detach().double().requires_grad_() for given in every]
    weights = [given.weight.detach().double().requires_grad_() for given in every]
    biases = [None if g.bias is None else g.bias.detach().double().requires_grad_() for g in every]
    functional = torch.nn.functional.linear
    if case.op == COLUMN:
        outs = [
            functional(torch.cat(xs), weight, bias)
            for weight, bias in zip(weights, biases, strict=True)
        ]
    else:
        total = sum(functional(x, weight) for x, weight in zip(xs, weights, strict=True))
        parts = total.chunk(size) if case.op == ROW else [total] * size
        outs = [
            part if bias is None else part + bias for part, bias in zip(parts, biases, strict=True)
        ]
    if case.op == FULL:
        # Every rank computes the same and backs it up with the same gradient.
        torch.autograd.backward([outs[0]], [every[0].grad.double()])
        biases = [biases[0]] * size
    else:
        torch.autograd.backward(outs, [given.grad.double() for given in every])
    found = {"y": outs[rank].detach(), "x.grad": xs[rank].grad, "weight.grad": weights[rank].grad}
    if case.bias:
        found["bias.grad"] = biases[rank].grad
    if case.main_grad is not None:
        found["main_grad"] = every[rank].weight.main_grad.double() + weights[rank].grad
    return found


def check_bits(rank: int, cases: list[Case]) -> None:
    """Fused equals plain with the same GEMMs, bit for bit."""
    for case in cases:
        size = transport().size
        ours = run(case, inputs(rank, size, case), fused(case))
        reference = run(case, inputs(rank, size, case), plain(case, same_gemms=True))
        assert ours.keys() == reference.keys(), case
        for name, value in reference.items():
            assert ours[name].dtype == value.dtype
            differing = (ours[name] != value).nonzero()
            assert torch.equal(ours[name], value), (case, name, differing[:5], len(differing))


def check_single(rank: int, cases: list[Case], exact: bool) -> None:
    """Fused equals one process: exactly without rounding, else within the dtype's rounding."""
    for case in cases:
        size = transport().size
        ours = run(case, inputs(rank, size, case), fused(case))
        reference = single(rank, size, case)
        expected = {"y"}
        if case.x_grad:
            expected.add("x.grad")
        if case.weight_grad:
            expected.add("main_grad" if case.main_grad is not None else "weight.grad")
            expected |= {"bias.grad"} if case.bias else set()
        assert ours.keys() == expected, case
        for name in expected:
            if exact:
                assert torch.equal(ours[name].double(), reference[name]), (case, name)
            else:
                # Sums of at most 100 products of order 1, each rounded a few times.
                bound = 8 * torch.finfo(case.dtype).eps * reference[name].abs().max().item() + 1e-30
                error = (ours[name].double() - reference[name]).abs().max().item()
                assert error <= bound, (case, name, error, bound)


def schedules() -> Iterator[Schedule]:
    for lanes, chunks in product((1, 3), (1, 2, 3)):
        yield Schedule("shifted", lanes, chunks)
    yield Schedule("shifted", 2, 3, taper=2)
    yield Schedule("shifted", 2, 4, taper=0.5)
    yield Schedule("shifted", 2, 40)  # more chunks than rows or columns


def variants(op: str) -> list[Case]:
    """Every option of an op at least once, most of them crossed with the dtypes."""
    base = Case(op)
    cases = [replace(base, options=LinearOptions(schedule)) for schedule in schedules()]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        case = replace(base, dtype=dtype, options=LinearOptions(Schedule(chunks=2)))
        cases += [
            case,
            replace(case, shape=(12, 32)),
            replace(case, strided=True),
            replace(case, shape=(12, 32), strided=True),
            replace(case, weight_grad=False),
            replace(case, x_grad=False),
            replace(case, x_grad=False, weight_grad=False),
            replace(case, bias=False),
            replace(case, recompute=True),
            replace(case, batched=True),
        ]
        for wgrad, keep in product(("whole", "blocks"), (False, True)):
            options = LinearOptions(Schedule(chunks=2), keep_gathered=keep, wgrad=wgrad)
            cases.append(replace(case, options=options))
            cases.append(replace(case, options=options, recompute=True))
            for main_grad in (torch.float32, torch.bfloat16, torch.float16):
                options = replace(options, main_grad=True)
                fusion = replace(case, options=options, main_grad=main_grad)
                cases.append(fusion)
                cases.append(replace(fusion, flags=("grad_added_to_main_grad",)))
        cases.append(
            replace(
                case,
                options=LinearOptions(Schedule(chunks=2), main_grad=True),
                main_grad=torch.float32,
                flags=("grad_added_to_main_grad", "zero_out_wgrad"),
            )
        )
    for wgrad, lanes in product(("whole", "blocks"), (1, 2)):
        options = LinearOptions(Schedule("shifted", lanes, 3), wgrad=wgrad)
        cases.append(replace(base, options=options, batched=True))
    for dtype in (torch.bfloat16, torch.float16):
        options = LinearOptions(Schedule(lanes=3), reduce_dtype=torch.float32)
        cases.append(replace(base, dtype=dtype, options=options))
    return cases


every_op = pytest.mark.parametrize("op", [COLUMN, ROW, FULL])
every_share = pytest.mark.parametrize(
    "nth", [pytest.param(3, id="a third"), pytest.param(1, id="all", marks=pytest.mark.long)]
)
"""Of the variants: each value of each option is in every third, not each with each other."""


@every_op
@every_share
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_bits_of_the_plain_form_with_the_same_gemms(ranks, size: int, op: str, nth: int) -> None:
    ranks(size).run(check_bits, variants(op)[::nth])


@every_op
@every_share
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equals_one_process_without_rounding(ranks, size: int, op: str, nth: int) -> None:
    ranks(size).run(check_single, [replace(c, ones=True) for c in variants(op)[::nth]], True)


@pytest.mark.long
@every_op
@pytest.mark.parametrize("size", [2, 3, 4])
def test_equals_one_process_within_rounding(ranks, size: int, op: str) -> None:
    cases = [c for c in variants(op) if c.main_grad in (None, torch.float32)]
    ranks(size).run(check_single, cases, False)


def all_reduce_any_rows(rank: int) -> None:
    """Rows that do not divide by the group size, fewer rows than ranks, none at all."""
    for rows, chunks in product((1, 2, 5, 7, 11, 0), (1, 2, 4)):
        case = Case(FULL, (rows, 2, 32), options=LinearOptions(Schedule(chunks=chunks)), ones=True)
        check_single(rank, [case], exact=True)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_reduce_takes_any_number_of_rows(ranks, size: int) -> None:
    ranks(size).run(all_reduce_any_rows)


def sums_of_partials_in_their_order(rank: int) -> None:
    """The all-reduce's bits are those of a reduce-scatter: partials r-1, ..., r+1, own."""
    case = Case(FULL, (12, 32), dtype=torch.bfloat16, bias=False)
    size = transport().size
    given = inputs(rank, size, case)
    y = fused(case)(given.x, given.weight, None)
    full = (given.x @ given.weight.t()).detach()
    everyone = all_gather_rows(full, transport().group).view(size, *full.shape)
    block = 12 // size
    for owner in range(size):
        rows = slice(owner * block, (owner + 1) * block)
        total = everyone[(owner - 1) % size, rows]
        for k in range(2, size + 1):
            total = total + everyone[(owner - k) % size, rows]
        assert torch.equal(y[rows], total)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_reduce_adds_in_the_order_of_a_reduce_scatter(ranks, size: int) -> None:
    ranks(size).run(sums_of_partials_in_their_order)


def without_gradients(rank: int) -> None:
    for op, mode in product((COLUMN, ROW, FULL), (torch.no_grad, torch.inference_mode)):
        case = Case(op, options=LinearOptions(Schedule(chunks=2), keep_gathered=True))
        given = inputs(rank, transport().size, case)
        with mode():
            ours = fused(case)(given.x, given.weight, given.bias)
            reference = plain(case, True)(given.x, given.weight, given.bias)
        assert not ours.requires_grad
        assert torch.equal(ours, reference)


def test_forward_only(ranks) -> None:
    ranks(2).run(without_gradients)


def inference_then_training(rank: int) -> None:
    """Buffers that were allocated in inference mode serve a training afterwards."""
    link = Transport.create(timeout=PATIENT)
    x, weight = torch.ones(4, 32), torch.ones(32, 32, requires_grad=True)
    for _ in range(2):
        with torch.inference_mode():
            linear.linear_reduce_scatter(x, weight, transport=link)
        linear.linear_reduce_scatter(x, weight, transport=link).sum().backward()


def test_training_after_inference(ranks) -> None:
    ranks(2).run(inference_then_training)


def under_autocast(rank: int) -> None:
    for op in (COLUMN, ROW, FULL):
        case = Case(op)
        with torch.autocast("cpu", torch.bfloat16):
            given = inputs(rank, transport().size, case)
            ours = run(case, replace_grad(given), fused(case))
        low = inputs(rank, transport().size, replace(case, dtype=torch.bfloat16))
        reference = run(case, low, fused(case))
        assert ours["y"].dtype == torch.bfloat16
        assert torch.equal(ours["y"], reference["y"])
        assert ours["weight.grad"].dtype == torch.float32


def replace_grad(given: Inputs) -> Inputs:
    return replace(given, grad=given.grad.bfloat16())


@pytest.mark.parametrize("size", [1, 2])
def test_autocast_casts_as_for_torch_linear(ranks, size: int) -> None:
    ranks(size).run(under_autocast)


def fp32_sum_is_more_accurate(rank: int) -> Any:
    errors = []
    for reduce_dtype in (None, torch.float32):
        options = LinearOptions(Schedule(lanes=3), reduce_dtype=reduce_dtype)
        case = Case(ROW, (64, 64), 64, torch.bfloat16, options, bias=False)
        given = inputs(rank, transport().size, case)
        y = fused(case)(given.x, given.weight, None)
        exact = single(rank, transport().size, case)["y"]
        errors.append((y.double() - exact).pow(2).mean().sqrt().item())
    return errors


def test_reduce_dtype_rounds_once(ranks) -> None:
    for own, wide in ranks(4).run(fp32_sum_is_more_accurate):
        assert wide < own


def leaves_nothing_in_the_air(rank: int) -> tuple[int, int]:
    link = transport()
    case = Case(COLUMN, options=LinearOptions(Schedule(chunks=2)))
    for _ in range(3):
        run(case, inputs(rank, link.size, case), fused(case))
    idle = len(link.scratch)
    for _ in range(3):
        run(case, inputs(rank, link.size, case), fused(case))
    assert not link._in_flight
    assert len(link.scratch) == idle, "buffers are not used again"
    return link.operations, link.size


def test_buffers_are_used_again(ranks) -> None:
    ranks(3).run(leaves_nothing_in_the_air)
