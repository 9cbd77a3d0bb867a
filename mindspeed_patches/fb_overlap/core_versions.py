"""Differences between Megatron core 0.12 and 0.19, detected by signatures, not version numbers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.plan.slots import slots
from mindspeed_patches.core_pieces import Piece
from mindspeed_patches.fb_overlap.state_owners import Models

_CORE = "megatron.core"
_SCHEDULES = f"{_CORE}.pipeline_parallel.schedules"
_STATE = f"{_CORE}.parallel_state"
_LAYERS = f"{_CORE}.tensor_parallel.layers"
_RANDOM = f"{_CORE}.tensor_parallel.random"

PIECES = (
    Piece(f"{_SCHEDULES}.get_forward_backward_func", "", "pp_size vp_size schedule_pg_collection"),
    Piece(
        f"{_SCHEDULES}.forward_step",
        "forward_step_func data_iterator model num_microbatches input_tensor forward_data_store "
        "config collect_non_loss_data checkpoint_activations_microbatch is_first_microbatch "
        "current_microbatch",
        "cp_group_size vp_stage is_last_stage",
    ),
    Piece(
        f"{_SCHEDULES}.backward_step",
        "input_tensor output_tensor output_tensor_grad config",
        "model_type pipeline_model_parallel_size",
    ),
    Piece(f"{_SCHEDULES}.deallocate_output_tensor", "out deallocate_pipeline_outputs"),
    Piece(
        f"{_SCHEDULES}.get_tensor_shapes",
        "seq_length micro_batch_size decoder_seq_length config",
        "rank model_type encoder_decoder_xattn tp_group cp_group",
    ),
    Piece(f"{_SCHEDULES}.clear_embedding_activation_buffer", "config model", "is_last_stage"),
    Piece(
        f"{_SCHEDULES}.finish_embedding_wgrad_compute",
        "config embedding_module",
        "is_last_stage tp_group",
    ),
    Piece(f"{_RANDOM}.CheckpointFunction.forward", "ctx run_function distribute_saved_activations"),
    Piece(f"{_RANDOM}.get_cuda_rng_tracker"),
    Piece(f"{_LAYERS}.RowParallelLinear.forward", "self input_"),
    Piece(
        f"{_LAYERS}.LinearWithGradAccumulationAndAsyncCommunication.backward",
        "ctx grad_output",
        read="gradient_accumulation_fusion grad_output_buffer wgrad_deferral_limit use_bias "
        "sequence_parallel saved_tensors",
    ),
    Piece(
        f"{_CORE}.distributed.param_and_grad_buffer._ParamAndGradBucketGroup.register_grad_ready",
        "self param",
    ),
    Piece(f"{_CORE}.utils.GlobalMemoryBuffer.get_tensor", "self tensor_shape dtype name"),
    Piece(
        f"{_CORE}.utils.prepare_input_tensors_for_wgrad_compute", "grad_output all_gathered_input"
    ),
    Piece(f"{_CORE}.utils.get_model_config", "model"),
    Piece(f"{_CORE}.utils.get_model_type", "model"),
    *(
        Piece(f"{_STATE}.get_{name}_group")
        for name in ("tensor_model_parallel", "context_parallel", "pipeline_model_parallel")
    ),
    Piece(f"{_STATE}.get_tensor_and_data_parallel_group", "with_context_parallel"),
)
"""What the overlap calls and wraps in all versions."""

_OWN_SCHEDULE = "it is a schedule of its own"
_GRAPHS = "CUDA graphs cannot hold a forward and a backward at once"
_FREES_PARAMETERS = "a backward frees parameters that the forward beside it uses"
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
    "moe_paged_stash": _ONE_AT_A_TIME,
    "overlap_dispatch_backward_with_experts_wgrad": _OWN_SCHEDULE,
}
"""Attributes of a model's config that exclude the overlap, and the reason."""
_SHARDED_WEIGHTS = "gtp_weight_remat_size", "expert_gtp_weight_remat_size"
"""Attributes whose value, if larger than 1, is the number of ranks that gather weights."""
_FLEX_BACKENDS = "hybridep", "ncclep"
"""Backends of the flex dispatcher whose buffers all layers share."""
_STEP = {
    *("forward_step_func", "data_iterator", "model", "num_microbatches", "seq_length"),
    *("micro_batch_size", "decoder_seq_length", "forward_only", "collect_non_loss_data"),
    *("first_val_step", "adjust_tensor_shapes_fn", "p2p_communicator", "pg_collection"),
    *("grad_finalize_pgs", "force_all_reduce"),
}
"""Arguments of a schedule in all versions."""
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


class StepLayout:
    """Model chunks and groups of a step, from its ``pg_collection`` or else the parallel state.

    Args:
        step: the arguments of its schedule.
    """

    def __init__(self, step: dict[str, Any]) -> None:
        from megatron.core import parallel_state

        self.step = step
        models = step["model"]
        self.models: list[torch.nn.Module] = models if isinstance(models, list) else [models]
        groups = self._groups = _given_groups(step) or SimpleNamespace(
            tp=parallel_state.get_tensor_model_parallel_group(),
            cp=parallel_state.get_context_parallel_group(),
            pp=parallel_state.get_pipeline_model_parallel_group(),
            tp_dp_cp=parallel_state.get_tensor_and_data_parallel_group(True),
        )
        self.tensor: dist.ProcessGroup = groups.tp
        self.context: dist.ProcessGroup = groups.cp
        # Without a pipeline, a collection needs no group of stages.
        self.pipeline: dist.ProcessGroup | None = getattr(groups, "pp", None)
        # All ranks of the stage; ``None`` if the caller has groups of its own without this one.
        self.replicas: dist.ProcessGroup | None = getattr(groups, "tp_dp_cp", None)
        self.stages: int = 1 if self.pipeline is None else self.pipeline.size()
        self.stage: int = 0 if self.pipeline is None else self.pipeline.rank()

    @property
    def config(self) -> Any:
        """The config of the model."""
        from megatron.core import utils

        return utils.get_model_config(self.models[0])

    def shape(self) -> tuple[int, int, int, int]:
        """Arguments of :func:`~commfuse_npu.plan.slots.slots` for this rank."""
        return self.stages, self.stage, len(self.models), self.step["num_microbatches"]

    def maximum(self, *numbers: float) -> list[Any]:
        """The largest of each number among the ranks that train these models; a collective."""
        values = torch.tensor(numbers, device=next(self.models[0].parameters()).device)
        groups = [self.replicas, self.pipeline]
        if self.replicas is None:
            groups += [getattr(self._groups, name, None) for name in ("tp", "cp", "dp", "dp_cp")]
        for group in groups:
            if group is not None:
                dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
        return values.tolist()

    def joined_replicas(self) -> dist.ProcessGroup | None:
        """All ranks of the stage, if collectives join them while passes run.

        Those are of experts, and of buckets that are reduced or gathered meanwhile.  Otherwise
        replicas may differ in their passes, whose collectives may depend on the data.
        """
        sharding = [getattr(model, "ddp_config", None) for model in self.models]
        joined = any(
            getattr(config, name, config is None)
            for config in sharding
            for name in ("overlap_grad_reduce", "overlap_param_gather")
        )
        experts = getattr(self.config, "num_moe_experts", None)
        return self.replicas if joined or experts else None

    def hidden(self) -> list[dist.ProcessGroup]:
        """Groups of tensor, expert and context parallelism with more than one rank, including
        MindSpeed's hybrid context parallelism."""
        from megatron.core import parallel_state

        state = vars(parallel_state)
        values: list[Any] = [state.get(f"_{name.upper()}_GROUP") for name in _HIDDEN.values()]
        values += [getattr(self._groups, name, None) for name in _HIDDEN]
        hybrid = sys.modules.get("mindspeed.core.context_parallel.model_parallel_utils")
        values += vars(hybrid).values() if hybrid is not None else ()
        groups = (value for value in values if isinstance(value, dist.ProcessGroup))
        return list(dict.fromkeys(group for group in groups if group.size() > 1))


def exchange(layout: StepLayout) -> Callable[..., Any]:
    """The installed version's function that exchanges tensors with both neighbors in a pipeline."""
    from megatron.core.pipeline_parallel import p2p_communication

    communicator = getattr(p2p_communication, "P2PCommunicator", None)
    if communicator is None:
        function = p2p_communication.send_forward_backward_recv_forward_backward
        return functools.partial(function, config=layout.config)
    given = layout.step.get("p2p_communicator")
    communicate = given or communicator(layout.pipeline, layout.config)
    return communicate.send_forward_backward_recv_forward_backward


def _given_groups(step: dict[str, Any]) -> Any:
    """The groups that a caller passes, by either of the names that versions have."""
    return step.get("pg_collection") or step.get("grad_finalize_pgs")


def groups_obstacle(step: dict[str, Any]) -> str | None:
    """Why a caller's groups have no :class:`StepLayout`; ``None`` if they have one."""
    groups = _given_groups(step)
    if groups is None or (hasattr(groups, "tp") and hasattr(groups, "cp")):
        return None
    return f"{type(groups).__name__}: the parts of the model have groups of their own"


def obstacle(models: Models, config: Any) -> str | None:
    """Why these models cannot overlap, starting with the name of the setting; ``None`` if they
    can."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    for name, why in _EXCLUDED.items():
        value = getattr(config, name, None)
        if value is not None and value is not False and value != "none":
            return f"{name}: {why}"
    for name in _SHARDED_WEIGHTS:
        if getattr(config, name, 1) > 1:
            return f"{name}: it gathers weights ahead, in the order of one micro-batch"
    backend = getattr(config, "moe_flex_dispatcher_backend", None)
    if backend in _FLEX_BACKENDS and config.moe_token_dispatcher_type == "flex":
        return f"moe_flex_dispatcher_backend: {backend} has one buffer for all layers"
    kinds = {type(module) for model in models for module in model.modules()}
    if any(base.__name__ == "FSDPModule" for kind in kinds for base in kind.__mro__):
        return f"FSDPModule: {_FREES_PARAMETERS}"
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
                return f"{name}: {_FREES_PARAMETERS}"
    return None


def alone(layout: StepLayout) -> str | None:
    """Why no forward of this step can run beside a backward; ``None`` if it can."""
    from megatron.core import utils
    from megatron.core.pipeline_parallel import p2p_communication

    step = layout.step
    config = layout.config
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
    for name in ("variable_seq_lengths", "mtp_standalone"):
        if chunks > 1 and getattr(config, name, False):
            return f"{name}: neighbors exchange shapes one way at a time"
    unknown = sorted(name for name in step.keys() - _STEP if step[name] is not None)
    if unknown:
        return f"{unknown[0]}: this argument of Megatron's schedule is not known"
    if step.get("adjust_tensor_shapes_fn") is not None:
        return "adjust_tensor_shapes_fn: forwards and backwards then exchange different shapes"
    communicator = step.get("p2p_communicator")
    if communicator is not None and type(communicator) is not p2p_communication.P2PCommunicator:
        return f"{type(communicator).__name__}: stages do not exchange one tensor"
    try:
        slots(*layout.shape())
    except ValueError as error:
        return str(error)
    return None


def _of_transformer_engine(kind: type) -> bool:
    return any(base.__module__.startswith("transformer_engine.") for base in kind.__mro__)
