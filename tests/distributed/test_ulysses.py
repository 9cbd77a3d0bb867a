"""Ulysses: projection, attention and projection around exchanged heads, on gloo processes.

Every case runs on the real ranks, fused and plain, and once more in fp64 in one process that plays
all ranks with torch's own linear and attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from commfuse_npu import ops
from commfuse_npu.ops import LinearOptions, head_groups
from commfuse_npu.ops.attention_runs import AttentionRuns
from commfuse_npu.ops.weight import WeightGradient
from commfuse_npu.plan import Schedule
from commfuse_npu.plan.program import Compute, Copy, Instruction, Program, Span
from commfuse_npu.plan.rules import blocks
from commfuse_npu.runtime import collective_transport
from commfuse_npu.runtime.agreement import MismatchError
from commfuse_npu.runtime.collective_transport import CollectiveTransport
from commfuse_npu.runtime.executor import Running, Work
from commfuse_npu.runtime.transport import Transport
from tests.attention_masks import MASKS, attention, mask_arguments, seen
from tests.distributed.programs import watch_posts
from tests.limits import PATIENT

D, A, HIDDEN, BATCH = 16, 2, 32, 2
"""Features of a head, query heads of a rank, hidden size, batch: rows are 64 bytes long or more."""

KEYS: dict[str, Callable[[int], int]] = {
    "MHA": lambda n: 2 * n,
    "GQA": lambda n: n,
    "half": lambda n: -(-n // 2),
    "MQA": lambda n: 1,
}
"""Key heads of all ranks together; those that are fewer than ranks are repeated."""

Result = dict[str, torch.Tensor]


@lru_cache
def transport(batched: bool = False) -> Transport:
    return Transport.create(lanes=3, timeout=PATIENT, batched=batched)


@dataclass(frozen=True)
class Case:
    """One call of one or several ops, and everything about its inputs.

    ``op``: "a" linear_all_to_all, "b" attention_all_to_all, "c" all_to_all_linear, "bc"
    attention_all_to_all_linear, or a layer: "a-bc", "a-b-c" with attention of the op or without.
    """

    op: str = "a-bc"
    keys: str = "GQA"
    causal: bool = True
    shard: int = 6
    dtype: torch.dtype = torch.float32
    scale: float | None = None
    bias: bool = True
    own_rows: bool = True
    options: LinearOptions = LinearOptions(Schedule(lanes=2, chunks=2))
    frozen: tuple[str, ...] = ()
    main_grad: torch.dtype | None = None
    recompute: bool = False
    batched: bool = False
    mask: str | None = None
    """Of :mod:`tests.attention_masks`, instead of ``causal``."""

    @property
    def kind(self) -> str:
        return self.mask or ("causal" if self.causal else "full")


def key_heads(case: Case, size: int, rank: int) -> range:
    """Which key heads a rank attends with."""
    total = KEYS[case.keys](size)
    if total >= size:
        each = total // size
        return range(rank * each, (rank + 1) * each)
    return range(rank * total // size, rank * total // size + 1)


def rows_of(case: Case, size: int) -> list[list[slice]] | None:
    """The rows of a weight with all query heads, all key heads and all value heads, per rank."""
    if not case.own_rows:
        return None
    queries, keys = size * A * D, KEYS[case.keys](size) * D
    found = []
    for rank in range(size):
        mine = key_heads(case, size, rank)
        q = slice(rank * A * D, (rank + 1) * A * D)
        k = slice(queries + mine.start * D, queries + mine.stop * D)
        found.append([q, k, slice(k.start + keys, k.stop + keys)])
    return found


def draw(seed: int, case: Case, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(case.dtype)


def inputs(rank: int, size: int, case: Case) -> dict[str, torch.Tensor]:
    """The tensors of one rank; weights are the same on all."""
    keys, features = len(key_heads(case, size, rank)), A * D
    every = (A + 2 * keys) * D * size if not case.own_rows else 0
    rows = every or (size * A + 2 * KEYS[case.keys](size)) * D
    whole = case.shard * size
    shapes = {
        "a": {"x": (10 + rank, case.shard, BATCH, HIDDEN)},
        "b": {
            "q": (20 + rank, whole, BATCH, A, D),
            "k": (30 + rank, whole, BATCH, keys, D),
            "v": (40 + rank, whole, BATCH, keys, D),
        },
        "c": {"o": (50 + rank, whole, BATCH, features)},
    }
    tensors = {name: draw(*_with(case, of)) for name, of in shapes[case.op[0]].items()}
    if "a" in case.op:
        tensors["qkv"] = draw(60, case, rows, HIDDEN) / 6
        if case.bias:
            tensors["qkv_bias"] = draw(61, case, rows) / 2
    if "c" in case.op:
        tensors["proj"] = draw(70, case, HIDDEN, size * features) / 8
        if case.bias:
            tensors["proj_bias"] = draw(71, case, HIDDEN)
    for name, tensor in tensors.items():
        tensor.requires_grad_(name not in case.frozen)
        if case.main_grad is not None and name in ("qkv", "proj"):
            tensor.main_grad = draw(80, case, *tensor.shape).to(case.main_grad)
    last = {"a": (whole, BATCH, (A + 2 * keys) * D), "b": (case.shard, BATCH, size * features)}
    shape = last.get(case.op[-1], (case.shard, BATCH, HIDDEN))
    return tensors | {"grad": draw(90 + rank, case, *shape)}


def _with(case: Case, of: Sequence[int]) -> tuple[Any, ...]:
    return of[0], case, *of[1:]


def heads_of(y: torch.Tensor) -> list[torch.Tensor]:
    """q, k and v of a rank: parts of one tensor."""
    keys = (y.shape[-1] // D - A) // 2
    return list(y.unflatten(-1, (-1, D)).split([A, keys, keys], 2))


def layer(case: Case, size: int, form: Callable[[str], Callable[..., Any]], **t: Any) -> Any:
    """The ops of a case one after the other; ``form`` gives the fused or the plain one."""
    given = {"options": case.options}
    attend = given | mask_arguments(case.kind, case.shard * size, BATCH) | {"scale": case.scale}
    qkv, proj = ((t.get(n), t.get(f"{n}_bias")) for n in ("qkv", "proj"))
    if case.op == "c":
        return form("all_to_all_linear")(t["o"], *proj, **given)
    if "a" in case.op:
        y = form("linear_all_to_all")(t["x"] * 1, *qkv, rows=rows_of(case, size), **given)
        if case.op == "a":
            return y
        heads = heads_of(y)
    else:
        heads = [t[name] * 1 for name in "qkv"]
    if "bc" in case.op:
        return form("attention_all_to_all_linear")(*heads, *proj, **attend)
    if case.op.endswith("b"):
        return form("attention_all_to_all")(*heads, **attend)
    # Someone else's attention between the two projections.
    o = attention(*heads, seen(case.kind, case.shard * size, BATCH), case.scale)
    return form("all_to_all_linear")(o.flatten(2), *proj, **given)


def fused(case: Case) -> Callable[[str], Callable[..., Any]]:
    link = transport(case.batched)
    return lambda name: partial(getattr(ops, name), transport=link)


def plain(case: Case, same_blocks: bool) -> Callable[[str], Callable[..., Any]]:
    link = CollectiveTransport(transport(case.batched).group, same_pieces=same_blocks)
    return lambda name: partial(getattr(ops, name), transport=link)


def run(case: Case, given: dict[str, torch.Tensor], form: Callable[[str], Any]) -> Result:
    """Forward and backward: everything that comes out."""
    tensors = {name: tensor for name, tensor in given.items() if name != "grad"}
    size = dist.get_world_size()

    def forward(*args: torch.Tensor) -> torch.Tensor:
        return layer(case, size, form, **dict(zip(tensors, args, strict=True)))

    if case.recompute:
        y = checkpoint(forward, *tensors.values(), use_reentrant=False)
    else:
        y = forward(*tensors.values())
    found = {"y": y.detach()}
    if y.requires_grad:
        y.backward(given["grad"])
    for name, tensor in tensors.items():
        if hasattr(tensor, "main_grad"):
            found[f"{name}.main_grad"] = tensor.main_grad
        elif tensor.grad is not None:
            found[f"{name}.grad"] = tensor.grad
    return found


def single(rank: int, size: int, case: Case) -> Result:
    """What one process computes in fp64 from the tensors of all ranks, each with own weights."""
    every = [inputs(r, size, case) for r in range(size)]
    wide = [{n: t.detach().double().requires_grad_() for n, t in of.items()} for of in every]
    everyone, s = range(size), case.shard
    values: list[torch.Tensor] = []
    if "a" in case.op:
        parts = rows_of(case, size)
        for r in everyone:
            blocks = []
            for of in wide:
                chosen = [slice(i, j) for i, j in [_equal_part(of["qkv"], r, size)]]
                chosen = chosen if parts is None else parts[r]
                weight = torch.cat([of["qkv"][rows] for rows in chosen])
                bias = torch.cat([of["qkv_bias"][rows] for rows in chosen]) if case.bias else None
                blocks.append(F.linear(of["x"], weight, bias))
            values.append(torch.cat(blocks))
    if case.op != "a":
        if "a" in case.op:
            heads = [heads_of(y) for y in values]
        else:
            heads = [[of.get(name) for name in "qkv"] for of in wide]
        if case.op == "c":
            attended = [of["o"] for of in wide]
        else:
            shown = seen(case.kind, case.shard * size, BATCH)
            attended = [attention(*three, shown, case.scale).flatten(2) for three in heads]
        values = [torch.cat([o[r * s : (r + 1) * s] for o in attended], -1) for r in everyone]
    if "c" in case.op:
        values = [
            F.linear(y, of["proj"], of.get("proj_bias")) for y, of in zip(values, wide, strict=True)
        ]
    torch.autograd.backward(values, [of["grad"].detach() for of in wide])
    found = {"y": values[rank].detach()}
    for name, tensor in wide[rank].items():
        if tensor.grad is not None:
            found[f"{name}.grad"] = tensor.grad
        if hasattr(every[rank][name], "main_grad"):
            found[f"{name}.main_grad"] = every[rank][name].main_grad.double() + tensor.grad
    return found


def _equal_part(weight: torch.Tensor, rank: int, size: int) -> tuple[int, int]:
    return rank * len(weight) // size, (rank + 1) * len(weight) // size


def error(ours: Result, exact: Result, name: str) -> float:
    """Largest difference, relative to the largest value."""
    value = exact[name]
    return float((ours[name].double() - value).abs().max() / value.abs().max())


def rounded_once(case: Case, size: int) -> set[str]:
    """What is summed over ranks in fp32, and is not made from something that was rounded."""
    if case.dtype == torch.float32 or case.main_grad or size == 1:
        return set()
    blocks = case.options.wgrad == "blocks"
    names = {"a": {"x.grad", "qkv_bias.grad"}, "c": {"y"}}.get(case.op, set())
    return names | ({f"{'qkv' if case.op == 'a' else 'proj'}.grad"} if names and blocks else set())


def complaints(rank: int, cases: Sequence[Case]) -> list[str]:
    """What is wrong: with the bits of the plain form, or with the distance from fp64."""
    size, found = dist.get_world_size(), []
    for case in cases:
        ours = run(case, inputs(rank, size, case), fused(case))
        plainly = run(case, inputs(rank, size, case), plain(case, same_blocks=True))
        unsplit = run(case, inputs(rank, size, case), plain(case, same_blocks=False))
        if not ours.keys() == plainly.keys() == unsplit.keys():
            found.append(f"{case}: {ours.keys()}, {plainly.keys()}, {unsplit.keys()}")
            continue
        expected = {name for name in inputs(rank, size, case) if name != "grad"}
        expected -= set(case.frozen)
        if len(ours) != 1 + len(expected):
            found.append(f"{case}: {ours.keys()} for {expected}")
        exact = single(rank, size, case)
        for name in ours:
            if not torch.equal(ours[name], plainly[name]):
                found.append(f"{case}: {name} is not that of the plain form")
            wrong = error(ours, exact, name)
            limit = 1e-5
            if case.dtype != torch.float32:
                limit = 1.25 * error(unsplit, exact, name) + torch.finfo(case.dtype).eps / 4
            if not wrong < limit:
                found.append(f"{case}: {name} is off by {wrong:.2e}, not {limit:.2e} at most")
            if name in rounded_once(case, size):
                half = torch.finfo(case.dtype).eps / 2 * exact[name].abs()
                if ((ours[name] - exact[name]).abs() > half + 1e-5 * exact[name].abs().max()).any():
                    found.append(f"{case}: {name} is rounded more than once")
    return found


def compared(rank: int, cases: Sequence[Case]) -> None:
    found = complaints(rank, cases)
    assert not found, "\n".join(found)


LAYERS = [Case("a-bc", keys, causal) for keys, causal in product(KEYS, (True, False))]
ALONE = [
    Case("a", "MHA", own_rows=False),
    Case("a", "half"),
    Case("a", "MQA"),
    Case("b", "MHA"),
    Case("b", "GQA", causal=False),
    Case("c"),
    Case("bc", "GQA"),
    Case("bc", "MHA", causal=False),
    Case("a-b"),
    Case("a-c", "MQA"),
]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_one_process_and_the_plain_form(ranks: Any, size: int, dtype: torch.dtype) -> None:
    cases = [replace(case, dtype=dtype) for case in (*LAYERS, *ALONE)]
    ranks(size).run(compared, cases)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_packed_documents_and_masks_of_the_data(ranks: Any, size: int) -> None:
    cases = [Case(op, mask=mask) for op in ("a-bc", "b") for mask in MASKS]
    cases += [
        Case("a-b", "MQA", mask="documents"),
        Case("bc", "MHA", mask="documents", recompute=True),
        Case("bc", "MHA", mask="documents", options=LinearOptions(Schedule(lanes=3, chunks=4))),
        Case("a-bc", mask="documents", dtype=torch.bfloat16),
        Case("a-bc", mask="hidden and causal", dtype=torch.bfloat16),
    ]
    ranks(size).run(compared, cases)


SCHEDULES = (
    Schedule(lanes=1),
    Schedule(lanes=3, chunks=4),
    Schedule(lanes=2, chunks=3, taper=2),
    Schedule(lanes=2, chunks=50),
)
EACH = ("a", "b", "c", "bc")


@pytest.mark.parametrize("size", [2, 4])
def test_schedules(ranks: Any, size: int) -> None:
    every = [*SCHEDULES, Schedule(lanes=2, chunks=2, costs=tuple(range(1, size + 1)))]
    if size == 4:
        every.append(Schedule("two_level", lanes=2, chunks=2, node_size=2))
    cases = [Case(op, options=LinearOptions(of)) for op, of in product(EACH, every)]
    cases += [Case(op, batched=True, options=LinearOptions(every[2])) for op in EACH]
    cases += [Case(op, batched=True) for op in EACH]
    # Chunks of two and three rows: what the forward keeps of each is for the same rows.
    cases += [Case(op, shard=5) for op in EACH]
    ranks(size).run(compared, cases)


@pytest.mark.parametrize("size", [2, 3])
def test_options(ranks: Any, size: int) -> None:
    base = Case("a-bc", "MQA")
    blocks = replace(base.options, wgrad="blocks")
    cases = [
        replace(base, options=blocks),
        replace(base, options=blocks, dtype=torch.bfloat16),
        replace(base, bias=False, scale=0.3),
        replace(base, recompute=True),
        *(Case(op, "MQA", options=blocks, dtype=torch.bfloat16) for op in EACH),
        Case("bc", frozen=("proj", "proj_bias")),
        Case("bc", frozen=("q", "k", "v")),
        Case("bc", frozen=("q", "v", "proj")),
        Case("b", frozen=("q", "k")),
        Case("c", frozen=("o",)),
        Case("c", frozen=("proj",)),
        Case("c", frozen=("o", "proj")),
        Case("a", "MQA", frozen=("x",)),
        Case("a", "MQA", frozen=("qkv",)),
        Case("a", "MQA", frozen=("x", "qkv")),
    ]
    for main_grad, wgrad in product((torch.float32, torch.bfloat16), ("whole", "blocks")):
        options = replace(base.options, main_grad=True, wgrad=wgrad)
        changes = {"dtype": torch.bfloat16, "main_grad": main_grad, "options": options}
        cases += [replace(base, **changes), Case("a", own_rows=False, **changes)]
        cases += [Case("c", **changes)]
    ranks(size).run(compared, cases)


def without_gradients(rank: int) -> None:
    for op in EACH:
        case = Case(op)
        given = inputs(rank, 2, case)
        with torch.no_grad():
            ours = run(case, given, fused(case))
            plainly = run(case, given, plain(case, same_blocks=True))
        assert ours.keys() == {"y"}
        assert torch.equal(ours["y"], plainly["y"])


def flagged(rank: int) -> None:
    """Megatron's flags on a weight whose gradient goes to main_grad."""
    for op, name in (("a", "qkv"), ("bc", "proj")):
        for zeros in (False, True):
            options = LinearOptions(main_grad=True, wgrad="blocks" if zeros else "whole")
            case = Case(op, main_grad=torch.float32, options=options)
            given = inputs(rank, 2, case)
            weight = given[name]
            weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, zeros
            before = weight.main_grad.clone()
            run(case, given, fused(case))
            assert weight.grad_added_to_main_grad
            assert weight.grad.shape == weight.shape
            assert not zeros or not weight.grad.any()
            assert not torch.equal(before, weight.main_grad)


def under_autocast(rank: int) -> None:
    """fp32 tensors, computed in bf16: what autocast does for a linear layer."""
    case = Case("a-bc", bias=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = run(case, inputs(rank, 2, case), fused(case))
        plainly = run(case, inputs(rank, 2, case), plain(case, same_blocks=True))
    assert ours["y"].dtype == torch.bfloat16
    assert ours["qkv.grad"].dtype == torch.float32
    for name, value in plainly.items():
        assert torch.equal(ours[name], value), name


def empty(rank: int) -> None:
    for batch, shard in ((BATCH, 0), (0, 4)):
        heads = [torch.zeros(2 * shard, batch, count, D, requires_grad=True) for count in (A, 1, 1)]
        x = torch.zeros(shard, batch, HIDDEN, requires_grad=True)
        qkv = torch.ones(128, HIDDEN, requires_grad=True)
        proj = torch.ones(HIDDEN, 2 * A * D, requires_grad=True)
        o = torch.zeros(2 * shard, batch, A * D, requires_grad=True)
        link = transport()
        for y, shape, leaf in (
            (ops.linear_all_to_all(x, qkv, transport=link), (2 * shard, batch, 64), x),
            (ops.all_to_all_linear(o, proj, transport=link), (shard, batch, HIDDEN), o),
            (
                ops.attention_all_to_all(*heads, transport=link, causal=True),
                (shard, batch, 2 * A * D),
                heads[0],
            ),
            (
                ops.attention_all_to_all_linear(*heads, proj, transport=link, causal=True),
                (shard, batch, HIDDEN),
                heads[1],
            ),
        ):
            assert y.shape == shape
            y.sum().backward()
            assert leaf.grad.shape == leaf.shape
        assert not proj.grad.any()


def without_batch(rank: int) -> None:
    """``[s, H]``, not contiguous: the same as with a batch of one."""
    link = transport()
    x = draw(rank, Case(), HIDDEN, 6).t()
    weight, proj = draw(60, Case(), 96, HIDDEN), draw(70, Case(), HIDDEN, 96)
    flat = ops.linear_all_to_all(x, weight, transport=link)
    batch = ops.linear_all_to_all(x.unsqueeze(1), weight, transport=link)
    assert flat.shape == (12, 48)
    assert torch.equal(flat, batch.squeeze(1))
    back = ops.all_to_all_linear(flat, proj, transport=link)
    assert back.shape == (6, HIDDEN)
    assert torch.equal(back, ops.all_to_all_linear(batch, proj, transport=link).squeeze(1))


def changed_weight(rank: int) -> None:
    """A weight that the optimizer changed before the backward is noticed."""
    for op, name in (("a", "qkv"), ("c", "proj"), ("bc", "proj")):
        case = Case(op)
        given = inputs(rank, 2, case)
        tensors = {n: t for n, t in given.items() if n != "grad"}
        y = layer(case, 2, fused(case), **tensors)
        with torch.no_grad():
            tensors[name].mul_(2)
        with pytest.raises(RuntimeError, match="the weight was modified in place"):
            y.backward(given["grad"])
    compared(rank, [Case("a-bc")])


def twice(rank: int) -> None:
    """A second backward over a graph that is kept gives the same; over another, an error."""
    inputs_of = {"a": ("x",), "b": (), "c": ("o",), "bc": ("q", "k", "v")}
    for op, activations in inputs_of.items():
        for frozen in ((), activations, ("qkv", "proj")):
            case = Case(op, frozen=frozen)
            given = inputs(rank, 2, case)
            tensors = _leaves(given)
            leaves = [tensor for tensor in tensors.values() if tensor.requires_grad]
            y = layer(case, 2, fused(case), **tensors)
            first = torch.autograd.grad(y, leaves, given["grad"], retain_graph=True)
            second = torch.autograd.grad(y, leaves, given["grad"])
            for one, other in zip(first, second, strict=True):
                assert torch.equal(one, other), case
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                torch.autograd.grad(y, leaves, given["grad"])


SMALL = (without_gradients, flagged, under_autocast, empty, without_batch, changed_weight, twice)


@pytest.mark.parametrize("function", SMALL)
def test_small(ranks: Any, function: Callable[[int], None]) -> None:
    ranks(2).run(function)


def refused(rank: int) -> None:
    case = Case("bc")
    given = inputs(rank, 2, case)
    q, k, v, proj = (given[name].detach() for name in ("q", "k", "v", "proj"))
    o, x, qkv = q.flatten(2), torch.zeros(6, 2, HIDDEN), torch.zeros(128, HIDDEN)
    a, c = "linear_all_to_all", "all_to_all_linear"
    b, bc = "attention_all_to_all", "attention_all_to_all_linear"
    one, two = slice(0, 64), slice(64, 128)
    bad: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
        (a, (x, qkv[:127]), {}, "127 rows of the weight are not divisible by the group size 2; sa"),
        (a, (x, qkv), {"rows": [[one]]}, "given for 1 ranks, the group has 2; give one sequence"),
        (a, (x, qkv), {"rows": [[one], [one, two]]}, r"get \[64, 128\] rows of the weight; all"),
        (a, (x, qkv), {"rows": [[one], [slice(65, 129)]]}, r"slice\(65, 129, None\) is no run of"),
        (a, (x, qkv), {"rows": [[one], [slice(0, 128, 2)]]}, "128 with step 1"),
        (c, (o[:11], proj), {}, "sequence length 11 is not divisible by the group size 2; pad it "),
    ]
    k2, v2 = (tensor.repeat(1, 1, 2, 1) for tensor in (k, v))
    for op, more in ((b, ()), (bc, (proj,))):
        bad += [
            (op, (q, k, v, *more), {"dropout": 0.1}, "dropout is 0.1; the fused form has none"),
            (op, (q[:11], k[:11], v[:11], *more), {}, "11 is not divisible .* 2; pad it to 12"),
            (op, (q, k[:6], v[:6], *more), {}, "12 queries and 6 keys; self-attention has as many"),
            (op, (q[:, :, :1], k2, v2, *more), {}, "1 query heads are not a multiple of 2 key"),
            (op, (q.double(), k, v, *more), {}, "cast them to one dtype"),
        ]
    bad += [
        (a, (x[..., :31], qkv), {}, "x has 31 features, the weight takes 32"),
        (a, (x, qkv, qkv[:5, 0]), {}, r"the bias has shape \(5,\); it has to be \(128,\)"),
        (a, (x, qkv.bfloat16()), {}, "cast one of them"),
        (a, (x.to("meta"), qkv), {}, "x is on meta, the group transfers cpu tensors"),
        (c, (o, proj[:, :63]), {}, r"each of 2 ranks has 32 features .* takes 63 in all"),
        (c, (o, proj[0]), {}, r"weight \(64,\); they have to be"),
        (bc, (q, k, v, proj[:, :32]), {}, r"has to be \[H, 64\]"),
        (b, [t.to("meta") for t in (q, k, v)], {}, "q is on meta, the group transfers cpu tensors"),
        (b, [t.int() for t in (q, k, v)], {}, "q is torch.int32; attention needs a floating-point"),
    ]
    link = transport()
    operations = link.operations
    for name, args, keywords, words in bad:
        more = {"causal": True} if "attention" in name else {}
        with pytest.raises((ValueError, TypeError), match=words):
            getattr(ops, name)(*args, transport=link, **keywords, **more)
    assert link.operations == operations, "something was sent"
    without = Case("a-bc", options=LinearOptions(main_grad=True))
    y = layer(without, 2, fused(without), **_leaves(inputs(rank, 2, without)))
    with pytest.raises(RuntimeError, match=r"needs weight\.main_grad"):
        y.sum().backward()
    compared(rank, [case])


def _leaves(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in given.items() if name != "grad"}


def test_bad_input_is_refused_before_anything_is_sent(ranks: Any) -> None:
    ranks(2).run(refused)


def other_rows(rank: int) -> None:
    link = Transport.create(lanes=2, timeout=PATIENT)
    rows = [[slice(0, 64)], [slice(64, 128)]]
    with pytest.raises(MismatchError, match=r"do not call the same: rows: .* here"):
        ops.linear_all_to_all(
            torch.zeros(6, 2, HIDDEN),
            torch.zeros(128, HIDDEN),
            rows=rows if rank else rows[::-1],
            transport=link,
        )


def test_other_rows_on_another_rank_are_noticed(ranks: Any) -> None:
    ranks(2).run(other_rows)


# ----------------------------------------------------------------- order of work


def note_order(patch: pytest.MonkeyPatch, events: list[str]) -> None:
    """Note sends, waits for what arrives, attention and GEMMs from now on, a word each."""

    def note(owner: Any, name: str, word: Callable[..., str | None]) -> None:
        original = getattr(owner, name)

        def logged(*args: Any) -> Any:
            events.extend(filter(None, [word(*args)]))
            return original(*args)

        patch.setattr(owner, name, logged)

    watch_posts(patch, lambda self, one: events.append("send") if one.send else None)
    note(Running, "_wait", lambda self, receives, sends: "wait" if receives else "")
    note(AttentionRuns, "forward", lambda *args: "attend")
    note(AttentionRuns, "backward", lambda *args: "attend")
    note(head_groups._Grouped, "_split", lambda *args: "gemm")
    note(head_groups._Grouped, "_collect", lambda *args: "gemm")
    note(WeightGradient, "add", lambda *args: "wgrad")


def recorded(rank: int, op: str) -> tuple[list[str], list[str]]:
    """What runs while transfers are under way, in the forward and in the backward of an op."""
    case = Case(op, "MHA", causal=False, options=LinearOptions(Schedule(chunks=1)))
    size, events = dist.get_world_size(), []
    transport()
    with pytest.MonkeyPatch.context() as patch:
        note_order(patch, events)
        given = inputs(rank, size, case)
        y = layer(case, size, fused(case), **_leaves(given))
        forward = list(events)
        events.clear()
        y.backward(given["grad"])
    return forward, events


OUT, BACK = ["send"] * 2, "wait"
ORDERS = {
    # What is made leaves at once, own block last; what is used is waited for one by one, own first.
    "a": (["gemm", "send"] * 2 + ["gemm"], OUT + ["gemm", BACK] * 2 + ["gemm", "wgrad"]),
    "b": (["attend", "send"] * 2 + ["attend"], OUT + ["attend", BACK] * 2 + ["attend"]),
    # The weight gradient runs with the last transfers under way.
    "c": (OUT + ["gemm", BACK] * 2 + ["gemm"], ["gemm", "send"] * 2 + ["gemm", "wgrad", "wait"]),
    # The own block is made last and used first: two pieces of work behind the last transfer.
    "bc": (
        ["attend", "send"] * 2 + ["attend", "gemm", "wait", "gemm", "wait", "gemm"],
        ["gemm", "send"] * 2 + ["gemm", "wgrad", "attend", "wait", "attend", "wait", "attend"],
    ),
}


@pytest.mark.parametrize("op", ORDERS)
def test_order_of_work(ranks: Any, op: str) -> None:
    for found in ranks(3).run(recorded, op):
        for events, expected in zip(found, ORDERS[op], strict=True):
            assert events[: len(expected)] == expected
            assert set(events[len(expected) :]) <= {"wait"}


# ---------------------------------------------------------------- planted faults

Fault = Callable[[pytest.MonkeyPatch], None]


def changed_programs(
    patch: pytest.MonkeyPatch, change: Callable[[Program, str], Sequence[Instruction]]
) -> None:
    """Run exchanges with other instructions: ``change(program, name of the operation)``."""
    begin = Transport.begin

    def other(self: Any, program: Program, name: str, *args: Any, **keywords: Any) -> Any:
        if program.rule[0] == "exchange":
            program = replace(program, code=tuple(change(program, name)))
        return begin(self, program, name, *args, **keywords)

    patch.setattr(Transport, "begin", other)


def changed_use(
    patch: pytest.MonkeyPatch, change: Callable[[Work, bool, torch.Tensor, slice], None]
) -> None:
    """Let exchanges do something else with a piece: ``change(use, whether own, piece, run)``."""
    run_ = Running.run

    def other(self: Any, works: Any, **tensors: Any) -> None:
        rank, rows = self.program.rank, self.program.rule[2]
        if "use" in works:
            use = works["use"]
            works = works | {
                "use": lambda piece, run: change(use, run.start // rows == rank, piece, run)
            }
        run_(self, works, **tensors)

    patch.setattr(Running, "run", other)


def columns_of_the_next_group(patch: pytest.MonkeyPatch) -> None:
    matrix = head_groups.LinearOfHeads._matrix
    patch.setattr(
        head_groups.LinearOfHeads,
        "_matrix",
        lambda self, group: matrix(self, (group + 1) % self._size),
    )


def a_block_rounded_before_it_is_added(patch: pytest.MonkeyPatch) -> None:
    """The sums in the dtype of the weight, also in the plain form."""
    patch.setattr(
        head_groups._Grouped, "_zeros", lambda self, shape: self._weight.new_zeros(tuple(shape))
    )


def rows_of_the_last_rank_win(patch: pytest.MonkeyPatch) -> None:
    """Gradients of repeated key heads replace each other."""

    def last(self: Any, whole: torch.Tensor) -> torch.Tensor:
        blocks = whole.view(len(self.bounds), -1, self.features)
        total = whole.new_zeros((blocks.shape[1], self._weight_rows))
        for group, block in enumerate(blocks):
            for rows, columns in self.parts(group):
                total[:, rows] = block[:, columns]
        return total

    patch.setattr(head_groups.HeadRows, "add_up", last)


def used_in_another_place(patch: pytest.MonkeyPatch) -> None:
    """The blocks of the two other ranks are taken for each other's."""

    def other(program: Program, name: str) -> Sequence[Instruction]:
        code, rows = [], program.rule[2]
        for one in program.code:
            if isinstance(one, Compute) and one.work == "use":
                block, start = divmod(one.run.start, rows)
                if block != program.rank:
                    start += (3 - program.rank - block) * rows
                    one = one._replace(run=slice(start, start + one.run.stop - one.run.start))
            code.append(one)
        return code

    changed_programs(patch, other)


def arrivals_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """What is used is what was in the buffer before, played safely: always minus one."""
    changed_use(
        patch,
        lambda use, own, piece, run: use(piece if own else torch.full_like(piece, -1), run),
    )


def own_block_used_twice(patch: pytest.MonkeyPatch) -> None:
    def twice(use: Work, own: bool, piece: torch.Tensor, run: slice) -> None:
        for _ in range(2 if own else 1):
            use(piece, run)

    changed_use(patch, twice)


def another_block_kept(patch: pytest.MonkeyPatch) -> None:
    """A weight gradient is made of a block that was for another rank."""

    def other(program: Program, name: str) -> Sequence[Instruction]:
        next_ = (program.rank + 1) % program.size * program.rule[2]
        theirs = Span("blocks", next_, next_ + program.rule[2])
        return [
            one._replace(source=theirs) if isinstance(one, Copy) else one for one in program.code
        ]

    changed_programs(patch, other)


def statistics_of_the_first_run(patch: pytest.MonkeyPatch) -> None:
    """The backward of every run with the softmax of one of them."""
    kept = AttentionRuns._kept
    seen: dict[Any, Any] = {}

    def same(self: Any, run: slice) -> Any:
        return seen.setdefault((id(self), run.stop - run.start), kept(self, run))

    patch.setattr(AttentionRuns, "_kept", same)


def no_weight_gradient_of_the_last_rows(patch: pytest.MonkeyPatch) -> None:
    add = WeightGradient.add
    patch.setattr(WeightGradient, "add", lambda self, grad, x: add(self, grad[:-1], x[:-1]))


def no_bias(patch: pytest.MonkeyPatch) -> None:
    begin = head_groups.LinearOfHeads.begin_forward
    patch.setattr(head_groups.LinearOfHeads, "begin_forward", lambda self, bias: begin(self, None))


def heads_side_by_side_in_reverse(patch: pytest.MonkeyPatch) -> None:
    swap = collective_transport.all_to_all_rows

    def reverse(blocks: torch.Tensor, group: Any) -> torch.Tensor:
        received = swap(blocks, group)
        return received.view(group.size(), -1).flip(0).view_as(received)

    patch.setattr(collective_transport, "all_to_all_rows", reverse)


def another_order_of_arrivals(patch: pytest.MonkeyPatch) -> None:
    """The projection adds what arrived in another order: the same but for rounding."""
    pieces = blocks.used_pieces
    patch.setattr(blocks, "used_pieces", lambda *given: pieces(*given)[::-1])


def backward_exchanges_nothing(patch: pytest.MonkeyPatch) -> None:
    """A rank uses its own gradients for those of the others."""

    def own(program: Program, name: str) -> Sequence[Instruction]:
        if "given" not in program.rule or not name.endswith("backward"):
            return program.code
        whole = slice(0, program.size * program.rule[2])
        kept, sent = (Span(buffer, whole.start, whole.stop) for buffer in ("received", "blocks"))
        code: list[Instruction] = []
        for one in program.code:
            if isinstance(one, Compute):
                mine = tuple(span._replace(buffer="blocks") for span in one.ins)
                code.append(one._replace(ins=mine))
            elif isinstance(one, Copy):
                code.append(Copy(kept, sent))
        return code

    changed_programs(patch, own)


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        columns_of_the_next_group,
        a_block_rounded_before_it_is_added,
        rows_of_the_last_rank_win,
        used_in_another_place,
        arrivals_not_waited_for,
        own_block_used_twice,
        another_block_kept,
        statistics_of_the_first_run,
        no_weight_gradient_of_the_last_rows,
        no_bias,
        heads_side_by_side_in_reverse,
        another_order_of_arrivals,
        backward_exchanges_nothing,
    )
}


def faulty(rank: int, name: str | None) -> list[str]:
    cases = [Case("a-bc", "MQA"), Case("a-b"), Case("c"), Case("bc", dtype=torch.bfloat16)]
    cases += [Case(op, "MQA", dtype=torch.bfloat16) for op in ("a", "c")]
    with pytest.MonkeyPatch.context() as patch:
        FAULTS.get(name or "", lambda patch: None)(patch)
        return complaints(rank, cases)


@pytest.mark.parametrize("name", [None, *FAULTS])
def test_planted_faults_are_noticed(ranks: Any, name: str | None) -> None:
    found = ranks(3).run(faulty, name)
    assert any(found) == (name is not None), found
