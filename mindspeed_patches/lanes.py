"""Makes the lanes of parallel groups, at the moment when the groups exist.

All processes have to make new process groups in the same order, and HCCL connects them at their
first use.  Both belong next to Megatron's own set-up of groups and never into a forward: so the
lanes come right after ``initialize_model_parallel``, and go before ``destroy_model_parallel``.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.ops.call import AnyTransport
from commfuse_npu.runtime.collectives import device_backend
from commfuse_npu.runtime.device_streams import side_stream
from commfuse_npu.runtime.order_log import shared_order_log
from commfuse_npu.runtime.transport import Transport
from mindspeed_patches.hccl_buffer import lane_options, of_blocks, of_buckets, of_heads
from mindspeed_patches.patching import around

__all__ = [
    "CONTEXT_PARALLEL",
    "DATA_PARALLEL",
    "TENSOR_PARALLEL",
    "LaneGroup",
    "LaneUser",
    "Lanes",
]

_logger = logging.getLogger(__name__)
_MODULE = "megatron.core.parallel_state"


@dataclass(frozen=True)
class LaneGroup:
    """Megatron's groups of one kind.

    Attributes:
        what: in messages.
        name: Megatron's, in ``get_nccl_options``.
        of: gets the group of this rank from ``parallel_state``.
        message_megabytes: HCCL's buffer that carries the longest message at once; ``None`` where
            the arguments do not say.
    """

    what: str
    name: str
    of: Callable[[Any], dist.ProcessGroup]
    message_megabytes: Callable[[argparse.Namespace], int | None]


TENSOR_PARALLEL = LaneGroup(
    "tensor-parallel", "tp", lambda state: state.get_tensor_model_parallel_group(), of_blocks
)
"""For the linear layers."""

CONTEXT_PARALLEL = LaneGroup(
    "context-parallel", "cp", lambda state: state.get_context_parallel_group(), of_heads
)
"""The groups in which MindSpeed's Ulysses exchanges heads with ``ulysses_cp_algo``; its hybrid
algorithms exchange heads in a part of the group."""

DATA_PARALLEL = LaneGroup(
    "data-parallel",
    "dp_cp",
    lambda state: state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=True
    ),
    of_buckets,
)
"""The groups over which the distributed optimizer shards dense parameters, context-parallel ranks
included.

Gradients and parameters have lanes of their own.  With ``--overlap-grad-reduce`` the hooks of the
backward start the gradients, on a device in the thread of the autograd engine; the main thread
starts the parameters.  In interleaved pipelines both may be under way at once, and a transport
takes calls from a second thread only when nothing is.  On lanes of its own each has one thread:
gradients are started in the backward and only waited for by the main thread, and all of them are
waited for before the next backward.  Neither do gradients then wait for parameters, which a common
order of buckets would make them do."""


class LaneUser:
    """Runs ops over lanes.

    Attributes:
        transport: the lanes, or the collectives of their group.  Set it when Megatron's groups
            exist and before the first forward (for buckets, the first backward).
    """

    transport: AnyTransport | None = None
    _missing: str
    """Which lanes do not exist, and how to make them by hand."""

    def lanes(self) -> AnyTransport:
        if self.transport is None:
            raise RuntimeError(f"the lanes {self._missing}")
        return self.transport

    def opened(self) -> None:
        """The lanes were made, so that the process has chosen its device."""


class Lanes:
    """Makes lanes together with Megatron's process groups, and gives them up with them.

    Args:
        user: gets the transport.
        group: between which ranks.
        lanes: how many to make per group; ``None``: as many as the default schedule uses.

    Attributes:
        user, group: see there.
        buffer_megabytes: HCCL's buffer per lane; ``None``: as large as that of the group.
        order_log: the folder in which the order of transfers is recorded; ``None`` for nowhere.
    """

    def __init__(self, user: LaneUser, group: LaneGroup, lanes: int | None) -> None:
        self.user, self.group = user, group
        self.buffer_megabytes: int | None = None
        self.order_log: str | None = None
        self._lanes = lanes
        self._transport: Transport | None = None

    def register(self, manager: Any) -> None:
        """Register with MindSpeed's patch manager, or with our stand-in."""
        for name in ("initialize_model_parallel", "destroy_model_parallel"):
            manager.register_patch(f"{_MODULE}.{name}", getattr(self, f"{name}_wrapper"))

    @around
    def initialize_model_parallel_wrapper(
        self, initialize: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        """Make the lanes when all of Megatron's groups are made."""
        initialize(*args, **kwargs)
        self.close()
        self.open(kwargs.get("distributed_timeout_minutes", 30))

    @around
    def destroy_model_parallel_wrapper(
        self, destroy: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        """Give the lanes up with the groups that they belong to."""
        self.close()
        destroy(*args, **kwargs)

    def open(self, timeout_minutes: float) -> None:
        """Make the lanes; a collective of all processes, when Megatron's groups exist."""
        from megatron.core import parallel_state

        group = self.group.of(parallel_state)
        _take_side_stream(group)
        log = None
        if self.order_log is not None:
            log = shared_order_log(self.order_log, dist.get_rank(), dist.get_world_size())
        self.user.transport = self._transport = Transport.create(
            group,
            lanes=self._lanes,
            timeout=timedelta(minutes=timeout_minutes),
            lane_options=lane_options(group, self.buffer_megabytes, self.group.name),
            order_log=log,
        )
        _logger.info(
            "CommFuse made %d lanes per %s group of %d",
            self._transport.lanes,
            self.group.what,
            group.size(),
        )
        self.user.opened()

    def close(self) -> None:
        """Give up the lanes that there are."""
        transport, self._transport, self.user.transport = self._transport, None, None
        if transport is not None:
            transport.close()


def _take_side_stream(group: dist.ProcessGroup) -> None:
    """Before the lanes draw from torch_npu's pool: of 32 streams the 33rd is the first again."""
    device, _ = device_backend(dist.get_backend(group))
    if device != "cpu":
        module = torch.get_device_module(device)
        side_stream(torch.device(device, module.current_device()))
