"""Layers in chunks: the bits of the plain form, the order of what happens, and misuse by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from commfuse_npu.ops.flow import CausalChunks, Flow, Stage, stripe, unstripe
from commfuse_npu.ops.flow import transfers as flow_transfers
from commfuse_npu.reference.flow import PlainFlow, PlainStage
from commfuse_npu.runtime.agreement import MismatchError, TransportError
from commfuse_npu.runtime.transport import Transport
from tests.distributed.ranks import Ranks
from tests.limits import PATIENT

HIDDEN, HEADS, GROUPS, WIDTH, FEED = 16, 4, 2, 4, 48
"""Of all ranks together: hidden, heads, groups of keys, features of a head, feed-forward."""

BATCH = 2


@lru_cache
def transport() -> Transport:
    return Transport.create(lanes=1, timeout=PATIENT)


class Attention:
    """Norm, projection to q, k and v, causal attention, projection, residual sum."""

    def __init__(self, name: str, given: dict[str, torch.Tensor], ranks: int, chunks: int) -> None:
        self.name, self.given, self.ranks = name, given, ranks
        self.weights = [(given["qkv"], False), (given["proj"], False)]
        self.core = CausalChunks(chunks)

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, (HIDDEN,), self.given["norm"])

    def work(self, flow: Any, arriving: Any, weights: Sequence[Any], chunk: int) -> Any:
        qkv = flow.column(arriving, weights[0], self.given.get("bias"))
        heads, groups = HEADS // self.ranks, GROUPS // self.ranks
        q, k, v = (
            part.unflatten(-1, (-1, WIDTH))
            for part in qkv.split([heads * WIDTH, groups * WIDTH, groups * WIDTH], dim=-1)
        )
        out = self.core.attend(q, k, v)
        return flow.row(out.flatten(-2), weights[1], f"{self.name} {chunk}", arriving)

    def leave(self, y: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + y


class Mlp:
    """Norm, SwiGLU, residual sum."""

    def __init__(self, name: str, given: dict[str, torch.Tensor]) -> None:
        self.name, self.given = name, given
        self.weights = [(given["fc1"], False), (given["fc2"], False)]

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, (HIDDEN,), self.given["norm"])

    def work(self, flow: Any, arriving: Any, weights: Sequence[Any], chunk: int) -> Any:
        gate, up = flow.column(arriving, weights[0]).chunk(2, dim=-1)
        return flow.row(F.silu(gate) * up, weights[1], f"{self.name} {chunk}", arriving)

    def leave(self, y: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + y


def drawn(layers: int, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """Whole weights of attention and MLP in turn, the same on all ranks."""
    draw = torch.Generator().manual_seed(1)

    def some(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=draw) / 4).to(dtype)

    found = []
    for _ in range(layers):
        qkv = (HEADS + 2 * GROUPS) * WIDTH
        attention = {"norm": some(HIDDEN), "qkv": some(qkv, HIDDEN), "bias": some(qkv)}
        found += [
            attention | {"proj": some(HIDDEN, HEADS * WIDTH)},
            {"norm": some(HIDDEN), "fc1": some(2 * FEED, HIDDEN), "fc2": some(HIDDEN, FEED)},
        ]
    return found


def cut(given: dict[str, torch.Tensor], rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """The part of one rank."""

    def rows(x: torch.Tensor, *sizes: int) -> torch.Tensor:
        return torch.cat([part.chunk(ranks)[rank] for part in x.split(sizes)])

    parts = HEADS * WIDTH, GROUPS * WIDTH, GROUPS * WIDTH
    how: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "qkv": lambda x: rows(x, *parts),
        "bias": lambda x: rows(x, *parts),
        "fc1": lambda x: rows(x, FEED, FEED),
        "proj": lambda x: x.chunk(ranks, 1)[rank],
        "fc2": lambda x: x.chunk(ranks, 1)[rank],
    }
    return {
        name: how.get(name, lambda x: x)(x).clone().requires_grad_() for name, x in given.items()
    }


def parts_of(given: list[dict[str, torch.Tensor]], ranks: int, chunks: int) -> list[Any]:
    return [
        Attention(f"attention {at}", one, ranks, chunks) if "qkv" in one else Mlp(f"MLP {at}", one)
        for at, one in enumerate(given)
    ]


def flowed(flow: Flow, hidden: torch.Tensor, parts: Sequence[Any]) -> torch.Tensor:
    stage = Stage(flow, hidden, parts[0])
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        stage.run(part, following)
    return stage.end()


def step(
    given: list[dict[str, torch.Tensor]],
    hidden: torch.Tensor,
    run: Callable[[torch.Tensor, list[Any]], torch.Tensor],
    chunks: int,
    ranks: int,
) -> list[torch.Tensor | None]:
    """Output and all gradients."""
    leaves = [x for one in given for x in one.values()]
    for leaf in [hidden, *leaves]:
        leaf.grad = None
    y = run(hidden, parts_of(given, ranks, chunks))
    (y.float() * torch.arange(y.numel()).view(y.shape).cos()).sum().backward()
    return [y.detach(), hidden.grad, *(leaf.grad for leaf in leaves)]


def setting(
    rank: int, ranks: int, chunks: int, layers: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[list[dict[str, torch.Tensor]], torch.Tensor, torch.Tensor]:
    """Cut weights, this rank's stripes, the whole sequence."""
    draw = torch.Generator().manual_seed(2)
    whole = torch.randn(2 * ranks * chunks, BATCH, HIDDEN, generator=draw).to(dtype)
    mine = stripe(whole, ranks, chunks).chunk(ranks)[rank].clone().requires_grad_()
    return [cut(one, rank, ranks) for one in drawn(layers, dtype)], mine, whole


def same(ours: list[torch.Tensor | None], plain: list[torch.Tensor | None]) -> None:
    for one, other in zip(ours, plain, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def check_bits(rank: int, chunks: int, dtype: torch.dtype, recompute: str) -> None:
    link = transport()
    given, mine, _ = setting(rank, link.size, chunks, dtype=dtype)

    def ours(hidden: torch.Tensor, parts: list[Any]) -> torch.Tensor:
        flow = Flow(link, chunks)
        if not recompute:
            return flowed(flow, hidden, parts)

        def pair(hidden: torch.Tensor, at: int) -> torch.Tensor:
            # A layer that runs again needs attention anew.
            again = parts_of(given, link.size, chunks)[at : at + 2]
            return flowed(flow, hidden, again)

        for at in range(0, len(parts), 2):
            hidden = checkpoint(pair, hidden, at, use_reentrant=recompute == "reentrant")
        return hidden

    def plain(hidden: torch.Tensor, parts: list[Any]) -> torch.Tensor:
        stage = PlainStage(PlainFlow(link.group, chunks), hidden)
        for part in parts:
            stage.run(part)
        return stage.end()

    found = step(given, mine, ours, chunks, link.size)
    same(found, step(given, mine, plain, chunks, link.size))
    assert not any(x is None or x.isnan().any() for x in found)
    # A checkpoint that stops early leaves transfers, which the next forward would finish.
    Flow(link, chunks).check_none_open()


def one_process(given: list[dict[str, torch.Tensor]], hidden: torch.Tensor) -> torch.Tensor:
    """The whole layers over the whole sequence, in its own order."""
    for one in given:
        x = F.rms_norm(hidden, (HIDDEN,), one["norm"])
        if "qkv" in one:
            qkv = (x @ one["qkv"].t() + one["bias"]).unflatten(-1, (-1, WIDTH)).permute(1, 2, 0, 3)
            q, k, v = qkv.split([HEADS, GROUPS, GROUPS], dim=1)
            k, v = (of.repeat_interleave(HEADS // GROUPS, dim=1) for of in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            hidden = hidden + out.permute(2, 0, 1, 3).flatten(2) @ one["proj"].t()
        else:
            gate, up = (x @ one["fc1"].t()).chunk(2, dim=-1)
            hidden = hidden + (F.silu(gate) * up) @ one["fc2"].t()
    return hidden


def check_against_one_process(rank: int, chunks: int) -> None:
    link = transport()
    ranks = link.size
    given, mine, whole = setting(rank, ranks, chunks, dtype=torch.float64)
    everything = [
        {name: x.clone().requires_grad_() for name, x in one.items()}
        for one in drawn(2, torch.float64)
    ]
    whole.requires_grad_()
    y = one_process(everything, whole)
    weights = torch.arange(y.numel(), dtype=y.dtype).view(y.shape).cos()
    (y * weights).sum().backward()
    ours = flowed(Flow(link, chunks), mine, parts_of(given, ranks, chunks))
    (ours * stripe(weights, ranks, chunks).chunk(ranks)[rank]).sum().backward()
    assert whole.grad is not None
    for got, want in ((ours, y), (mine.grad, whole.grad)):
        torch.testing.assert_close(got, stripe(want, ranks, chunks).chunk(ranks)[rank])
    for one, all_of_it in zip(given, everything, strict=True):
        grads = {name: x.grad for name, x in all_of_it.items()}
        for name, want in cut(grads, rank, ranks).items():
            got = one[name].grad
            if name == "norm":  # of this rank's rows alone
                got = got.clone()
                torch.distributed.all_reduce(got)
            # Weight gradients of chunks are summed in fp32.
            torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("size", "chunks"), [(1, 2), (2, 3), (2, 5)])
def test_against_one_process_in_fp64(ranks: Callable[[int], Ranks], size: int, chunks: int) -> None:
    ranks(size).run(check_against_one_process, chunks)


def check_stripes(rows: int, ranks: int, chunks: int) -> None:
    x = torch.arange(rows)
    one = rows // (ranks * chunks)
    want = [
        j * (rows // chunks) + r * one + i
        for r in range(ranks)
        for j in range(chunks)
        for i in range(one)
    ]
    assert stripe(x, ranks, chunks).tolist() == want
    assert unstripe(stripe(x, ranks, chunks), ranks, chunks).tolist() == x.tolist()


def test_stripes() -> None:
    check_stripes(24, 2, 3)
    check_stripes(24, 3, 4)
    wide = torch.arange(48).view(2, 24)
    assert torch.equal(stripe(wide, 2, 3, dim=1)[0], stripe(wide[0], 2, 3))
    with pytest.raises(ValueError, match=r"20 rows cannot be cut into 6 equal stripes.*to 24"):
        stripe(torch.arange(20), 2, 3)


def watched(rank: int, chunks: int) -> list[str]:
    """What one rank begins, ends and multiplies."""
    link, events = transport(), []
    given, mine, _ = setting(rank, link.size, chunks, layers=1)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("begin", "end"):
            kept = getattr(Flow, name)

            def call(
                flow: Flow, transfer: Any, *args: Any, name: str = name, kept: Any = kept
            ) -> Any:
                events.append(f"{name} {transfer.name}")
                return kept(flow, transfer, *args)

            patch.setattr(Flow, name, call)
        kept_add = flow_transfers.Weight.add

        def add(weight: Any, grad: torch.Tensor, x: torch.Tensor) -> None:
            events.append(f"wgrad of {x.shape[-1]} inputs")
            kept_add(weight, grad, x)

        patch.setattr(flow_transfers.Weight, "add", add)
        y = flowed(Flow(link, chunks), mine, parts_of(given, link.size, chunks))
        events.append("backward")
        y.sum().backward()
    return events


def test_what_is_under_way_when(ranks: Callable[[int], Ranks]) -> None:
    one, other = ranks(2).run(watched, 3)
    assert one == other
    forward, backward = one[: one.index("backward")], one[one.index("backward") + 1 :]
    # A chunk is scattered while the next one is worked on, and gathered while the one after is.
    for chunk in range(2):
        after = forward.index(f"begin scatter of attention 0 {chunk + 1}")
        assert after < forward.index(f"end scatter of attention 0 {chunk}")
    gathered = forward.index("begin gather of chunk 0 before MLP 1")
    assert gathered < forward.index("begin scatter of attention 0 2")
    late = forward.index("begin gather of chunk 2 before MLP 1")
    assert forward.index("begin scatter of MLP 1 0") < late
    assert late < forward.index("begin scatter of MLP 1 1")
    assert forward.index("end gather of chunk 2 before MLP 1") > forward.index(
        "begin scatter of MLP 1 1"
    )
    # The mirror image: what was begun last is ended first, by the node at its other end.
    once = [event for event in backward if "again" not in event and "wgrad" not in event]
    mirrored = [
        f"{'end' if event.startswith('begin') else 'begin'} {event.split(' ', 1)[1]}"
        for event in reversed(forward)
    ]
    assert once == mirrored
    # Each input is gathered again behind dgrad of the row-parallel layer, for a weight gradient.
    assert sum("begin" in event and "again" in event for event in backward) == 6
    assert backward.count(f"wgrad of {HIDDEN} inputs") == 6
    for chunk in range(3):
        again = f"gather of chunk {chunk} before MLP 1, again"
        assert backward.index(f"begin {again}") < backward.index(
            f"begin gather of chunk {chunk} before MLP 1"
        )
        assert backward.index(f"begin gather of chunk {chunk} before MLP 1") < backward.index(
            f"end {again}"
        )


def check_no_grad(rank: int) -> None:
    link = transport()
    given, mine, _ = setting(rank, link.size, 3)
    y = flowed(Flow(link, 3), mine, parts_of(given, link.size, 3))
    with torch.no_grad():
        again = flowed(Flow(link, 3), mine, parts_of(given, link.size, 3))
    assert torch.equal(y, again)
    assert again.grad_fn is None
    y.sum().backward()


def check_frozen(rank: int) -> None:
    """A frozen weight has no product, and nothing is gathered again for it."""
    link = transport()
    given, mine, _ = setting(rank, link.size, 3, layers=1)
    whole, _, _ = setting(rank, link.size, 3, layers=1)
    for one in (given[0]["qkv"], given[1]["fc2"]):
        one.requires_grad_(False)
    (flowed(Flow(link, 3), mine, parts_of(whole, link.size, 3)) ** 2).sum().backward()
    want, mine.grad = mine.grad, None
    (flowed(Flow(link, 3), mine, parts_of(given, link.size, 3)) ** 2).sum().backward()
    assert torch.equal(mine.grad, want)
    assert given[0]["qkv"].grad is None
    assert given[1]["fc2"].grad is None
    for at, name in ((0, "proj"), (1, "fc1"), (0, "norm"), (0, "bias")):
        assert torch.equal(given[at][name].grad, whole[at][name].grad)


def check_twice(rank: int) -> None:
    """A graph that is kept is gone through again."""
    link = transport()
    given, mine, _ = setting(rank, link.size, 2, layers=1)
    y = flowed(Flow(link, 2), mine, parts_of(given, link.size, 2)).sum()
    y.backward(retain_graph=True)
    once = [mine.grad.clone(), *(x.grad.clone() for one in given for x in one.values())]
    y.backward()
    twice = [mine.grad, *(x.grad for one in given for x in one.values())]
    for one, two in zip(once, twice, strict=True):
        assert torch.equal(one * 2, two)


def check_main_grad(rank: int) -> None:
    """Products go into ``main_grad``, over micro-batches, and hooks see a gradient once."""
    link = transport()
    given, mine, _ = setting(rank, link.size, 3, layers=1, dtype=torch.bfloat16)
    fused, _, _ = setting(rank, link.size, 3, layers=1, dtype=torch.bfloat16)
    hooks = []
    for one in fused:
        for name in set(one) & {"qkv", "proj", "fc1", "fc2"}:
            one[name].main_grad = torch.zeros_like(one[name], dtype=torch.float32)
            one[name].grad_added_to_main_grad = False
            one[name].register_post_accumulate_grad_hook(lambda x: hooks.append(tuple(x.shape)))
    parts = parts_of(fused, link.size, 3)
    for part in parts:
        part.weights = [(weight, True) for weight, _ in part.weights]
    flowed(Flow(link, 3), mine, parts).sum().backward()
    flowed(Flow(link, 3), mine, parts_of(given, link.size, 3)).sum().backward()
    assert len(hooks) == 4
    for one, other in zip(given, fused, strict=True):
        for name in set(one) & {"qkv", "proj", "fc1", "fc2"}:
            assert other[name].grad_added_to_main_grad
            assert torch.equal(other[name].main_grad.bfloat16(), one[name].grad)


@pytest.mark.parametrize("check", [check_no_grad, check_frozen, check_twice, check_main_grad])
def test_graphs(ranks: Callable[[int], Ranks], check: Callable[[int], None]) -> None:
    ranks(2).run(check)


class TwoConsumers(Mlp):
    """An MLP that looks at a token."""

    def work(self, flow: Any, arriving: Any, weights: Sequence[Any], chunk: int) -> Any:
        leaving = super().work(flow, arriving, weights, chunk)
        return leaving._replace(token=leaving.token * 1.0)


class ThroughACheckpoint(Mlp):
    """An MLP that is recomputed between the two ends of its transfers."""

    def work(self, flow: Any, arriving: Any, weights: Sequence[Any], chunk: int) -> Any:
        made: list[Any] = []

        def recomputed(token: torch.Tensor) -> torch.Tensor:
            again = arriving._replace(token=token)
            made.append(super(ThroughACheckpoint, self).work(flow, again, weights, chunk))
            return made[-1].token

        token = checkpoint(recomputed, arriving.token, use_reentrant=True)
        return made[0]._replace(token=token)


def misuse(rank: int, how: str) -> None:
    link = transport()
    given, mine, _ = setting(rank, link.size, 2, layers=1)
    parts = parts_of(given, link.size, 2)
    if how == "token":
        parts[1] = TwoConsumers("MLP", given[1])
        flowed(Flow(link, 2), mine, parts).sum().backward()
    if how == "checkpoint":
        parts[1] = ThroughACheckpoint("MLP", given[1])
        flowed(Flow(link, 2), mine, parts).sum().backward()
    if how == "pruned":
        y = flowed(Flow(link, 2), mine, parts).sum()
        torch.autograd.grad(y, given[1]["fc2"])
        flowed(Flow(link, 2), mine, parts_of(given, link.size, 2))
    if how == "error":
        parts[1].enter = lambda hidden: hidden / torch.ones(3)
        with pytest.raises(RuntimeError, match="must match the size"):
            flowed(Flow(link, 2), mine, parts)
        flowed(Flow(link, 2), mine, parts_of(given, link.size, 2))
    if how == "chunks":
        Stage(Flow(link, 2 + rank * 2), mine, parts[0])
    if how == "rows":
        Stage(Flow(link, 3), mine, parts[0])
    if how == "one":
        Flow(link, 1)


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("token", RuntimeError, "token of the scatter of MLP 1 got a gradient from elsewhere"),
        ("checkpoint", RuntimeError, "got a gradient from elsewhere|was waited for before it was"),
        ("pruned", TransportError, "begun and never ended: .*whole backwards"),
        ("error", TransportError, "never ended: gather of chunk 1 before|never ended: scatter of"),
        ("chunks", MismatchError, "chunks: 2 here, 4 there"),
        ("rows", ValueError, "4 rows per rank cannot be cut into 3 equal chunks"),
        ("one", ValueError, "a flow of 1 chunks"),
    ],
)
def test_misuse_by_name(
    ranks: Callable[[int], Ranks], how: str, kind: type[Exception], words: str
) -> None:
    outcomes = ranks(2).outcomes(misuse, how)
    assert isinstance(outcomes[0].error, kind), outcomes[0].trace
    assert re.search(words, str(outcomes[0].error))


@pytest.mark.parametrize("recompute", ["", "reentrant", "not reentrant"])
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_bits_of_the_plain_form(ranks: Callable[[int], Ranks], chunks: int, recompute: str) -> None:
    ranks(2).run(check_bits, chunks, torch.float32, recompute)


def test_bits_in_bf16(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).run(check_bits, 3, torch.bfloat16, "")
