"""The model and the optimizer of a training, and SHA-256 over their bits, of one rank or of all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_patches.patching import Function, around


class TrainedState:
    """The model chunks and the optimizer of a training, taken from Megatron's set-up of both."""

    def __init__(self) -> None:
        self.chunks: Sequence[torch.nn.Module] = ()
        self.optimizer: Any = None

    @around
    def setup_model_and_optimizer_wrapper(self, setup: Function, *args: Any, **kwargs: Any) -> Any:
        result = setup(*args, **kwargs)
        self.chunks, self.optimizer = result[:2]
        return result

    def check_trained(self) -> None:
        """Raise unless the script has trained a model."""
        if self.optimizer is None:
            raise RuntimeError(
                "the script never called setup_model_and_optimizer; is it a pretraining script of "
                "MindSpeed-LLM?"
            )


def weight_hashes(chunks: Iterable[torch.nn.Module]) -> dict[str, str]:
    """The hash of each parameter of this rank, by its name."""
    return {
        f"{index}.{name}": _hash([("", parameter)])
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


def optimizer_hash(optimizer: Any) -> str:
    """One hash of the optimizer state of this rank: fp32 main weights, moments, steps."""
    return _hash(_state(optimizer))


def hash_over_ranks(chunks: Iterable[torch.nn.Module], optimizer: Any) -> str:
    """One hash of the weights and optimizers of all ranks, in rank order; a collective."""
    bits = f"{sorted(weight_hashes(chunks).items())} {optimizer_hash(optimizer)}"
    by_rank = [""] * dist.get_world_size()
    dist.all_gather_object(by_rank, bits)
    return hashlib.sha256("".join(by_rank).encode()).hexdigest()


def _state(optimizer: Any) -> Iterator[tuple[str, Any]]:
    # Megatron chains one optimizer per kind of parameter; each wraps an optimizer of torch.
    for index, part in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        inner = getattr(part, "optimizer", None)
        if inner is None:  # no parameters on this rank
            continue
        for group_index, group in enumerate(inner.param_groups):
            for number, parameter in enumerate(group["params"]):
                name = f"{index}.{group_index}.{number}"
                yield name, parameter
                for key, value in sorted(inner.state.get(parameter, {}).items()):
                    yield f"{name}.{key}", value


def _hash(named: Iterable[tuple[str, Any]]) -> str:
    digest = hashlib.sha256()
    for name, value in named:
        if isinstance(value, torch.Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
            # torch refuses view(uint8) of a scalar, but not of a tensor with one element.
            flat = value.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
        else:
            digest.update(f"{name} {value!r} ".encode())
    return digest.hexdigest()
