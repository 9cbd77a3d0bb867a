"""Registers all wrappers that the CommFuse options select, and creates their lanes."""

from __future__ import annotations

from typing import Any

from mindspeed_patches.attention import AttentionWrappers
from mindspeed_patches.data_parallel import BucketWrappers
from mindspeed_patches.lanes import CONTEXT_PARALLEL, DATA_PARALLEL, TENSOR_PARALLEL, Lanes
from mindspeed_patches.start_report import StartReport
from mindspeed_patches.training_options import CommFuseOptions
from mindspeed_patches.ulysses import MINDSPEED_ULYSSES, UlyssesWrappers
from mindspeed_patches.wrappers import LinearWrappers

__all__ = ["register_wrappers"]


def register_wrappers(
    manager: Any,
    options: CommFuseOptions,
    *,
    linears: bool = True,
    transformer_engine: bool = False,
    ulysses_attention: str = MINDSPEED_ULYSSES,
) -> tuple[LinearWrappers, list[Lanes], StartReport]:
    """Register with MindSpeed's patch manager, or with our stand-in.

    Args:
        linears: wrap the tensor-parallel layers; otherwise they keep Megatron's forward.
        transformer_engine: see :meth:`LinearWrappers.register`.
        ulysses_attention: dotted path of the class whose forward exchanges heads.

    Returns:
        The linear wrappers, which count all calls; the lanes, to create once Megatron's groups
        exist; the report to print when the model is built.
    """
    wrappers = LinearWrappers(
        options.linear,
        options.layers,
        limited=options.limited,
        rows=options.rows,
        hidden=options.hidden,
    )
    lanes: list[Lanes] = []
    if linears:
        wrappers.register(manager, transformer_engine=transformer_engine)
        if options.attention:
            AttentionWrappers(wrappers).register(manager)
        lanes.append(Lanes(wrappers, TENSOR_PARALLEL, options.linear.schedule.lanes))
    if options.ulysses is not None:
        ulysses = UlyssesWrappers(wrappers, options.ulysses)
        ulysses.register(manager, ulysses_attention)
        lanes.append(Lanes(ulysses, CONTEXT_PARALLEL, options.ulysses.schedule.lanes))
    buckets = None
    if options.data_parallel is not None:
        buckets = BucketWrappers(wrappers, options.data_parallel)
        buckets.register(manager)
        number = options.data_parallel.schedule.lanes
        lanes += [
            Lanes(wrapper, DATA_PARALLEL, number)
            for wrapper in (buckets.gradients, buckets.parameters)
        ]
    for group in lanes:
        group.order_log = options.order_log
    report = StartReport(
        wrappers,
        tensor_parallel=linears,
        attention=options.attention,
        ulysses=options.ulysses is not None,
        buckets=buckets,
    )
    return wrappers, lanes, report
