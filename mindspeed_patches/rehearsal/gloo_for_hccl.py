"""Uses gloo instead of HCCL, and emulates what HCCL supports and gloo does not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_patches.rehearsal.devices import Finished

__all__ = ["install"]


def _with_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Create the group with gloo, without HCCL's options and without binding it to a device."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple("gloo" if isinstance(a, str) and "ccl" in a else a for a in args)
        if isinstance(kwargs.get("backend"), str):
            kwargs["backend"] = "gloo"
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        return function(*args, **kwargs)

    return call


def _of_a_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Send the content that the tensor has at the call.

    On a device a send is ordered before later use of its memory.  gloo's thread reads the memory
    only when the receive is posted, and Megatron's interleaved schedule frees outputs before that.
    """

    @functools.wraps(function)
    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(tensor.detach().clone(), *args, **kwargs)

    return isend


def _exchange(function: Callable[..., Any]) -> Callable[..., Any]:
    """Send a copy, as :func:`_of_a_copy`: dispatchers free probabilities before they are sent.

    Split sizes may be a tensor, because dispatchers leave them in one if it is not on a device.
    """

    @functools.wraps(function)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        sizes = (
            None if split is None else [int(size) for size in split]
            for split in (output_split_sizes, input_split_sizes)
        )
        return function(output, input.detach().clone(), *sizes, *args, **kwargs)

    return all_to_all_single


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
        rows, gathered = [len(part) for part in tensor_list], torch.cat(tensor_list)
        sent = torch.cat([tensor] * len(rows))
        dist.all_to_all_single(gathered, sent, rows, [len(tensor)] * len(rows), group=group)
        for part, arrived in zip(tensor_list, gathered.split(rows), strict=True):
            part.copy_(arrived)
        return Finished() if async_op else None

    return all_gather


_REPLACED: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "init_process_group": _with_gloo,
    "new_group": _with_gloo,
    "all_gather": _gather_uneven,
    "all_to_all_single": _exchange,
    "isend": _of_a_copy,
}


def install() -> None:
    """Replace the functions, permanently in this process."""
    for name, wrap in _REPLACED.items():
        wrapped = wrap(getattr(dist, name))
        setattr(dist, name, wrapped)
        setattr(dist.distributed_c10d, name, wrapped)
