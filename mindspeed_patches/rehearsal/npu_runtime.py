"""Stand-ins for the functions of ``torch.npu``, for a device that is the CPU.

Work is complete when a call returns, so streams and events have nothing to order; the only random
generator is the CPU's; memory is not counted.  Hardware properties are those of one kind of NPU,
because MindSpeed selects code by them.

Installed before ``torch_npu.contrib.transfer_to_npu`` is imported, which copies ``torch.npu`` onto
``torch.cuda``.
"""

from __future__ import annotations

import os
import sys
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Finished", "install"]

_SOC_NAME = "Ascend910B1"
_SOC_VERSION = 220  # of an Ascend 910B, as torch_npu numbers them
_TOTAL_MEMORY = 64 << 30
_TENSORS = ("Float", "Double", "Half", "BFloat16", "Int", "Long", "Short", "Char", "Byte", "Bool")
"""Types such as ``torch.npu.FloatTensor``, by which gradients are sorted into buckets."""


class Finished:
    """A context or the handle of a transfer whose work is always complete."""

    device = torch.device("cpu")
    device_index = stream_id = npu_stream = cuda_stream = priority = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Finished:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def query(self, *_: Any) -> bool:
        return True

    # wait() of an event returns None and that of a transfer True; callers ignore the event's.
    wait = is_completed = synchronize = record = wait_stream = wait_event = query


class _Event(Finished):
    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _Stream(Finished):
    """A separate class: code that wraps ``synchronize`` of streams must not affect events."""

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


_PROPERTIES = types.SimpleNamespace(
    name=_SOC_NAME,
    total_memory=_TOTAL_MEMORY,
    major=9,
    minor=0,
    multi_processor_count=24,
    cube_core_num=24,
    vector_core_num=48,
    L2_cache_size=192 << 20,
)
_GENERATOR = torch.default_generator
_TRUE = ("is_available", "is_initialized", "is_bf16_supported", "can_device_access_peer")
_NOTHING = (
    *("set_device", "synchronize", "init", "_lazy_init", "set_option", "set_compile_mode"),
    *("set_stream", "seed", "seed_all", "empty_cache", "ipc_collect"),
    *("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"),
    *("reset_accumulated_memory_stats", "set_per_process_memory_fraction"),
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
        "memory_summary": _always(""),
        "memory_snapshot": _always([]),
        "memory_stats": lambda *_, **__: defaultdict(int),
        **{f"{kind}Tensor": getattr(torch, f"{kind}Tensor") for kind in _TENSORS},
        "Stream": _Stream,
        "Event": _Event,
        **dict.fromkeys(("stream", "StreamContext", "device", "device_of"), Finished),
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
    """Replace functions of ``torch.npu`` by stand-ins, permanently in this process."""
    import torch_npu

    npu: Any = torch_npu.npu
    values = _values()
    for name, value in values.items():
        setattr(npu, name, value)
        # Modules that have already imported these names have their own references.
        for module in (npu.random, npu.memory, npu.streams, npu.utils):
            if hasattr(module, name):
                setattr(module, name, value)
    patched: Any = torch
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
