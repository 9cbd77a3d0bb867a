"""Query-split attention against its plain form and against one process, on gloo processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from commfuse_npu.ops import Documents, LinearOptions
from commfuse_npu.ops.attention import attention_linear_reduce_scatter
from commfuse_npu.ops.attention_runs import AttentionRuns
from commfuse_npu.plan import Schedule
from commfuse_npu.runtime.collective_transport import CollectiveTransport
from commfuse_npu.runtime.transport import Transport
from tests.attention_masks import MASKS, attention, mask_arguments, seen
from tests.limits import PATIENT

HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1)}
"""Query and key heads of a rank."""

Result = dict[str, torch.Tensor]


@lru_cache
def transport(batched: bool = False) -> Transport:
    return Transport.create(lanes=3, timeout=PATIENT, batched=batched)


@dataclass(frozen=True)
class Case:
    """One call, and everything about its inputs."""

    heads: str = "GQA"
    causal: bool = True
    length: int = 24
    batch: int = 2
    features: int = 16
    hidden: int = 32
    dtype: torch.dtype = torch.float32
    scale: float | None = None
    bias: bool = False
    options: LinearOptions = LinearOptions(Schedule(lanes=2, chunks=2))
    attention_grad: bool = True
    weight_grad: bool = True
    main_grad: torch.dtype | None = None
    recompute: bool = False
    batched: bool = False
    mask: str | None = None
    """Of :mod:`tests.attention_masks`, instead of ``causal``."""

    @property
    def kind(self) -> str:
        return self.mask or ("causal" if self.causal else "full")


def draw(seed: int, case: Case, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(case.dtype)


def inputs(rank: int, size: int, case: Case) -> dict[str, torch.Tensor]:
    """The tensors of one rank: its heads, its columns of the weight, its rows of the gradient."""
    queries, keys = HEADS[case.heads]
    tensors = {
        "q": draw(10 + rank, case, case.length, case.batch, queries, case.features),
        "k": draw(20 + rank, case, case.length, case.batch, keys, case.features),
        "v": draw(30 + rank, case, case.length, case.batch, keys, case.features),
        "weight": draw(40 + rank, case, case.hidden, queries * case.features) / 8,
    }
    for name, tensor in tensors.items():
        tensor.requires_grad_(case.weight_grad if name == "weight" else case.attention_grad)
    if case.main_grad is not None:
        start = draw(50 + rank, case, *tensors["weight"].shape)
        tensors["weight"].main_grad = start.to(case.main_grad)
    if case.bias:
        tensors["bias"] = draw(60, case, case.hidden).requires_grad_()
    block = case.length // size
    grad = draw(70, case, case.length, case.batch, case.hidden)
    return tensors | {"grad": grad[rank * block : (rank + 1) * block].contiguous()}


def run(case: Case, given: dict[str, torch.Tensor], call: Callable[..., torch.Tensor]) -> Result:
    """Forward and backward: everything that comes out."""
    tensors = {name: given[name] for name in ("q", "k", "v", "weight", "bias") if name in given}

    def forward(q: torch.Tensor) -> torch.Tensor:
        others = {name: tensor for name, tensor in tensors.items() if name != "q"}
        mask = mask_arguments(case.kind, case.length, case.batch)
        return call(q * 1, **others, **mask, scale=case.scale, options=case.options)

    if case.recompute:
        y = checkpoint(forward, tensors["q"], use_reentrant=False)
    else:
        y = forward(tensors["q"])
    found = {"y": y.detach()}
    if y.requires_grad:
        y.backward(given["grad"])
    for name, tensor in tensors.items():
        if tensor.grad is not None:
            found[f"{name}.grad"] = tensor.grad
    if case.main_grad is not None:
        found["main_grad"] = tensors["weight"].main_grad
    return found


def fused(case: Case) -> Callable[..., torch.Tensor]:
    link = transport(case.batched)
    return lambda *args, **kw: attention_linear_reduce_scatter(*args, **kw, transport=link)


def plain(case: Case, same_blocks: bool) -> Callable[..., torch.Tensor]:
    link = CollectiveTransport(transport(case.batched).group, same_pieces=same_blocks)
    return lambda *args, **kw: attention_linear_reduce_scatter(*args, **kw, transport=link)


def single(rank: int, size: int, case: Case) -> Result:
    """What one process computes in fp64 from the tensors of all."""
    every = [inputs(r, size, replace(case, main_grad=None)) for r in range(size)]
    wide = [{n: t.detach().double().requires_grad_() for n, t in of.items()} for of in every]
    parts = []
    for of in wide:
        heads = (of[name] for name in ("q", "k", "v"))
        out = attention(*heads, seen(case.kind, case.length, case.batch), case.scale)
        parts.append(out.flatten(2) @ of["weight"].t())
    y = sum(parts)
    grad = torch.cat([of["grad"] for of in wide]).detach()
    y.backward(grad)
    block = slice(rank * case.length // size, (rank + 1) * case.length // size)
    found = {"y": y.detach()[block]}
    for name in ("q", "k", "v", "weight"):
        found[f"{name}.grad"] = wide[rank][name].grad
    if case.bias:
        found["y"] = found["y"] + wide[0]["bias"].detach()
        found["bias.grad"] = grad[block].sum((0, 1))
    return found


def error(ours: Result, exact: Result, name: str) -> float:
    """Largest difference, relative to the largest value."""
    value = exact[name]
    return float((ours[name].double() - value).abs().max() / value.abs().max())


def compared(rank: int, cases: list[Case]) -> None:
    size = dist.get_world_size()
    for case in cases:
        ours = run(case, inputs(rank, size, case), fused(case))
        plainly = run(case, inputs(rank, size, case), plain(case, same_blocks=True))
        assert ours.keys() == plainly.keys(), case
        for name, value in plainly.items():
            assert torch.equal(ours[name], value), (case, name)
        unsplit = run(case, inputs(rank, size, case), plain(case, same_blocks=False))
        exact = single(rank, size, case)
        for name in ours:
            if name == "main_grad":
                continue
            found = error(ours, exact, name)
            if case.dtype == torch.float32:
                assert found < 1e-5, (case, name, found)
            else:
                limit = 1.25 * error(unsplit, exact, name) + torch.finfo(case.dtype).eps / 4
                assert found < limit, (case, name, found, limit)


KINDS = [Case(heads, causal) for heads, causal in product(HEADS, (True, False))]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_one_process_and_the_plain_form(ranks, size: int, dtype: torch.dtype) -> None:
    cases = [replace(case, dtype=dtype) for case in KINDS]
    ranks(size).run(compared, cases)


SCHEDULES = (
    Schedule(lanes=1),
    Schedule(lanes=3, chunks=4),
    Schedule(lanes=2, chunks=3, taper=2),
    Schedule(lanes=2, chunks=50),
    Schedule("two_level", lanes=2, chunks=2, node_size=2),
)


@pytest.mark.parametrize("size", [2, 4])
def test_options(ranks, size: int) -> None:
    base = Case()
    cases = [replace(base, options=replace(base.options, schedule=s)) for s in SCHEDULES]
    cases += [
        # Chunks of two and three rows: what the forward keeps of each is for the same rows.
        replace(base, length=5 * size),
        replace(base, options=replace(base.options, wgrad="blocks")),
        replace(base, bias=True, scale=0.3),
        replace(base, recompute=True),
        replace(base, attention_grad=False),
        replace(base, weight_grad=False),
        replace(base, batched=True),
    ]
    half = replace(base, dtype=torch.bfloat16)
    cases += [
        replace(half, options=replace(base.options, wgrad="blocks")),
        replace(half, options=replace(base.options, reduce_dtype=torch.float32)),
    ]
    for main_grad in (torch.float32, torch.bfloat16):
        options = replace(base.options, main_grad=True)
        cases.append(replace(half, main_grad=main_grad, options=options))
    ranks(size).run(compared, cases)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_packed_documents_and_masks_of_the_data(ranks, size: int) -> None:
    cases = [Case(heads, mask=mask) for heads in ("GQA", "MHA") for mask in MASKS]
    cases += [replace(case, batch=1) for case in cases]
    documents = Case(mask="documents")
    cases += [
        replace(documents, recompute=True, bias=True),
        replace(documents, attention_grad=False),
        replace(documents, options=LinearOptions(Schedule(lanes=2, chunks=50))),
        replace(documents, dtype=torch.bfloat16),
        replace(documents, mask="hidden", dtype=torch.bfloat16),
    ]
    ranks(size).run(compared, cases)


def like_causal(rank: int) -> None:
    """One document per sample is the causal mask, bit for bit."""
    found = [
        run(case, inputs(rank, 4, case), fused(case))
        for case in (Case(), Case(mask="one document"))
    ]
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


def test_one_document_is_the_causal_mask(ranks) -> None:
    ranks(4).run(like_causal)


def without_gradients(rank: int) -> None:
    case = Case()
    given = inputs(rank, 2, case)
    with torch.no_grad():
        ours = run(case, given, fused(case))
        plainly = run(case, given, plain(case, same_blocks=True))
    assert ours.keys() == {"y"}
    assert torch.equal(ours["y"], plainly["y"])


def test_without_gradients(ranks) -> None:
    ranks(2).run(without_gradients)


def twice(rank: int) -> None:
    """A second backward over a graph that is kept gives the same; over another, an error."""
    for case in (Case(), Case(attention_grad=False), Case(weight_grad=False)):
        given = inputs(rank, 2, case)
        tensors = [given[name] for name in ("q", "k", "v", "weight")]
        leaves = [tensor for tensor in tensors if tensor.requires_grad]
        y = fused(case)(*tensors, causal=True, options=case.options)
        first = torch.autograd.grad(y, leaves, given["grad"], retain_graph=True)
        second = torch.autograd.grad(y, leaves, given["grad"])
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one, other), case
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(y, leaves, given["grad"])


def test_a_second_backward(ranks) -> None:
    ranks(2).run(twice)


def empty(rank: int) -> None:
    for case in (Case(length=0), Case(batch=0)):
        found = run(case, inputs(rank, 2, case), fused(case))
        assert found["y"].shape == (case.length // 2, case.batch, case.hidden)
        assert not found["weight.grad"].any()


def test_nothing_to_attend_to(ranks) -> None:
    ranks(2).run(empty)


def strided(rank: int) -> None:
    """q, k and v as they come out of a fused projection: parts of one tensor."""
    case = Case("MHA")
    mixed = draw(rank, case, 24, 2, 4, 48).requires_grad_()
    given = inputs(rank, 2, case)
    results = []
    for op in (fused(case), plain(case, same_blocks=True)):
        mixed.grad = None
        q, k, v = mixed.split(16, -1)
        y = op(q, k, v, given["weight"], causal=True, options=case.options)
        y.backward(given["grad"])
        results.append((y.detach(), mixed.grad))
    for ours, plainly in zip(*results, strict=True):
        assert torch.equal(ours, plainly)


def test_parts_of_one_tensor(ranks) -> None:
    ranks(2).run(strided)


def refused(rank: int) -> None:
    case = Case()
    given = inputs(rank, 2, case)
    q, k, v, weight = (given[name] for name in ("q", "k", "v", "weight"))
    for args, keywords, words in (
        ((q, k, v, weight), {"dropout": 0.1}, "dropout is 0.1; the fused form has none"),
        ((q[:23], k[:23], v[:23], weight), {}, "sequence length 23 is not divisible by the group"),
        ((q, k[:12], v[:12], weight), {}, "24 queries and 12 keys; self-attention has as many"),
        ((q[:, :, :3], k, v, weight), {}, "3 query heads are not a multiple of 2 key heads"),
        ((q, k, v, weight[:, :32]), {}, "x has 64 features, the weight takes 32"),
    ):
        with pytest.raises(ValueError, match=words):
            attention_linear_reduce_scatter(*args, causal=True, transport=transport(), **keywords)
    compared(rank, [case])


def test_bad_input_is_refused_before_anything_is_sent(ranks) -> None:
    ranks(2).run(refused)


FAULTS = {
    "a key too few": lambda self, run: slice(0, run.stop - 1 if run.start else run.stop),
    "all keys": lambda self, run: slice(None),
    "keys from the first query on": lambda self, run: slice(run.start, run.stop),
}


def bad_masks(rank: int) -> None:
    case = Case()
    given = inputs(rank, 2, case)
    tensors = [given[name] for name in ("q", "k", "v", "weight")]
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
    compared(rank, [case])


def test_masks_that_do_not_fit_are_refused(ranks) -> None:
    ranks(2).run(bad_masks)


def noticed(rank: int, fault: str) -> bool:
    """With a fault in the fused form only, is it told from the plain form?"""
    case = Case(length=12)
    size = dist.get_world_size()
    expected = run(case, inputs(rank, size, case), plain(case, same_blocks=True))
    with mock.patch.object(AttentionRuns, "_keys", FAULTS[fault]):
        found = run(case, inputs(rank, size, case), fused(case))
    return any(not torch.allclose(found[n], expected[n], atol=1e-3) for n in expected)


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_planted_faults_are_noticed(ranks, fault: str) -> None:
    assert any(ranks(2).run(noticed, fault))
