"""gloo in the place of HCCL, and the few things that HCCL does and gloo does not."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["install"]


class _Done:
    """The handle of work that was waited for already."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _with_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make the group with gloo, without HCCL's options and without binding it to a device."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple("gloo" if isinstance(a, str) and "ccl" in a else a for a in args)
        if isinstance(kwargs.get("backend"), str):
            kwargs["backend"] = "gloo"
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        return function(*args, **kwargs)

    return call


def _with_average(function: Callable[..., Any]) -> Callable[..., Any]:
    """``ReduceOp.AVG`` as a sum and a division, which gloo lacks; waits even if asked not to."""
    signature = inspect.signature(function)
    output, *_ = signature.parameters

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if given.get("op") != dist.ReduceOp.AVG:
            return function(*args, **kwargs)
        asynchronous = given.pop("async_op", False)
        function(**{**given, "op": dist.ReduceOp.SUM})
        given[output].div_(dist.get_world_size(given.get("group")))
        return _Done() if asynchronous else None

    return call


def _with_host_sizes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Split sizes as numbers: token dispatchers leave them in a tensor if it is not on a device.

    And of a copy, as :func:`_of_a_copy`: dispatchers free probabilities that are under way.
    """

    @functools.wraps(function)
    def call(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        sizes = (
            None if given is None else [int(size) for size in given]
            for given in (output_split_sizes, input_split_sizes)
        )
        return function(output, input.detach().clone(), *sizes, *args, **kwargs)

    return call


def _exchange(sent: Sequence[torch.Tensor], rows: Sequence[int], group: Any) -> torch.Tensor:
    """A part to each rank; the parts of all ranks, of these rows, as one tensor."""
    received = sent[0].new_empty((sum(rows), *sent[0].shape[1:]))
    dist.all_to_all_single(
        received, torch.cat(list(sent)), list(rows), [len(part) for part in sent], group=group
    )
    return received


def _gather_uneven(function: Callable[..., Any]) -> Callable[..., Any]:
    """Parts of different rows, by an exchange; waits even if asked not to.

    With EP and TP the ranks of a tensor parallel group dispatch different numbers of tokens.
    """

    @functools.wraps(function)
    def all_gather(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        rows = [len(part) for part in tensor_list] if tensor.dim() else [1]
        if len(set(rows)) == 1:
            return function(tensor_list, tensor, group, async_op)
        received = _exchange([tensor] * len(rows), rows, group).split(rows)
        for part, arrived in zip(tensor_list, received, strict=True):
            part.copy_(arrived)
        return _Done() if async_op else None

    return all_gather


def _scatter_uneven(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same for sums, which are added in the order of the ranks."""

    @functools.wraps(function)
    def reduce_scatter(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if op != dist.ReduceOp.SUM or len({len(part) for part in input_list}) == 1:
            return function(output, input_list, op, group, async_op)
        received = _exchange(input_list, [len(output)] * len(input_list), group)
        output.copy_(received.unflatten(0, (len(input_list), len(output))).sum(0))
        return _Done() if async_op else None

    return reduce_scatter


def _communicator_names(function: Callable[..., Any]) -> Callable[..., Any]:
    """Answer for the HCCL backend of a group: fused kernels ask it for its communicator's name."""

    @functools.wraps(function)
    def call(group: Any, device: Any) -> Any:
        if torch.device(device).type == "cpu":
            return function(group, device)
        return types.SimpleNamespace(get_hccl_comm_name=lambda *_, **__: group.group_name)

    return call


def _of_a_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Send what the tensor holds at the call.

    On a device a send comes before whatever takes its memory later.  A thread of gloo's reads it
    when the receive is there, and Megatron's interleaved schedule frees outputs before that.
    """

    @functools.wraps(function)
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(tensor.detach().clone(), *args, **kwargs)

    return call


_REPLACED: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "init_process_group": _with_gloo,
    "new_group": _with_gloo,
    "all_gather": _gather_uneven,
    "all_reduce": _with_average,
    "reduce_scatter": _scatter_uneven,
    "reduce_scatter_tensor": _with_average,
    "all_to_all_single": _with_host_sizes,
    "isend": _of_a_copy,
}


def install() -> None:
    """Replace the functions, in this process and for good."""
    for name, wrap in _REPLACED.items():
        wrapped = wrap(getattr(dist, name))
        setattr(dist, name, wrapped)
        setattr(dist.distributed_c10d, name, wrapped)
    group: Any = dist.ProcessGroup
    group._get_backend = _communicator_names(group._get_backend)
