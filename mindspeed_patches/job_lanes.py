"""Creates the lanes of parallel groups together with Megatron's groups.

All processes have to create new process groups in the same order, and HCCL connects a group on its
first use.  Both belong to the set-up of groups and must not happen in a forward.  The lanes are
therefore created right after ``initialize_model_parallel`` and closed before
``destroy_model_parallel``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from operator import methodcaller
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from commfuse_npu.ops.call import AnyTransport
from commfuse_npu.plan import Schedule
from commfuse_npu.runtime.collectives import device_backend
from commfuse_npu.runtime.device_streams import side_stream
from commfuse_npu.runtime.hccl_options import buffers_of
from commfuse_npu.runtime.order_log import shared_order_log
from commfuse_npu.runtime.transport import Transport
from mindspeed_patches.patching import around, register

_logger = logging.getLogger(__name__)
_MODULE = "megatron.core.parallel_state"


class LaneGroup(NamedTuple):
    """One kind of Megatron's process groups; ``name`` is that of ``get_nccl_options``."""

    description: str
    name: str
    owner: Callable[[Any], dist.ProcessGroup]


TENSOR_PARALLEL = LaneGroup(
    "tensor-parallel", "tp", methodcaller("get_tensor_model_parallel_group")
)
"""The groups of the linear layers."""

CONTEXT_PARALLEL = LaneGroup("context-parallel", "cp", methodcaller("get_context_parallel_group"))
"""The groups in which MindSpeed's Ulysses exchanges heads with ``ulysses_cp_algo``; its hybrid
algorithms exchange heads within a part of the group."""
DATA_PARALLEL = LaneGroup(
    "data-parallel",
    "dp_cp",
    methodcaller("get_data_parallel_group", with_context_parallel=True, partial_data_parallel=True),
)
"""The groups over which the distributed optimizer shards dense parameters, context-parallel ranks
included.

Gradients and parameters have separate lanes.  With ``--overlap-grad-reduce`` the backward hooks
start the exchange of gradients, on a device in the thread of the autograd engine; the main thread
starts the exchange of parameters.  In interleaved pipelines both can run at once, and a transport
accepts calls from a second thread only when it is idle.  With separate lanes each transport is used
by one thread: gradients are started in the backward, the main thread only waits for them, and all
are complete before the next backward.  Separate lanes also keep gradients from waiting for
parameters, as a common order of buckets would require."""


class LaneUser:
    """Base class of wrappers that run ops over lanes, created and closed with Megatron's groups.

    Args:
        name: of the object whose ``transport`` this is, for messages.
        group: the kind of group that the lanes connect.
        schedule: of the ops, whose lanes are created and whose posts are warmed up.

    Attributes:
        transport: the lanes, or the collectives of their group.  Set it when Megatron's groups
            exist and before the first step, unless the lanes are registered or opened.
        buffer_megabytes: HCCL buffer size per lane; ``None`` for that of the group.
        order_log: the folder in which the order of transfers is recorded; ``None`` for no record.
    """

    def __init__(self, name: str, group: LaneGroup, schedule: Schedule) -> None:
        self.transport: AnyTransport | None = None
        self.group = group
        self.buffer_megabytes: int | None = None
        self.order_log: str | None = None
        self._name = name
        self._schedule = schedule
        self._own_lanes: Transport | None = None

    def lanes(self) -> AnyTransport:
        if self.transport is None:
            raise RuntimeError(
                f"the lanes of the {self.group.description} group do not exist: set "
                f"{self._name}.transport = Transport.create(that group) on all ranks after "
                "initialize_model_parallel and before the first step"
            )
        return self.transport

    def opened(self) -> None:
        """Called once the lanes exist; by then the process has selected its device."""

    def register_lanes(self, manager: Any) -> None:
        """Register with MindSpeed's patch manager, or with our stand-in."""
        changes = self.initialize_model_parallel_wrapper, self.destroy_model_parallel_wrapper
        register(manager, _MODULE, *changes)

    @around
    def initialize_model_parallel_wrapper(
        self, initialize: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        """Create the lanes once all of Megatron's groups exist."""
        initialize(*args, **kwargs)
        self.close()
        self.open(kwargs.get("distributed_timeout_minutes", 30))

    @around
    def destroy_model_parallel_wrapper(
        self, destroy: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        """Close the lanes before Megatron destroys the groups that they connect."""
        self.close()
        destroy(*args, **kwargs)

    def open(self, timeout_minutes: float) -> None:
        """Create the lanes: a collective of all processes, called once Megatron's groups exist."""
        from megatron.core import parallel_state

        group = self.group.owner(parallel_state)
        _take_side_stream(group)
        log = None
        if self.order_log is not None:
            log = shared_order_log(self.order_log, dist.get_rank(), dist.get_world_size())
        self.transport = self._own_lanes = Transport.create(
            group,
            lanes=self._schedule.lanes,
            shape=self._schedule.shape,
            timeout=timedelta(minutes=timeout_minutes),
            lane_options=self._lane_options(group),
            order_log=log,
        )
        _logger.info(
            "CommFuse made %d lanes per %s group of %d",
            self._own_lanes.lanes,
            self.group.description,
            group.size(),
        )
        self.opened()

    def _lane_options(self, group: dist.ProcessGroup) -> Any:
        """``pg_options`` of lanes over ``group``; ``None`` without HCCL."""
        if device_backend(group)[1] != "hccl":
            return None
        if self.buffer_megabytes is not None:
            return buffers_of(self.buffer_megabytes)
        from megatron.core import parallel_state

        # The size that --hccl-group-buffer sets.
        return parallel_state.get_nccl_options(self.group.name, {})

    def close(self) -> None:
        """Close the lanes if they exist."""
        own = self._own_lanes
        self._own_lanes = None
        self.transport = None
        if own is not None:
            own.close()


def _take_side_stream(group: dist.ProcessGroup) -> None:
    """Take the side stream before the lanes take theirs: torch_npu's pool of 32 is used in turn."""
    device, _ = device_backend(group)
    if device != "cpu":
        module = torch.get_device_module(device)
        side_stream(torch.device(device, module.current_device()))
