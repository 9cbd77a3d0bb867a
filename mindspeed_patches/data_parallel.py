"""Data parallelism: the buckets of Megatron's distributed optimizer over our own transfers.

Megatron keeps gradients and parameters in flat buffers, cut into buckets.  Every iteration it sums
each bucket of gradients by a reduce-scatter, steps the optimizer on the shard of each rank, and
fetches the new parameters by an all-gather.  Here the methods that start the two are wrapped; what
they do besides (checks, scaling, the choice of sum or average, when to wait) stays as it was:

==============================  =====================================  =======================
method                          buckets of                             by
==============================  =====================================  =======================
``start_grad_sync``             dense parameters                       ``Buckets``
``start_param_sync``            dense parameters                       ``Buckets``
both                            experts; without the optimizer's       Megatron's or
                                sharding; of a group of one            MindSpeed's own
``finish_...``, hooks                                                  unchanged
==============================  =====================================  =======================

Timeline with both overlap options, buckets ``a, b, c`` in the order of the backward::

    compute  | backward of a | of b    | of c    | wait | meet | step | forward of c | of b  | of a
    links    |               | grads a | grads b | c    |      |      | params c | params b | a

**Nobody steps alone.**  A reduction that fails on one rank may have succeeded on another, which
would then update its shard, and half of the parameters would be new and half old.  So when the
gradients of a model chunk are finished the ranks meet, before the optimizer is called: first those
of the data-parallel group, then those of the model-parallel one.  Each model-parallel group has one
rank of every data-parallel group, so that a rank that does not come keeps everybody from the step.
They meet on every iteration, because nothing else does so for certain: Megatron's gradient norm is
a meeting of all ranks only if ``clip_grad`` is positive, the search for infinities only with a loss
scale.  With clipping it costs next to nothing on a device: the host waits for the gradients there
anyway, to read the norm.  Otherwise it is one such wait per iteration and model chunk.

The parameters need no meeting.  If an all-gather fails, its rank raises, and its transport refuses
all later work; the optimizer's state is complete by then on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from commfuse_npu.ops.buckets import (
    BucketExchange,
    BucketOptions,
    Buckets,
    plain_all_gather_bucket,
    plain_reduce_scatter_bucket,
)
from commfuse_npu.runtime.transport import Transport
from mindspeed_patches.lanes import Form, OverLanes
from mindspeed_patches.wrappers import LinearWrappers

__all__ = ["OPTIONS", "BucketWrappers", "Direction"]

OPTIONS = BucketOptions(last_first=True)
"""Megatron lays parameters out in the reverse order of their use: the last are needed first."""

_GROUPS = "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup"
_MODEL = "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel"


class _Waitable(Protocol):
    def wait(self) -> Any: ...


class _Handles(list[_Waitable]):
    """Exchanges under way: Megatron calls ``wait()`` on the whole, MindSpeed on each of a list."""

    def wait(self) -> None:
        for handle in self:
            handle.wait()


class Direction(OverLanes):
    """Gradients or parameters: what exchanges their buckets, over lanes for these buckets only.

    The lanes are of the group over which parameters are sharded.

    Args:
        name: under which calls are counted.
    """

    def __init__(self, name: str, options: BucketOptions) -> None:
        self.name = name
        self._missing = (
            f"for {name} do not exist: set BucketWrappers.{name}.transport = "
            "Transport.create(get_data_parallel_group(with_context_parallel=True)) on all ranks "
            "after initialize_model_parallel and before the first backward"
        )
        self._options = options
        self._made: tuple[Transport, Buckets] | None = None

    def buckets(self) -> Buckets:
        lanes = self.lanes()
        if self._made is None or self._made[0] is not lanes:
            self._made = lanes, Buckets(lanes, self._options)
        return self._made[1]


class BucketWrappers:
    """The wrappers of data parallelism.

    Args:
        linears: where calls are counted and reasons are logged, under the names ``gradients`` and
            ``parameters``; a call per bucket.
        options: how buckets are exchanged.
        form: ``fused``; or ``plain``, the collective that it equals bit for bit where that adds in
            rank order (see :func:`~commfuse_npu.runtime.collectives.reduce_scatter_rows`).

    Attributes:
        gradients, parameters: the two directions, each with a transport of its own.
    """

    def __init__(
        self,
        linears: LinearWrappers,
        options: BucketOptions = OPTIONS,
        form: Form = "fused",
    ) -> None:
        self.gradients = Direction("gradients", options)
        self.parameters = Direction("parameters", options)
        self._linears = linears
        self._options = options
        self._form = form

    def register(self, manager: Any) -> None:
        """Register with MindSpeed's patch manager, or with our stand-in."""
        manager.register_patch(f"{_GROUPS}.start_grad_sync", self.start_grad_sync_wrapper)
        manager.register_patch(f"{_GROUPS}.start_param_sync", self.start_param_sync_wrapper)
        manager.register_patch(f"{_MODEL}.finish_grad_sync", self.finish_grad_sync_wrapper)

    def start_grad_sync_wrapper(self, start: Callable[..., None]) -> Callable[..., None]:
        """``start_grad_sync()`` of a bucket group.

        Equals, for each bucket::

            grad_data *= gradient_scaling_factor
            reduce_scatter(shard of grad_data, grad_data)      # the sum, or the average
        """

        @functools.wraps(start)
        def start_grad_sync(group: Any, *args: Any, **kwargs: Any) -> None:
            reason = self.obstacle(group, self.gradients)
            if reason is not None:
                self._linears.leave(self.gradients.name, reason, len(group.buckets))
                return start(group, *args, **kwargs)
            config = group.ddp_config
            if group.grad_reduce_handle is not None:
                raise AssertionError(
                    "the gradients of this bucket group are under way already; call "
                    "finish_grad_sync before they are started again"
                )
            check_nan = getattr(config, "check_for_nan_in_grad", False)
            check_large = getattr(config, "check_for_large_grads", False)
            if check_nan or check_large:
                group.check_grads(check_for_nan_or_inf=check_nan, check_for_large=check_large)
            average = getattr(config, "average_in_collective", False)
            handles = _Handles(
                handle
                for bucket in group.buckets
                for handle in self._reduce(
                    bucket.grad_data, average, bucket.gradient_scaling_factor
                )
            )
            self._count(self.gradients, group.buckets)
            if not config.overlap_grad_reduce:
                handles.wait()
            group.grad_reduce_handle = handles if config.overlap_grad_reduce else None
            return None

        return start_grad_sync

    def start_param_sync_wrapper(self, start: Callable[..., None]) -> Callable[..., None]:
        """``start_param_sync(force_sync=False)`` of a bucket group.

        Equals, for each bucket::

            all_gather(param_data, shard of param_data)
        """

        @functools.wraps(start)
        def start_param_sync(group: Any, force_sync: bool = False) -> None:
            reason = self.obstacle(group, self.parameters)
            if reason is not None:
                self._linears.leave(self.parameters.name, reason, len(group.buckets))
                return start(group, force_sync=force_sync)
            if group.param_gather_handle is not None:
                if not force_sync:
                    raise AssertionError(
                        "the parameters of this bucket group are under way already; call "
                        "finish_param_sync before they are started again"
                    )
                group.param_gather_handle.wait()
                group.param_gather_handle = None
                return None
            handles = _Handles(
                handle for bucket in group.buckets for handle in self._gather(bucket.param_data)
            )
            self._count(self.parameters, group.buckets)
            asynchronous = group.ddp_config.overlap_param_gather and not force_sync
            if not asynchronous:
                handles.wait()
            group.param_gather_handle = handles if asynchronous else None
            group.param_gather_dispatched = True
            return None

        return start_param_sync

    def finish_grad_sync_wrapper(self, finish: Callable[..., None]) -> Callable[..., None]:
        """``finish_grad_sync()`` of a model chunk: nobody leaves it before all ranks are there."""

        @functools.wraps(finish)
        def finish_grad_sync(model: Any, *args: Any, **kwargs: Any) -> None:
            finish(model, *args, **kwargs)
            if model.ddp_config.use_distributed_optimizer:
                self._meet()

        return finish_grad_sync

    def _reduce(
        self, gradients: torch.Tensor, average: bool, scale: float
    ) -> Iterable[BucketExchange]:
        if self._form == "fused":
            yield self.gradients.buckets().reduce_scatter(gradients, average=average, scale=scale)
        else:
            plain_reduce_scatter_bucket(
                gradients,
                group=self.gradients.lanes().group,
                average=average,
                scale=scale,
                reduce_dtype=self._options.reduce_dtype,
            )

    def _gather(self, parameters: torch.Tensor) -> Iterable[BucketExchange]:
        if self._form == "fused":
            yield self.parameters.buckets().all_gather(parameters)
        else:
            plain_all_gather_bucket(parameters, group=self.parameters.lanes().group)

    def obstacle(self, group: Any, direction: Direction) -> str | None:
        """Why a bucket group keeps its own transfers, or ``None``.

        That of experts is sharded over what expert parallelism leaves, often over one rank.
        """
        config = group.ddp_config
        if not config.use_distributed_optimizer:
            return "without the distributed optimizer gradients are all-reduced"
        if getattr(config, "num_distributed_optimizer_instances", 1) > 1:
            return "several instances of the distributed optimizer reduce over two groups"
        if group.intra_distributed_optimizer_instance_size == 1:
            return "a data-parallel group of one has nothing to transfer"
        if group.intra_distributed_optimizer_instance_group is not direction.lanes().group:
            return "these parameters are sharded over another group than the dense ones"
        return None

    def _count(self, direction: Direction, buckets: list[Any]) -> None:
        self._linears.calls[direction.name, self._form] += len(buckets)

    def _meet(self) -> None:
        """Return if all ranks of this replica and of its data-parallel groups got here."""
        from megatron.core import parallel_state

        lanes = self.gradients.lanes()
        if lanes.size == 1:
            return  # Nothing of ours has been summed.
        lanes.confirm("finish_grad_sync")
        replica = parallel_state.get_model_parallel_group()
        if replica.size() == 1:
            return
        present = torch.ones(1, device=lanes.device_type)
        try:
            dist.all_reduce(present, group=replica)
            present.item()  # On a device this is where the host waits.
        except RuntimeError as error:
            lanes.fail(f"finish_grad_sync: meeting the model-parallel ranks: {error}")
            raise lanes.error() from error
