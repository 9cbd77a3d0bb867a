"""Compares the gradients of an overlapped step with those of Megatron's order, bit for bit.

``--commfuse-overlap-check`` runs the micro-batches of one step three times, twice in Megatron's
order and once overlapped, and compares checksums of all gradients.  It finds what no list of state
can: a value that one pass reads before another has written it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat, tee
from typing import Any

import torch

from commfuse_npu.overlap import PassState
from commfuse_npu.overlap.states import restore_states, save_states
from mindspeed_patches.fb_overlap.core_versions import StepLayout
from mindspeed_patches.fb_overlap.state_owners import Models

_ELEMENTS = 2**20
"""Elements per checksum, which takes eight bytes each."""


def checked_step(
    in_order: Callable[..., Any],
    overlapped: Callable[..., Any],
    layout: StepLayout,
    states: Sequence[PassState],
) -> tuple[Any, str]:
    """Run a step three times on the same data; the gradients of the last run stay.

    Args:
        in_order: Megatron's schedule.
        overlapped: the same with overlap.
        layout: the models, and the arguments of both.
        states: are restored before each run.

    Returns:
        The losses of the overlapped run, and what was found.

    Raises:
        RuntimeError: on all ranks, if gradients of a rank differ between Megatron's order and the
            overlapped run, and not between two runs in Megatron's order.
    """
    models = layout.models
    runs = in_order, in_order, overlapped
    restore = _snapshot(models, states)
    checksums: list[dict[str, int]] = []
    losses = None
    for run, data in zip(runs, _repeated(layout.step["data_iterator"], len(runs)), strict=True):
        if checksums:
            restore()
            _zero_gradients(models)
        losses = run(**layout.step | {"data_iterator": data})
        checksums.append({name: _checksum(gradient) for name, gradient in _gradients(models)})
    first, again, ours = checksums
    unsteady = _differences(first, again)
    different = _differences(first, ours)
    some_unsteady, some_different = layout.maximum(len(unsteady), len(different))
    if some_unsteady:
        named = f", here of {unsteady[0]}" if unsteady else ""
        return losses, (
            f"check: two runs in Megatron's order have other gradients{named}: the device is not "
            "deterministic, so overlap cannot be checked; use Megatron's --deterministic-mode"
        )
    if some_different:
        named = f"of {different[0]} and {len(different) - 1} others" if different else "of a rank"
        raise RuntimeError(
            f"--commfuse-overlap-check: gradients {named} differ between Megatron's order and the "
            "overlapped step: a pass reads state that another one writes; leave "
            "--commfuse-overlap out, and please report the launch"
        )
    return losses, f"check: {len(ours)} gradients have the same bits as in Megatron's order"


def has_gradients(layout: StepLayout) -> bool:
    """Whether gradients of earlier steps are still being accumulated on a rank; a collective."""
    gradients = [gradient for _, gradient in _gradients(layout.models)]
    some = any(bool(gradient.any()) for gradient in gradients)
    return layout.maximum(int(some)) == [1]


def _repeated(data: Any, times: int) -> Iterable[Any]:
    """For each of some runs, an iterator (or a list of them) over the same items."""
    if isinstance(data, list):
        return map(list, zip(*(_repeated(one, times) for one in data), strict=True))
    # Megatron's iterators have __next__ only.
    return repeat(None, times) if data is None else tee(map(next, repeat(data)), times)


def _snapshot(models: Models, states: Sequence[PassState]) -> Callable[[], None]:
    """A function that restores states, buffers of the models and trackers of auxiliary losses."""
    saved = save_states(states)
    tensors = [(tensor, tensor.detach().clone()) for tensor in _changed_in_place(models)]
    tracker = _tracker()
    names = set(tracker)

    def restore() -> None:
        restore_states(states, saved)
        for tensor, value in tensors:
            tensor.detach().copy_(value)
        for name in set(tracker) - names:
            del tracker[name]

    return restore


def _changed_in_place(models: Models) -> Iterator[torch.Tensor]:
    for model in models:
        for module in model.modules():
            # DistributedDataParallel of Megatron has gradients below the name of the method.
            yield from (buffer for buffer in module._buffers.values() if buffer is not None)
    for entry in _tracker().values():
        yield from (value for value in entry.values() if isinstance(value, torch.Tensor))


def _tracker() -> dict[str, dict[str, Any]]:
    """Sums of auxiliary losses of experts, which Megatron logs."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    for module in (moe_utils, parallel_state):
        get = getattr(module, "get_moe_layer_wise_logging_tracker", None)
        if get is not None:
            tracker: dict[str, dict[str, Any]] = get()
            return tracker
    return {}


def _gradients(models: Models) -> Iterator[tuple[str, torch.Tensor]]:
    for chunk, model in enumerate(models):
        for name, parameter in model.named_parameters():
            gradient = getattr(parameter, "main_grad", None)
            if gradient is None:
                gradient = parameter.grad
            if gradient is not None:
                yield f"chunk {chunk}, {name}", gradient


def _zero_gradients(models: Models) -> None:
    for model in models:
        zero_grad_buffer: Any = getattr(model, "zero_grad_buffer", None)
        if zero_grad_buffer is not None:
            zero_grad_buffer()
        model.zero_grad(set_to_none=True)


def _checksum(tensor: torch.Tensor) -> int:
    """Depends on each bit and on its place."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in tensor.detach().contiguous().view(-1).view(integers).split(_ELEMENTS):
        places = torch.arange(1, len(part) + 1, device=part.device)
        total = total * 1_000_003 + (part.to(torch.int64) * places).sum()
    return int(total)


def _differences(first: dict[str, int], second: dict[str, int]) -> list[str]:
    return [name for name in first | second if first.get(name) != second.get(name)]
