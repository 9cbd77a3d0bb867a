"""Uses gloo instead of HCCL, and emulates what HCCL supports and gloo does not."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_patches.rehearsal.devices import Finished


def _content(tensor: torch.Tensor) -> torch.Tensor:
    """What the tensor contains at the call.

    On a device a send is ordered before later use of its memory.  gloo's thread reads the memory
    only when the receive is posted; Megatron's interleaved schedule frees outputs before that, and
    dispatchers free probabilities.
    """
    return tensor.detach().clone()


def _numbers(split: Any) -> list[int] | None:
    """Split sizes, which dispatchers leave in a tensor if it is not on a device."""
    return None if split is None else [int(size) for size in split]


_GROUP: Mapping[str, Callable[[Any], Any]] = {
    "backend": lambda name: name and "gloo",
    **dict.fromkeys(("pg_options", "device_id"), lambda _: None),
}
_ARGUMENTS: Mapping[str, Mapping[str, Callable[[Any], Any]]] = {
    "init_process_group": _GROUP,
    "new_group": _GROUP,
    "isend": {"tensor": _content},
    "all_to_all_single": {
        "input": _content,
        "output_split_sizes": _numbers,
        "input_split_sizes": _numbers,
    },
}
"""What takes the place of arguments of functions of ``torch.distributed``."""


def _with_other_arguments(name: str) -> Callable[..., Any]:
    function = getattr(dist, name)
    changes = _ARGUMENTS[name]
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        for argument in bound.arguments.keys() & changes.keys():
            bound.arguments[argument] = changes[argument](bound.arguments[argument])
        return function(*bound.args, **bound.kwargs)

    return call


def _gather_uneven(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gather parts with different numbers of rows by an all-to-all; waits even if asynchronous.

    With EP and TP the ranks of a tensor-parallel group dispatch different numbers of tokens.
    """

    @functools.wraps(function)
    def all_gather(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if len({part.shape for part in tensor_list}) == 1:
            return function(tensor_list, tensor, group, async_op)
        rows = [len(part) for part in tensor_list]
        gathered = torch.cat(tensor_list)
        sent = torch.cat([tensor] * len(rows))
        dist.all_to_all_single(gathered, sent, rows, [len(tensor)] * len(rows), group=group)
        for part, arrived in zip(tensor_list, gathered.split(rows), strict=True):
            part.copy_(arrived)
        return Finished() if async_op else None

    return all_gather


def install() -> None:
    """Replace the functions, permanently in this process."""
    replaced = {name: _with_other_arguments(name) for name in _ARGUMENTS}
    replaced["all_gather"] = _gather_uneven(dist.all_gather)
    for name, function in replaced.items():
        setattr(dist, name, function)
        setattr(dist.distributed_c10d, name, function)
