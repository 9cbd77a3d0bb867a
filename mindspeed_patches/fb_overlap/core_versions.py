"""Differences between Megatron core 0.12 and 0.16, detected by signatures, not version numbers."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.plan.slots import slots

_OWN_SCHEDULE = "it is a schedule of its own"
_GRAPHS = "CUDA graphs cannot hold a forward and a backward at once"
_ONE_AT_A_TIME = "it keeps track of one micro-batch at a time"
_EXCLUDED = {
    "overlap_moe_expert_parallel_comm": _OWN_SCHEDULE,
    "delay_wgrad_compute": _OWN_SCHEDULE,
    "hybrid_context_parallel": _OWN_SCHEDULE,
    "enable_cuda_graph": _GRAPHS,
    "external_cuda_graph": _GRAPHS,
    "cuda_graph_impl": _GRAPHS,
    "cpu_offloading": _ONE_AT_A_TIME,
    "fine_grained_activation_offloading": _ONE_AT_A_TIME,
    "num_microbatches_with_partial_activation_checkpoints": "it counts them in another order",
    "tp_comm_overlap": "its transfers are inside TransformerEngine, in one buffer for all layers",
    "symmetric_ar_type": "its transfers are inside TransformerEngine, in memory that ranks share",
}
"""Attributes of a model's config that exclude the overlap, and the reason."""
_HIDDEN = {
    "tp": "tensor_model_parallel",
    "cp": "context_parallel",
    "tp_cp": "tensor_and_context_parallel",
    "ep": "expert_model_parallel",
    "expt_tp": "expert_tensor_parallel",
    "tp_ep": "expert_tensor_and_model_parallel",
}
"""Groups whose collectives are overlapped: their names in a ``pg_collection`` and in the parallel
state."""


@functools.cache
def _names(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def supported_keywords(function: Callable[..., Any], **offered: Any) -> dict[str, Any]:
    """The subset of ``offered`` that the installed version of ``function`` accepts."""
    return {name: value for name, value in offered.items() if name in _names(function)}


class Layout:
    """Model chunks and groups of a step, from its ``pg_collection`` or else the parallel state."""

    def __init__(self, step: dict[str, Any]) -> None:
        from megatron.core import parallel_state

        models = step["model"]
        self.models: list[torch.nn.Module] = models if isinstance(models, list) else [models]
        groups = self._given = step.get("pg_collection") or step.get("grad_finalize_pgs")
        if groups is None:
            self.tensor = parallel_state.get_tensor_model_parallel_group()
            self.context = parallel_state.get_context_parallel_group()
            self.pipeline = parallel_state.get_pipeline_model_parallel_group()
        else:
            self.tensor, self.context, self.pipeline = groups.tp, groups.cp, groups.pp
        # All ranks of the stage; ``None`` if the caller has groups of its own without this one.
        self.replicas: dist.ProcessGroup | None = getattr(groups, "tp_dp_cp", None)
        if groups is None:
            self.replicas = parallel_state.get_tensor_and_data_parallel_group(True)
        self.stages: int = self.pipeline.size()
        self.stage: int = self.pipeline.rank()

    def shape(self, microbatches: int) -> tuple[int, int, int, int]:
        """Arguments of :func:`~commfuse_npu.plan.slots.slots` for this rank."""
        return self.stages, self.stage, len(self.models), microbatches

    def hidden(self) -> list[dist.ProcessGroup]:
        """Groups of tensor, expert and context parallelism with more than one rank, including
        MindSpeed's hybrid context parallelism."""
        from megatron.core import parallel_state

        state = {
            name.strip("_").lower().removesuffix("_group"): value
            for name, value in vars(parallel_state).items()
        }
        values: list[Any] = [state.get(name) for name in _HIDDEN.values()]
        values += [getattr(self._given, name, None) for name in _HIDDEN]
        hybrid = sys.modules.get("mindspeed.core.context_parallel.model_parallel_utils")
        values += vars(hybrid).values() if hybrid is not None else ()
        groups = (
            value for value in values if isinstance(value, dist.ProcessGroup) and value.size() > 1
        )
        return list({id(group): group for group in groups}.values())


def exchange(step: dict[str, Any], config: Any, pipeline: dist.ProcessGroup) -> Callable[..., Any]:
    """The installed version's function that exchanges tensors with both neighbors in a pipeline."""
    from megatron.core.pipeline_parallel import p2p_communication

    communicator = getattr(p2p_communication, "P2PCommunicator", None)
    if communicator is None:
        function = p2p_communication.send_forward_backward_recv_forward_backward
        return functools.partial(function, config=config)
    communicate = step.get("p2p_communicator") or communicator(pipeline, config)
    return communicate.send_forward_backward_recv_forward_backward


def obstacle(models: Sequence[torch.nn.Module], config: Any) -> str | None:
    """Why these models cannot overlap, starting with the name of the setting; ``None`` if they
    can."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    for name, why in _EXCLUDED.items():
        value = getattr(config, name, None)
        if value is not None and value is not False and value != "none":
            return f"{name}: {why}"
    kinds = {type(module) for model in models for module in model.modules()}
    for name in ("fp8", "fp4"):
        if getattr(config, name, None) and any(map(_of_transformer_engine, kinds)):
            return f"{name}: TransformerEngine keeps its scales for the whole job"
    tracker: Any = get_cuda_rng_tracker()
    if _of_transformer_engine(type(tracker)) or getattr(tracker, "use_cudagraphable_rng", False):
        return "random states are those of CUDA graphs (te_rng_tracker), which cannot be swapped"
    for model in models:
        sharding = getattr(model, "ddp_config", None)
        for name in ("use_custom_fsdp", "use_megatron_fsdp"):
            if getattr(sharding, name, False):
                return f"{name}: a backward frees parameters that the forward beside it uses"
    return None


def alone(step: dict[str, Any], layout: Layout, config: Any) -> str | None:
    """Why no forward of this step can run beside a backward; ``None`` if it can."""
    from megatron.core import utils
    from megatron.core.pipeline_parallel import p2p_communication

    chunks = len(layout.models)
    # A model of MindSpeed-LLM's fine-tuning has no type.
    if getattr(utils.get_model_type(layout.models[0]), "name", None) == "encoder_and_decoder":
        return "a model of encoder and decoder sends two tensors per stage"
    if step["num_microbatches"] * chunks < 2:
        return "one micro-batch has no partner"
    if chunks > 1 and config.microbatch_group_size_per_vp_stage != layout.stages:
        return (
            f"--microbatch-group-size-per-virtual-pipeline-stage is "
            f"{config.microbatch_group_size_per_vp_stage}; it has to be the {layout.stages} stages"
        )
    if chunks > 1 and config.variable_seq_lengths:
        return "variable_seq_lengths: neighbors exchange shapes one way at a time"
    if step.get("adjust_tensor_shapes_fn") is not None:
        return "adjust_tensor_shapes_fn: forwards and backwards then exchange different shapes"
    communicator = step.get("p2p_communicator")
    if communicator is not None and type(communicator) is not p2p_communication.P2PCommunicator:
        return f"{type(communicator).__name__}: stages do not exchange one tensor"
    try:
        slots(*layout.shape(step["num_microbatches"]))
    except ValueError as error:
        return str(error)
    return None


def _of_transformer_engine(kind: type) -> bool:
    return any(base.__module__.startswith("transformer_engine.") for base in kind.__mro__)
