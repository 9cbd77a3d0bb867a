"""The functions of ``torch.npu`` for a device that is the CPU.

Work is done when a call returns, so streams and events have nothing to order; there is one
generator of random numbers, the CPU's; memory is not accounted.  The answers about the hardware are
those of one kind of NPU, because MindSpeed chooses code by them.

Installed before ``torch_npu.contrib.transfer_to_npu`` is imported, which copies ``torch.npu`` onto
``torch.cuda``.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["install"]

_SOC_NAME = "Ascend910B1"
_SOC_VERSION = 220  # of an Ascend 910B, as torch_npu numbers them
_TOTAL_MEMORY = 64 << 30


class _Stream:
    """A stream whose work is done when it is issued."""

    device = torch.device("cpu")
    device_index = 0
    stream_id = 0
    npu_stream = 0
    cuda_stream = 0
    priority = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class _Event:
    """An event that has happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _Nothing:
    """A context that changes nothing: there is one device and one stream."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


@contextlib.contextmanager
def _same_stream(*_: Any, **__: Any) -> Iterator[None]:
    yield


class _Generators:
    """``default_generators``: the CPU's generator, whichever device is asked for."""

    def __getitem__(self, device: int) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.default_generator.set_state(state)


def _hardware() -> dict[str, Any]:
    properties = types.SimpleNamespace(
        name=_SOC_NAME,
        total_memory=_TOTAL_MEMORY,
        major=9,
        minor=0,
        multi_processor_count=24,
        cube_core_num=24,
        vector_core_num=48,
        L2_cache_size=192 << 20,
    )
    return {
        "is_available": _always(True),
        "is_initialized": _always(True),
        "is_bf16_supported": _always(True),
        "can_device_access_peer": _always(True),
        "device_count": _always(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
        "current_device": _always(int(os.environ.get("LOCAL_RANK", "0"))),
        "get_device_name": _always(_SOC_NAME),
        "get_soc_version": _always(_SOC_VERSION),
        "get_device_properties": _always(properties),
        "get_device_capability": _always((9, 0)),
        "utilization": _always(0),
        **dict.fromkeys(
            (
                *("set_device", "synchronize", "init", "_lazy_init"),
                *("set_option", "set_compile_mode", "ipc_collect"),
            ),
            _always(None),
        ),
        "_lazy_call": lambda function, **_: function(),
    }


def _streams() -> dict[str, Any]:
    return {
        "Stream": _Stream,
        "Event": _Event,
        "stream": _same_stream,
        "StreamContext": _Nothing,
        "device": _Nothing,
        "device_of": _Nothing,
        "current_stream": _always(_Stream()),
        "default_stream": _always(_Stream()),
        "set_stream": _always(None),
    }


def _random_numbers() -> dict[str, Any]:
    return {
        "manual_seed": _manual_seed,
        "manual_seed_all": _manual_seed,
        "seed": _always(None),
        "seed_all": _always(None),
        "initial_seed": torch.initial_seed,
        "default_generators": _Generators(),
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        "get_rng_state_all": lambda: [_get_rng_state()],
        "set_rng_state_all": lambda states: _set_rng_state(states[0]),
    }


def _memory() -> dict[str, Any]:
    numbers = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    resets = (
        "reset_peak_memory_stats",
        "reset_max_memory_allocated",
        "reset_max_memory_cached",
        "reset_accumulated_memory_stats",
        "set_per_process_memory_fraction",
        "empty_cache",
    )
    return {
        **dict.fromkeys(numbers, _always(0)),
        **dict.fromkeys(resets, _always(None)),
        "mem_get_info": _always((_TOTAL_MEMORY, _TOTAL_MEMORY)),
        "memory_stats": lambda *_, **__: defaultdict(int),
        "memory_summary": _always(""),
        "memory_snapshot": _always([]),
    }


def _tensor_types() -> dict[str, Any]:
    """``torch.npu.FloatTensor`` and its like, by which gradients are sorted into buckets."""
    kinds = ("Float", "Double", "Half", "BFloat16", "Int", "Long", "Short", "Char", "Byte", "Bool")
    return {f"{kind}Tensor": getattr(torch, f"{kind}Tensor") for kind in kinds}


def _pyacl() -> types.ModuleType:
    """The Python binding of CANN's runtime, which comes with CANN and not with torch_npu."""
    acl: Any = types.ModuleType("acl")
    acl.get_soc_name = _always(_SOC_NAME)
    acl.rt = types.SimpleNamespace(get_mem_info=_always((_TOTAL_MEMORY, _TOTAL_MEMORY, 0)))
    module: types.ModuleType = acl
    return module


def install() -> None:
    """Give ``torch.npu`` its stand-ins, in this process and for good."""
    import torch_npu

    npu: Any = torch_npu.npu
    values = {**_hardware(), **_streams(), **_random_numbers(), **_memory(), **_tensor_types()}
    for name, value in values.items():
        setattr(npu, name, value)
    # Modules that imported these names before keep their own.
    for module in (npu.random, npu.memory, npu.streams, npu.utils):
        for name, value in values.items():
            if hasattr(module, name):
                setattr(module, name, value)
    patched: Any = torch
    patched.cuda.default_generators = values["default_generators"]
    patched._C._cuda_setRNGState = _set_rng_state
    # Which cores a thread may use is asked of the driver; data loaders do so for their workers.
    for name in ("_npu_set_thread_affinity", "_npu_reset_thread_affinity"):
        setattr(torch_npu._C, name, _always(None))
    sys.modules["acl"] = _pyacl()
