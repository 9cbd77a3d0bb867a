"""Checks the CommFuse options of a launch, and registers the wrappers that they select.

The options are declared in :mod:`commfuse_npu.launch.options`.  At patch time Megatron's own
options exist only if given, as strings; at validation all arguments are final.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import torch

from commfuse_npu.launch.options import given_options, keeps_short_blocks, schedule_for
from commfuse_npu.launch.refusals import IncompatibleOptionsError, check_compatible, missing
from commfuse_npu.ops import LinearOptions
from commfuse_npu.ops.tuning import Tuning, default_folder
from commfuse_npu.plan import DATA_PARALLEL_LANES, Schedule, block_rows, default_chunks
from commfuse_npu.runtime.hccl_options import lane_megabytes
from mindspeed_patches.data_parallel import BucketWrappers
from mindspeed_patches.job_lanes import LaneUser
from mindspeed_patches.start_report import StartReport
from mindspeed_patches.ulysses_wrappers import MINDSPEED_ULYSSES, UlyssesWrappers
from mindspeed_patches.wrappers import LinearWrappers


class LaunchSettings:
    """CommFuse's options and the sizes of a launch, built once from its arguments and handed down.

    Attributes:
        options: CommFuse's, with the defaults of those that are not given.
        tensor, context, pipeline: of the parallel dimensions.
        data: number of ranks that share parameters, context-parallel ranks included.
        rows: of a block in tensor-parallel layers (:func:`~commfuse_npu.plan.block_rows`);
            ``None`` if the arguments do not determine them.
        hidden: features of a row; ``None`` if not given.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.options = given_options(args)
        self.tensor = self._number("tensor_model_parallel_size") or 1
        self.context = self._number("context_parallel_size") or 1
        self.pipeline = self._number("pipeline_model_parallel_size") or 1
        # Before validation only the launcher's environment has the size of the job.
        world = self._number("world_size") or int(os.environ.get("WORLD_SIZE") or 1)
        self.data = max(1, world // (self.tensor * self.pipeline))
        self.hidden = self._number("hidden_size")
        length = self._number("seq_length")
        batch = self._number("micro_batch_size")
        self.rows = (
            block_rows(length, batch, self.tensor, self.context) if length and batch else None
        )

    def _number(self, name: str) -> int | None:
        value = getattr(self._args, name, None)
        return None if value is None else int(value)

    def schedule(self, size: int, stride: int = 1, **usual: Any) -> Schedule:
        """:func:`.options.schedule_for` with the processes per node of this job.

        Args:
            size, stride: ranks of the group, and the distance between their global ranks.
        """
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", size * stride))
        return schedule_for(self.options, size, processes, stride, **usual)

    def buffer_megabytes(self, group: str) -> int | None:
        """Megabytes of the HCCL buffer with which a lane carries its longest message at once.

        HCCL allocates twice its buffer size (200 MB by default) per communicator, so lanes are
        sized to their messages.  ``None`` if the arguments do not determine them, as for buckets
        without ``--overlap-grad-reduce``, where one bucket has all parameters.

        ======== ==================================================================================
        group    longest message
        ======== ==================================================================================
        tp       a block, ``[seq_length / (TP * CP), micro_batch_size, hidden_size]``, which the
                 backward of a column-parallel layer gathers; for a collective, those of all ranks
        cp       what each peer gets of the heads: 1/CP of as many numbers
        dp_cp    a rank's shard of a gradient bucket in fp32.  A bucket has ``--ddp-bucket-size``
                 parameters, by default the larger of 40 million and one million per rank
                 (``DistributedDataParallelConfig`` of core 0.12)
        ======== ==================================================================================
        """
        args = self._args
        if group == "dp_cp":
            if self.data == 1 or not getattr(args, "overlap_grad_reduce", None):
                return None
            usual = max(40_000_000, 1_000_000 * self.data)
            return lane_megabytes(4 * (self._number("ddp_bucket_size") or usual) / self.data)
        if self.rows is None or self.hidden is None:
            return None
        item = 2 if getattr(args, "bf16", False) or getattr(args, "fp16", False) else 4
        if group == "cp":
            return lane_megabytes(self.rows * -(-self.hidden // self.context) * item)
        blocks = self.schedule(self.tensor, linear=True).blocks_at_once(self.tensor)
        return lane_megabytes(blocks * self.rows * self.hidden * item)

    @property
    def elsewhere(self) -> bool:
        """Whether something is fused besides tensor-parallel layers."""
        return bool(self.options.commfuse_ulysses or self.options.commfuse_dp)

    def check(self, *, complete: bool = False) -> None:
        """Check the options of CommFuse and those that exclude them, as far as they are known.

        Args:
            complete: the arguments are the final ones, so required options must be present.

        Raises:
            IncompatibleOptionsError: another option excludes them, or a required one is missing.
            ValueError: values contradict each other.
        """
        options = self.options
        named = ("attention", "ulysses", "dp")
        asked = [name for name in named if vars(options)[f"commfuse_{name}"]]
        if not options.use_commfuse:
            for name in asked:
                raise IncompatibleOptionsError(
                    f"--commfuse-{name} needs --use-commfuse, which switches CommFuse on; add it, "
                    f"or leave --commfuse-{name} out"
                )
            return
        check_compatible(self._args)
        if options.commfuse_attention and "proj" not in options.commfuse_layers:
            raise ValueError(
                f"--commfuse-attention needs proj among --commfuse-layers "
                f"{','.join(options.commfuse_layers)}: it is fused with the output projection; add "
                "it"
            )
        if options.commfuse_tuning == "on" and options.commfuse_chunks is not None:
            raise ValueError(
                "--commfuse-tuning on chooses the number of chunks itself, and --commfuse-chunks "
                f"{options.commfuse_chunks} sets it; leave one or the other out"
            )
        self.of_linear_layers()  # checks the schedule
        for name in asked:
            check_compatible(self._args, f"--commfuse-{name}")
            if complete and (lacks := missing(f"--commfuse-{name}", self._args)):
                raise IncompatibleOptionsError(lacks)

    def of_linear_layers(self) -> LinearOptions:
        """The options of the tensor-parallel linear layers."""
        tuned = self.options.commfuse_tuning == "on"
        chunks = 1
        if self.rows is not None and not tuned:
            chunks = default_chunks(self.tensor, self.rows, self.hidden)
        return LinearOptions(
            schedule=self.schedule(self.tensor, chunks=chunks, linear=True),
            reduce_dtype=_dtype(self.options.commfuse_reduce_dtype),
            tuning=Tuning(str(default_folder())) if tuned else None,
        )

    def of_ulysses(self) -> LinearOptions:
        """The options of attention under Ulysses context parallelism and of its projections."""
        return LinearOptions(self.schedule(self.context, self.tensor))

    def of_buckets(self) -> LinearOptions:
        """The options of the distributed optimizer's buckets."""
        # Megatron orders ranks with pipeline stages last, or before data parallelism.
        stages_first = getattr(self._args, "use_tp_pp_dp_mapping", None)
        stride = self.tensor * (self.pipeline if stages_first else 1)
        schedule = self.schedule(self.data, stride, lanes=DATA_PARALLEL_LANES)
        reduce_dtype = _dtype(self.options.commfuse_dp_reduce_dtype)
        return LinearOptions(schedule, reduce_dtype=reduce_dtype)


def register_wrappers(
    manager: Any,
    settings: LaunchSettings,
    *,
    norm_column: str | None = None,
    ulysses_attention: str = MINDSPEED_ULYSSES,
) -> tuple[LinearWrappers, Sequence[LaneUser], StartReport]:
    """Register with MindSpeed's patch manager, or with our stand-in.

    Args:
        settings: with options that :meth:`LaunchSettings.check` accepts.
        norm_column: dotted path of MindSpeed's column-parallel layer with norm, if it is used.
        ulysses_attention: dotted path of the class whose forward exchanges heads.

    Returns:
        The linear wrappers, which count all calls; the wrappers whose lanes are to be created once
        Megatron's groups exist; the report to print when the model is built.
    """
    options = settings.options
    wrappers = LinearWrappers(
        settings.of_linear_layers(),
        options.commfuse_layers,
        limited=keeps_short_blocks(options),
        rows=settings.rows,
        hidden=settings.hidden,
    )
    users: list[LaneUser] = []
    if settings.tensor > 1 or not settings.elsewhere:
        wrappers.register(manager, norm_column=norm_column, attention=options.commfuse_attention)
        users.append(wrappers)
    if options.commfuse_ulysses:
        ulysses = UlyssesWrappers(wrappers, settings.of_ulysses())
        ulysses.register(manager, ulysses_attention)
        users.append(ulysses)
    buckets = None
    if options.commfuse_dp:
        buckets = BucketWrappers(wrappers, settings.of_buckets())
        buckets.register(manager)
        users += buckets.users.values()
    for user in users:
        user.order_log = options.commfuse_order_log
        user.buffer_megabytes = settings.buffer_megabytes(user.group.name)
    report = StartReport(
        wrappers,
        attention=options.commfuse_attention,
        ulysses=options.commfuse_ulysses,
        buckets=buckets,
    )
    return wrappers, users, report


def _dtype(name: str) -> torch.dtype | None:
    return torch.float32 if name == "float32" else None
