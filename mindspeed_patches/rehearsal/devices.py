"""Stand-ins for an NPU: a device that is the CPU.

**Names.**  Megatron and MindSpeed name the device explicitly in many places (``torch.empty(n,
device="cuda")``, ``tensor.npu()``), and torch_npu's ``transfer_to_npu`` replaces cuda by npu.  A
torch function mode intercepts all of these calls, whoever wrapped them, and substitutes "cpu"; the
few functions that a mode does not intercept are replaced individually.

**Functions of torch.npu.**  Work is complete when a call returns, so streams and events have
nothing to order; the only random generator is the CPU's; memory is not counted.  Hardware
properties are those of one kind of NPU, because MindSpeed selects code by them.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_NAME = re.compile(r"(npu|cuda|privateuseone)(:\d+)?$")
_KEYWORDS = ("device", "device_type", "map_location")


def on_cpu(value: Any, *, is_device: bool = False) -> Any:
    """``value``, or the CPU if it names an NPU or a GPU; as a device, also if it is an index."""
    if isinstance(value, (str, torch.device)) and _NAME.match(str(value)):
        return type(value)("cpu")
    return CPU if is_device and type(value) is int else value


def _translated(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    keywords = {name: on_cpu(kwargs[name], is_device=name in _KEYWORDS) for name in kwargs}
    return tuple(map(on_cpu, args)), keywords


class DevicesAreTheCpu(TorchFunctionMode):
    """A context in which torch treats the devices ``npu`` and ``cuda`` as ``cpu``.

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
            args = (args[0], on_cpu(args[1], is_device=True), *args[2:])
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


_SOC_NAME = "Ascend910B1"
_SOC_VERSION = 220  # of an Ascend 910B, as torch_npu numbers them
_TOTAL_MEMORY = 64 << 30
_TENSORS = ("Float", "Double", "Half", "BFloat16", "Int", "Long", "Short", "Char", "Byte", "Bool")
"""Types such as ``torch.npu.FloatTensor``, by which gradients are sorted into buckets."""


class Finished:
    """A context or the handle of a transfer whose work is always complete."""

    device = CPU
    device_index = stream_id = npu_stream = cuda_stream = priority = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Finished:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def query(self, *_: Any) -> bool:
        return True

    # wait() of an event returns None and that of a transfer True; callers ignore the event's.
    wait = is_completed = synchronize = record = wait_stream = wait_event = query

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def record_event(self, event: Any = None) -> Any:
        return event or Finished()


class _Stream(Finished):
    """A separate class: code that wraps ``synchronize`` of streams must not affect events."""


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


_PROPERTIES = types.SimpleNamespace(
    name=_SOC_NAME,
    total_memory=_TOTAL_MEMORY,
    major=9,
    minor=0,
    vector_core_num=48,
)
_GENERATOR = torch.default_generator
_TRUE = ("is_available", "is_initialized", "is_bf16_supported", "can_device_access_peer")
_NOTHING = (
    *("set_device", "synchronize", "init", "_lazy_init", "set_option", "set_compile_mode"),
    *("set_stream", "seed", "seed_all", "empty_cache"),
    *("reset_peak_memory_stats", "reset_max_memory_allocated"),
)
_NO_BYTES = (
    *("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"),
    "utilization",
)


def _values() -> dict[str, Any]:
    count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return {
        **dict.fromkeys(_TRUE, _always(True)),
        **dict.fromkeys(_NOTHING, _always(None)),
        **dict.fromkeys(_NO_BYTES, _always(0)),
        **dict.fromkeys(("current_stream", "default_stream"), _always(_Stream())),
        "get_device_name": _always(_SOC_NAME),
        "get_soc_version": _always(_SOC_VERSION),
        "get_device_properties": _always(_PROPERTIES),
        "get_device_capability": _always((9, 0)),
        "mem_get_info": _always((_TOTAL_MEMORY, _TOTAL_MEMORY)),
        "memory_stats": lambda *_, **__: defaultdict(int),
        **{f"{kind}Tensor": getattr(torch, f"{kind}Tensor") for kind in _TENSORS},
        "Stream": _Stream,
        **dict.fromkeys(("Event", "stream", "StreamContext", "device", "device_of"), Finished),
        "device_count": _always(count),
        "current_device": _always(int(os.environ.get("LOCAL_RANK", "0"))),
        "_lazy_call": lambda function, **_: function(),
        **dict.fromkeys(("manual_seed", "manual_seed_all"), _GENERATOR.manual_seed),
        "initial_seed": torch.initial_seed,
        "default_generators": (_GENERATOR,) * count,
        "get_rng_state": lambda *_, **__: _GENERATOR.get_state(),
        "set_rng_state": lambda state, *_, **__: _GENERATOR.set_state(state),
        "get_rng_state_all": lambda: [_GENERATOR.get_state()],
        "set_rng_state_all": lambda states: _GENERATOR.set_state(states[0]),
    }


def install() -> None:
    """Install the stand-ins, permanently in this process.

    Before ``torch_npu.contrib.transfer_to_npu`` is imported, which copies ``torch.npu`` onto
    ``torch.cuda``.
    """
    _replace_functions()
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


def _replace_functions() -> None:
    import torch_npu

    patched: Any = torch
    npu: Any = torch_npu.npu
    values = _values()
    for name, value in values.items():
        setattr(npu, name, value)
        # Modules that have already imported these names have their own references.
        for module in (npu.random, npu.memory, npu.streams, npu.utils):
            if hasattr(module, name):
                setattr(module, name, value)
    patched.cuda.default_generators = values["default_generators"]
    patched._C._cuda_setRNGState = values["set_rng_state"]
    # The driver knows which cores a thread may use; data loaders ask it for their workers.
    for name in ("_npu_set_thread_affinity", "_npu_reset_thread_affinity"):
        setattr(torch_npu._C, name, _always(None))
    # The Python binding of CANN's runtime is part of CANN, not of torch_npu.
    acl: Any = types.ModuleType("acl")
    acl.get_soc_name = _always(_SOC_NAME)
    acl.rt = types.SimpleNamespace(get_mem_info=_always((_TOTAL_MEMORY, _TOTAL_MEMORY, 0)))
    sys.modules["acl"] = acl
