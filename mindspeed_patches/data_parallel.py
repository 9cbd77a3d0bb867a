"""Data parallelism: the buckets of Megatron's distributed optimizer over our own transfers.

Megatron keeps gradients and parameters in flat buffers that are divided into buckets.  In every
iteration it sums each bucket of gradients with a reduce-scatter, updates the shard of each rank in
the optimizer, and collects the new parameters with an all-gather.  This module wraps the methods
that start these two collectives, for dense parameters.  Their other duties (checks, scaling, the
choice of sum or average, when to wait) are unchanged.  Buckets of experts or of a group of one
rank keep the transfers of Megatron or MindSpeed.  A launch without the distributed optimizer is
refused.

Timeline with both overlap options, buckets ``a, b, c`` in the order of the backward::

    compute  | backward of a | of b    | of c    | wait | meet | step | forward of c | of b  | of a
    links    |               | grads a | grads b | c    |      |      | params c | params b | a

**No rank steps alone.**  A reduction that fails on one rank may have succeeded on another.  That
rank would update its shard, and the model would be a mix of new and old parameters.  Therefore all
ranks synchronize once the gradients of a model chunk are complete and before the optimizer runs:
first within the data-parallel group, then within the model-parallel group.  Each model-parallel
group has one rank of every data-parallel group, so one missing rank stops the step everywhere.
This happens in every iteration, because Megatron does not always synchronize all ranks: its
gradient norm does so only if ``clip_grad`` is positive, its search for infinities only with a loss
scale.  With clipping the cost on a device is small: the host waits for the gradients there anyway,
to read the norm.  Without clipping it is one such wait per iteration and model chunk.

The parameters need no synchronization.  If an all-gather fails, its rank raises and its transport
refuses all later work; the optimizer state is complete on every rank by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist

from commfuse_npu.ops import Buckets, LinearOptions
from commfuse_npu.runtime.transport import Transport
from mindspeed_patches.job_lanes import DATA_PARALLEL, LaneUser
from mindspeed_patches.patching import around, register
from mindspeed_patches.wrappers import LinearWrappers

_GROUPS = "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup"
_MODEL = "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel"


class _Handles(list[Any]):
    """Handles of running exchanges: Megatron waits on the list, MindSpeed on each element."""

    def wait(self) -> None:
        for handle in self:
            handle.wait()


class BucketWrappers:
    """The wrappers of data parallelism.

    Args:
        linears: counts buckets and logs reasons under the names ``gradients`` and ``parameters``.
        options: how buckets are exchanged.

    Attributes:
        users: the lanes of ``gradients`` and of ``parameters``, each with a transport of its own
            over the group in which parameters are sharded.
    """

    def __init__(self, linears: LinearWrappers, options: LinearOptions) -> None:
        self._linears = linears
        self._options = options
        self.users = {
            name: LaneUser(f"BucketWrappers.users[{name!r}]", DATA_PARALLEL, options.schedule)
            for name in ("gradients", "parameters")
        }

    def register(self, manager: Any) -> None:
        """Register with MindSpeed's patch manager, or with our stand-in."""
        register(manager, _GROUPS, self.start_grad_sync_wrapper, self.start_param_sync_wrapper)
        register(manager, _MODEL, self.finish_grad_sync_wrapper)

    @around
    def start_grad_sync_wrapper(
        self, start: Callable[..., None], group: Any, *args: Any, **kwargs: Any
    ) -> None:
        """``start_grad_sync()`` of a bucket group.

        Equals, for each bucket::

            grad_data *= gradient_scaling_factor
            reduce_scatter(shard of grad_data, grad_data)      # the sum, or the average
        """
        buckets = self._buckets("gradients", group)
        if buckets is None:
            return start(group, *args, **kwargs)
        config = group.ddp_config
        assert group.grad_reduce_handle is None, "call finish_grad_sync first"
        if config.check_for_nan_in_grad or config.check_for_large_grads:
            group.check_grads(
                check_for_nan_or_inf=config.check_for_nan_in_grad,
                check_for_large=config.check_for_large_grads,
            )
        exchanges = (
            buckets.reduce_scatter(
                bucket.grad_data,
                average=config.average_in_collective,
                scale=bucket.gradient_scaling_factor,
            )
            for bucket in group.buckets
        )
        overlap = config.overlap_grad_reduce
        group.grad_reduce_handle = self._started("gradients", exchanges, overlap)
        return None

    @around
    def start_param_sync_wrapper(
        self, start: Callable[..., None], group: Any, force_sync: bool = False
    ) -> None:
        """``start_param_sync(force_sync=False)``: an ``all_gather`` of each ``param_data``."""
        buckets = self._buckets("parameters", group)
        if buckets is None:
            return start(group, force_sync=force_sync)
        if group.param_gather_handle is not None:
            assert force_sync, "call finish_param_sync first"
            group.param_gather_handle.wait()
            group.param_gather_handle = None
            return None
        exchanges = (buckets.all_gather(bucket.param_data) for bucket in group.buckets)
        overlap = group.ddp_config.overlap_param_gather and not force_sync
        group.param_gather_handle = self._started("parameters", exchanges, overlap)
        group.param_gather_dispatched = True
        return None

    @around
    def finish_grad_sync_wrapper(
        self, finish: Callable[..., None], model: Any, *args: Any, **kwargs: Any
    ) -> None:
        """``finish_grad_sync()`` of a model chunk: returns once all ranks have called it."""
        finish(model, *args, **kwargs)
        self._meet()

    def obstacle(self, group: Any, name: str) -> str | None:
        """Why a bucket group keeps its own transfers, or ``None`` if it is fused.

        Buckets of experts are sharded over the ranks that expert parallelism leaves, often one.
        """
        if group.intra_distributed_optimizer_instance_size == 1:
            return "a data-parallel group of one has nothing to transfer"
        if group.intra_distributed_optimizer_instance_group is not self._lanes(name).group:
            return "these parameters are sharded over another group than the dense ones"
        return None

    def _buckets(self, name: str, group: Any) -> Buckets | None:
        """What exchanges the buckets of a group, or ``None`` if it keeps its own transfers."""
        reason = self.obstacle(group, name)
        if reason is None:
            return Buckets(self._lanes(name), self._options)
        self._linears.fall_back(name, reason, len(group.buckets))
        return None

    def _lanes(self, name: str) -> Transport:
        return cast(Transport, self.users[name].lanes())

    def _started(self, name: str, exchanges: Iterable[Any], asynchronous: bool) -> _Handles | None:
        """Start the exchanges; return their handles, or wait and return ``None``."""
        handles = _Handles(exchanges)
        self._linears.calls[name, "fused"] += len(handles)
        if asynchronous:
            return handles
        handles.wait()
        return None

    def _meet(self) -> None:
        """Synchronize with all ranks of the data-parallel groups and of this model replica.

        Raises:
            RuntimeError: another rank failed or did not arrive in time.
        """
        from megatron.core import parallel_state

        lanes = self._lanes("gradients")
        if lanes.size == 1:
            return  # CommFuse has summed nothing.
        lanes.confirm("finish_grad_sync")
        replica = parallel_state.get_model_parallel_group()
        if replica.size() == 1:
            return
        present = torch.ones(1, device=lanes.device_type)
        dist.all_reduce(present, group=replica)
        present.item()  # On a device the host waits here.
