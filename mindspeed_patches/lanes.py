"""Makes the lanes of parallel groups, at the moment when the groups exist.

New process groups have to be made by all processes in the same order, and HCCL connects them at
their first use.  Both belong next to Megatron's own set-up of groups and never into a forward: so
the lanes come right after ``initialize_model_parallel``, and go before ``destroy_model_parallel``.
"""

from __future__ import annotations

import argparse
import functools
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from commfuse_npu.ops.call import AnyTransport
from commfuse_npu.runtime.collective_transport import CollectiveTransport
from commfuse_npu.runtime.collectives import device_backend
from commfuse_npu.runtime.device_streams import side_stream
from commfuse_npu.runtime.order_log import shared_order_log
from commfuse_npu.runtime.transport import Transport
from mindspeed_patches.hccl_buffer import lane_options, of_blocks, of_buckets, of_heads

__all__ = [
    "ContextParallelLanes",
    "DataParallelLanes",
    "Form",
    "Lanes",
    "OverLanes",
    "TensorParallelLanes",
]

Form = Literal["fused", "plain"]
"""``plain``: the collectives, with the GEMMs and blocks of the fused form, which equals it bit for
bit."""

_logger = logging.getLogger(__name__)
_MODULE = "megatron.core.parallel_state"


class OverLanes:
    """What transfers over lanes of its own.

    Attributes:
        transport: the lanes.  Set it when Megatron's groups exist and before the first forward
            (for buckets, the first backward).
    """

    transport: Transport | None = None
    _form: Form = "fused"
    _missing: str
    """Which lanes do not exist, and how they are made by hand."""

    def lanes(self) -> Transport:
        if self.transport is None:
            raise RuntimeError(f"the lanes {self._missing}")
        return self.transport

    def carrier(self) -> AnyTransport:
        """What ops run on: the lanes, or in the plain form the collectives of their group."""
        lanes = self.lanes()
        if self._form == "fused":
            return lanes
        return CollectiveTransport(lanes.group, same_pieces=True)

    def opened(self) -> None:
        """The lanes were made, so that the process has chosen its device."""


class Lanes:
    """Makes the lanes of ``user`` with Megatron's process groups, and gives them up with them.

    Args:
        user: what gets the transport.
        lanes: how many to make per group; ``None``: as many as the default schedule uses.

    Attributes:
        user: see there.
        buffer_megabytes: HCCL's buffer per lane, as large as that of the groups if None.
        order_log: the folder in which the order of transfers is recorded; ``None`` for nowhere.
    """

    _what: str
    _name: str  # Megatron's, of the group
    message_megabytes: Callable[[argparse.Namespace], int | None]
    """HCCL's buffer that carries the longest message at once; ``None`` where nothing says."""

    def __init__(self, user: OverLanes, lanes: int | None) -> None:
        self.buffer_megabytes: int | None = None
        self.order_log: str | None = None
        self.user = user
        self._lanes = lanes

    def _group(self) -> dist.ProcessGroup:
        raise NotImplementedError

    def register(self, manager: Any) -> None:
        """Register with MindSpeed's patch manager, or with our stand-in."""
        manager.register_patch(
            f"{_MODULE}.initialize_model_parallel", self.initialize_model_parallel_wrapper
        )
        manager.register_patch(
            f"{_MODULE}.destroy_model_parallel", self.destroy_model_parallel_wrapper
        )

    def initialize_model_parallel_wrapper(
        self, initialize: Callable[..., None]
    ) -> Callable[..., None]:
        """Make the lanes when all of Megatron's groups are made."""

        @functools.wraps(initialize)
        def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
            initialize(*args, **kwargs)
            self.close()
            self.open(kwargs.get("distributed_timeout_minutes", 30))

        return initialize_model_parallel

    def destroy_model_parallel_wrapper(self, destroy: Callable[..., None]) -> Callable[..., None]:
        """Give the lanes up with the groups that they belong to."""

        @functools.wraps(destroy)
        def destroy_model_parallel(*args: Any, **kwargs: Any) -> None:
            self.close()
            destroy(*args, **kwargs)

        return destroy_model_parallel

    def open(self, timeout_minutes: float) -> None:
        """Make the lanes; a collective of all processes, when Megatron's groups exist."""
        group = self._group()
        _take_side_stream(group)
        log = None
        if self.order_log is not None:
            log = shared_order_log(self.order_log, dist.get_rank(), dist.get_world_size())
        self.user.transport = Transport.create(
            group,
            lanes=self._lanes,
            timeout=timedelta(minutes=timeout_minutes),
            lane_options=lane_options(group, self.buffer_megabytes, self._name),
            order_log=log,
        )
        _logger.info(
            "CommFuse made %d lanes per %s group of %d",
            self.user.transport.lanes,
            self._what,
            group.size(),
        )
        self.user.opened()

    def close(self) -> None:
        """Give up the lanes that there are."""
        transport, self.user.transport = self.user.transport, None
        if transport is not None:
            transport.close()


def _take_side_stream(group: dist.ProcessGroup) -> None:
    """Before the lanes draw from torch_npu's pool: of 32 streams the 33rd is the first again."""
    device, _ = device_backend(dist.get_backend(group))
    if device != "cpu":
        module = torch.get_device_module(device)
        side_stream(torch.device(device, module.current_device()))


class TensorParallelLanes(Lanes):
    """Lanes of the tensor-parallel groups, for the linear layers."""

    _what, _name, message_megabytes = "tensor-parallel", "tp", staticmethod(of_blocks)

    def _group(self) -> dist.ProcessGroup:
        from megatron.core import parallel_state

        return parallel_state.get_tensor_model_parallel_group()


class ContextParallelLanes(Lanes):
    """Lanes of the context-parallel groups: those in which MindSpeed's Ulysses exchanges heads.

    (With ``ulysses_cp_algo``; its hybrid algorithms exchange heads in a part of the group.)
    """

    _what, _name, message_megabytes = "context-parallel", "cp", staticmethod(of_heads)

    def _group(self) -> dist.ProcessGroup:
        from megatron.core import parallel_state

        return parallel_state.get_context_parallel_group()


class DataParallelLanes(Lanes):
    """Lanes of the groups over which the distributed optimizer shards dense parameters.

    They include context-parallel ranks.  Gradients and parameters have lanes of their own, so two
    objects of this class are registered.  With ``--overlap-grad-reduce`` the hooks of the backward
    start the gradients, on a device in the thread of the autograd engine; the parameters are
    started by the main thread.  In interleaved pipelines both may be under way at once, and one
    transport takes calls from a second thread only when nothing is.  Apart from each other, each
    has one thread: gradients are started in the backward and only waited for by the main thread,
    and all of them are waited for before the next backward.  Neither do gradients then wait for
    parameters, which a common order of buckets would make them do.
    """

    _what, _name, message_megabytes = "data-parallel", "dp_cp", staticmethod(of_buckets)

    def _group(self) -> dist.ProcessGroup:
        from megatron.core import parallel_state

        group: dist.ProcessGroup = parallel_state.get_data_parallel_group(
            with_context_parallel=True, partial_data_parallel=True
        )
        return group
