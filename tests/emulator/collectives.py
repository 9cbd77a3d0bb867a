"""What each collective sends and what it makes of what it receives.

Sums are added in the order ``r-1, r-2, ..., r+1, r`` on rank r and rounded at every addition, as
gloo does and as the programs of the product do, so that their bits can be compared.  HCCL's order
is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tests.emulator import memory, tensor_rules
from tests.emulator.errors import RuleError
from tests.emulator.messages import EVERYONE, Data

Blobs = list[bytes]
"""By place in the group."""


@dataclass
class Collective:
    """One rank's part.

    Attributes:
        name: what it is called, with what all ranks have to agree on.
        send: reads what this rank sends, ``{place in the group: bytes}``; ``None`` if nothing.
        finish: gets what the ranks sent, by place in the group, the own part among it.
        outputs: what is poisoned until then.
        inputs: what outputs may share memory with; these are not poisoned.
    """

    name: str
    send: Callable[[], Data] | None
    finish: Callable[[dict[int, bytes]], None]
    outputs: Sequence[torch.Tensor] = ()
    inputs: Sequence[torch.Tensor] = field(default=())

    def poison(self) -> None:
        kept = {tensor.untyped_storage().data_ptr() for tensor in self.inputs}
        for tensor in self.outputs:
            if tensor.untyped_storage().data_ptr() not in kept:
                memory.poison(tensor)


_COMBINE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


def _operation(name: str, op: Any) -> tuple[str, Callable[..., torch.Tensor]]:
    for known, combine in _COMBINE.items():
        if op == known:
            return str(known).rsplit(".", 1)[-1].lower(), combine
    asked = [key for key, value in dist.ReduceOp.RedOpType.__members__.items() if op == value]
    raise RuleError(
        f"{name}: HCCL has sums, products, maxima and minima, not {', '.join(asked) or op}; add "
        "up and divide yourself"
    )


def _size(tensor: torch.Tensor) -> str:
    return f"{tensor.numel()} x {tensor_rules.short(tensor.dtype)}"


def _fold(
    blobs: dict[int, bytes], rank: int, dtype: torch.dtype, combine: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """The parts of r-1, r-2, ..., r+1, r, one after the other."""
    size = len(blobs)
    total = memory.as_tensor(blobs[(rank - 1) % size], dtype)
    for distance in range(2, size + 1):
        total = combine(total, memory.as_tensor(blobs[(rank - distance) % size], dtype))
    return total


def _to_all(tensor: torch.Tensor) -> Callable[[], Data]:
    return lambda: {EVERYONE: memory.read(tensor)}


def _to_each(tensors: Sequence[torch.Tensor]) -> Callable[[], Data]:
    return lambda: {place: memory.read(tensor) for place, tensor in enumerate(tensors)}


def _into(outputs: Sequence[torch.Tensor]) -> Callable[[dict[int, bytes]], None]:
    def finish(blobs: dict[int, bytes]) -> None:
        for place, output in enumerate(outputs):
            memory.write(output, blobs[place])

    return finish


def _fits(name: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    for one, other in zip(outputs, inputs, strict=True):
        if (one.numel(), one.dtype) != (other.numel(), other.dtype):
            raise RuleError(f"{name}: {_size(other)} do not fit into {_size(one)}")


def _parts(name: str, whole: torch.Tensor, size: int) -> list[torch.Tensor]:
    if whole.numel() % size:
        raise RuleError(f"{name}: {whole.numel()} elements are not divisible by {size} ranks")
    flat = whole.detach().view(-1)
    length = whole.numel() // size
    return [flat[place * length : (place + 1) * length] for place in range(size)]


def all_reduce(tensor: torch.Tensor, op: Any, rank: int, size: int) -> Collective:
    """Element i is added in the order of the rank whose part it is."""
    tensor_rules.check("all_reduce", tensor, reduced=True)
    how, combine = _operation("all_reduce", op)

    def finish(blobs: dict[int, bytes]) -> None:
        cut = [len(blobs[rank]) // tensor.element_size() * p // size for p in range(size + 1)]
        parts = []
        for owner in range(size):
            start, stop = (bound * tensor.element_size() for bound in cut[owner : owner + 2])
            here = {place: blob[start:stop] for place, blob in blobs.items()}
            parts.append(memory.read(_fold(here, owner, tensor.dtype, combine)))
        memory.write(tensor, b"".join(parts))

    name = f"all_reduce ({how}) of {_size(tensor)}"
    return Collective(name, _to_all(tensor), finish, [tensor], [tensor])


def all_gather(outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Collective:
    tensor_rules.check("all_gather", tensor, *outputs)
    _fits("all_gather", outputs, [tensor] * len(outputs))
    name = f"all_gather of {_size(tensor)}"
    return Collective(name, _to_all(tensor), _into(outputs), outputs, [tensor])


def all_gather_single(output: torch.Tensor, tensor: torch.Tensor, size: int) -> Collective:
    tensor_rules.check("all_gather", output)
    return all_gather(_parts("all_gather", output, size), tensor)


def reduce_scatter(
    output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Any, rank: int
) -> Collective:
    tensor_rules.check("reduce_scatter", output, *inputs, reduced=True)
    how, combine = _operation("reduce_scatter", op)
    _fits("reduce_scatter", [output] * len(inputs), inputs)

    def finish(blobs: dict[int, bytes]) -> None:
        memory.write(output, memory.read(_fold(blobs, rank, output.dtype, combine)))

    name = f"reduce_scatter ({how}) of {_size(output)} per rank"
    return Collective(name, _to_each(inputs), finish, [output], inputs)


def reduce_scatter_single(
    output: torch.Tensor, tensor: torch.Tensor, op: Any, rank: int, size: int
) -> Collective:
    tensor_rules.check("reduce_scatter", tensor, reduced=True)
    return reduce_scatter(output, _parts("reduce_scatter", tensor, size), op, rank)


def all_to_all(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Collective:
    """Parts may differ in length; that they fit each other shows when they arrive."""
    tensor_rules.check("all_to_all", *outputs, *inputs)
    name = f"all_to_all of {tensor_rules.short(inputs[0].dtype)}"
    return Collective(name, _to_each(inputs), _into(outputs), outputs, inputs)


def all_to_all_single(
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_sizes: Sequence[int],
    input_sizes: Sequence[int],
    size: int,
) -> Collective:
    tensor_rules.check("all_to_all", output, tensor)

    def cut(whole: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        if not sizes:
            return _parts("all_to_all", whole, size)
        return list(whole.detach().split(list(sizes)))

    return all_to_all(cut(output, output_sizes), cut(tensor, input_sizes))


def broadcast(tensor: torch.Tensor, root: int, rank: int) -> Collective:
    tensor_rules.check("broadcast", tensor)
    name = f"broadcast of {_size(tensor)} from rank {root} of the group"
    if rank == root:
        return Collective(name, _to_all(tensor), lambda blobs: None)
    return Collective(name, None, lambda blobs: memory.write(tensor, blobs[root]), [tensor])


def reduce(tensor: torch.Tensor, op: Any, root: int, rank: int) -> Collective:
    tensor_rules.check("reduce", tensor, reduced=True)
    how, combine = _operation("reduce", op)

    def finish(blobs: dict[int, bytes]) -> None:
        if rank == root:
            memory.write(tensor, memory.read(_fold(blobs, root, tensor.dtype, combine)))

    name = f"reduce ({how}) of {_size(tensor)} to rank {root} of the group"
    return Collective(name, _to_all(tensor), finish, [tensor], [tensor])


def gather(
    outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int, rank: int
) -> Collective:
    tensor_rules.check("gather", tensor, *outputs)
    name = f"gather of {_size(tensor)} to rank {root} of the group"
    finish = _into(outputs) if rank == root else lambda blobs: None
    return Collective(name, lambda: {root: memory.read(tensor)}, finish, outputs, [tensor])


def scatter(
    output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int, rank: int
) -> Collective:
    tensor_rules.check("scatter", output, *inputs)
    name = f"scatter of {_size(output)} from rank {root} of the group"
    send = _to_each(inputs) if rank == root else None
    return Collective(name, send, lambda blobs: memory.write(output, blobs[root]), [output], inputs)


def barrier() -> Collective:
    return Collective("barrier", None, lambda blobs: None)
