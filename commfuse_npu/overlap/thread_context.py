"""Copies torch's state of a thread to a pass that runs in another thread than its caller."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch as dispatch

__all__ = ["Autocast", "ThreadContext", "saved_tensors_hooks", "without_modes"]


def saved_tensors_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The innermost hooks of saved tensors; before torch 2.8 they are not known, and ``None``."""
    top: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks: tuple[Callable[..., Any], Callable[..., Any]] | None = top and top(False)
    return hooks


def without_modes(stack: ExitStack) -> None:
    """Leave function and dispatch modes of this thread until the stack is closed."""
    for kind, modes in _modes():
        for _ in modes:
            stack.callback(kind._push_mode, kind._pop_mode())


def _modes() -> list[tuple[Any, list[Any]]]:
    """Modes of this thread, the outermost first, with the module that pushes them."""
    return [
        (overrides, overrides._get_current_function_mode_stack()),
        (dispatch, dispatch._get_current_dispatch_mode_stack()),
    ]


class Autocast:
    """The autocast state of the thread that creates it, of the CPU and a device.

    Attributes:
        enabled: whether autocast is enabled for either.
    """

    def __init__(self, device: str) -> None:
        self._kinds = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in dict.fromkeys(("cpu", device))
        ]
        self.enabled = any(enabled for *_, enabled in self._kinds)

    def enter(self, stack: ExitStack) -> None:
        """Set it in this thread until the stack is closed."""
        for kind, dtype, enabled in self._kinds:
            stack.enter_context(torch.autocast(kind, dtype, enabled))


class ThreadContext:
    """The thread-local state of torch of the thread that creates it.

    These are the device and its current stream (``wait()`` makes the *current* stream wait, so all
    passes use the same one), gradient, inference and autocast modes, function and dispatch modes,
    and from torch 2.8 on the innermost hooks of saved tensors.

    Args:
        device: ``npu``, ``cuda`` or ``cpu``.
    """

    def __init__(self, device: str) -> None:
        self._device = None if device == "cpu" else torch.get_device_module(device)
        if self._device is not None:
            self._index, self._stream = self._device.current_device(), self._device.current_stream()
        self._gradients = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = Autocast(device)
        self._modes = _modes()
        self._hooks = saved_tensors_hooks()

    def enter(self, stack: ExitStack) -> None:
        """Set it in this thread until the stack is closed."""
        if self._device is not None:
            self._device.set_device(self._index)
            stack.enter_context(self._device.stream(self._stream))
        stack.enter_context(torch.inference_mode(self._inference))
        stack.enter_context(torch.set_grad_enabled(self._gradients))
        if self._autocast.enabled:
            # Then the end of autocast here does not clear the casts that the process keeps.
            torch.autocast_increment_nesting()
            stack.callback(torch.autocast_decrement_nesting)
        self._autocast.enter(stack)
        if self._hooks is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._hooks))
        # Pushed, not entered: to enter a mode a second time may fail or change global state.
        for kind, modes in self._modes:
            for mode in modes:
                kind._push_mode(mode)
                stack.callback(kind._pop_mode)
