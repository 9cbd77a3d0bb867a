"""A column-, a row-parallel and a fully sharded layer, with faults in their programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from commfuse_npu.ops import (
    LinearOptions,
    ShardedOptions,
    all_gather_linear,
    linear_reduce_scatter,
    sharded_linear,
)
from commfuse_npu.plan.program import Hold, Instruction, Program, Record, Wait
from commfuse_npu.runtime.collective_transport import CollectiveTransport
from commfuse_npu.runtime.transport import Transport

Code = Sequence[Instruction]
Fault = Callable[[Code], Code]


def leaf(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).requires_grad_()


def layers(link: Transport, options: LinearOptions, *, fused: bool = True) -> list[torch.Tensor]:
    """Two micro-batches: outputs, and the gradients of input and weights."""
    found, sharded = [], ShardedOptions(options.schedule)
    transport = link if fused else CollectiveTransport(link.group, same_pieces=True)
    for batch in range(2):
        x, one, other = leaf(2 * link.rank + batch, 8, 16), leaf(1, 24, 16), leaf(2, 16, 24)
        shard = leaf(3 + link.rank, 8, 16)
        hidden = all_gather_linear(x, one, transport=transport, options=options)
        out = linear_reduce_scatter(hidden, other, transport=transport, options=options)
        out = sharded_linear(out, shard, transport=transport, options=sharded)
        out.backward(leaf(9 + 2 * link.rank + batch, *out.shape).detach())
        # As whoever reads them next gets them.
        leaves = (x, one, other, shard)
        found += [out.detach().clone(), *(tensor.grad.clone() for tensor in leaves)]
    return found


def sound(code: Code) -> Code:
    return code


def missing_event(code: Code) -> Code:
    """The first stream goes on without what the second one does for it, but for the last time."""
    holds = [at for at, one in enumerate(code) if isinstance(one, Hold) and not one.aside]
    return [one for at, one in enumerate(code) if at not in holds[:-1]]


def missing_last_event(code: Code) -> Code:
    return [one for one in code if not isinstance(one, Hold) or one.aside]


def event_of_the_wrong_stream(code: Code) -> Code:
    """It is recorded on the stream that waits for it."""
    return [one._replace(aside=False) if isinstance(one, Record) else one for one in code]


def wait_on_the_wrong_stream(code: Code) -> Code:
    """The side stream waits for what the first one reads."""
    return [one._replace(aside=True) if isinstance(one, Wait) else one for one in code]


def no_wait(code: Code) -> Code:
    return [one for one in code if not isinstance(one, Wait)]


def sends_not_waited_for(code: Code) -> Code:
    """The operation is over while its messages are still being sent."""
    return [one._replace(sends=()) if isinstance(one, Wait) else one for one in code]


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """In this block the programs that are begun have a fault."""
    begin, programs = Transport.begin, dict[Program, Program]()

    def faulty(self: Transport, program: Program, *args: Any, **keywords: Any) -> Any:
        changed = replace(program, code=tuple(fault(program.code)))
        return begin(self, programs.setdefault(program, changed), *args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transport, "begin", faulty)
        yield
    assert fault is sound or any(one.code != it.code for it, one in programs.items())
