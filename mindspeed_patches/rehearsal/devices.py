"""Makes the device names "npu" and "cuda" mean the CPU.

Megatron and MindSpeed name the device explicitly in many places (``torch.empty(n, device="cuda")``,
``tensor.npu()``), and torch_npu's ``transfer_to_npu`` replaces cuda by npu.  A torch function mode
intercepts all of these calls, whoever wrapped them, and substitutes "cpu"; the few functions that a
mode does not intercept are replaced individually.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["DevicesAreTheCpu", "install", "on_cpu"]

CPU = torch.device("cpu")
_NAME = re.compile(r"(npu|cuda|privateuseone)(:\d+)?$")
_OF_A_TYPE = re.compile(r"\.(npu|cuda)\.")
_KEYWORDS = ("device", "device_type", "map_location")


def on_cpu(value: Any) -> Any:
    """``value``, or the CPU if it names an NPU or a GPU."""
    if isinstance(value, str):
        return "cpu" if _NAME.match(value) else value
    if isinstance(value, torch.device):
        return CPU if _NAME.match(value.type) else value
    return value


def _keyword(name: str, value: Any) -> Any:
    if name not in _KEYWORDS:
        return value
    # A number alone is the index of a device.
    is_index = isinstance(value, int) and not isinstance(value, bool)
    return CPU if is_index else on_cpu(value)


def _translated(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(map(on_cpu, args)), {name: _keyword(name, kwargs[name]) for name in kwargs}


class DevicesAreTheCpu(TorchFunctionMode):
    """A context in which torch treats the devices ``npu`` and ``cuda`` as ``cpu``.

    Inside, ``torch.zeros(1, device="cuda")`` allocates on the CPU, ``tensor.cuda()`` returns the
    tensor itself, and ``tensor.type()`` returns a device type.

    Args:
        device: the device in the names of types: Megatron's optimizers accept
            ``torch.cuda.FloatTensor``, MindSpeed's only ``torch.npu.FloatTensor``.
    """

    def __init__(self, device: str = "npu") -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("npu", "cuda", "pin_memory") and args:
            return args[0]
        if name == "record_stream":
            return None
        if name == "histc" and not args[0].is_floating_point():  # a CPU supports only floats
            return func(args[0].float(), *args[1:], **(kwargs or {})).to(args[0].dtype)
        args, kwargs = _translated(args, kwargs or {})
        kwargs.pop("pin_memory", None)
        if name == "to" and len(args) > 1:
            args = (args[0], _keyword("device", args[1]), *args[2:])
        elif name == "type":
            args = tuple(re.sub(_OF_A_TYPE, ".", a) if isinstance(a, str) else a for a in args)
        result = func(*args, **kwargs)
        # MindSpeed wraps the method type too, in which case the name already has a device.
        if name == "type" and isinstance(result, str) and result.count(".") == 1:
            return result.replace("torch.", f"torch.{self._device}.", 1)
        return result


def _keywords_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _translated(args, kwargs)
        return function(*args, **kwargs)

    return call


def _in_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """Enter the mode again inside a function.

    A mode is inactive while it handles a call, and ``Tensor.backward`` is such a call.  Everything
    in a backward (including forwards of recomputed layers) needs the mode, and so do the hooks of
    saved tensors.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with DevicesAreTheCpu():
            return function(*args, **kwargs)

    return call


def install() -> None:
    """Let device names mean the CPU, permanently in this process."""
    DevicesAreTheCpu().__enter__()
    patched: Any = torch
    backward = _in_mode(patched.autograd.graph._engine_run_backward)
    patched.autograd.graph._engine_run_backward = backward
    patched.autograd._engine_run_backward = backward
    hooks = patched.autograd.graph.saved_tensors_hooks
    with_hooks = hooks.__init__
    hooks.__init__ = lambda self, pack, unpack: with_hooks(self, _in_mode(pack), _in_mode(unpack))
    # These are not torch functions, so the mode does not intercept them.
    autocast = patched.amp.autocast_mode.autocast
    autocast.__init__ = _keywords_on_cpu(autocast.__init__)
    patched.load = _keywords_on_cpu(patched.load)
    # Modes are per thread, and the thread that pins a data loader's memory has none.
    patched.Tensor.pin_memory = lambda tensor, *_, **__: tensor
