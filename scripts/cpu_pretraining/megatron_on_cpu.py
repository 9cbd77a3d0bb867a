"""Megatron-Core without a GPU: the smallest set of stand-ins for what it hardwires to CUDA.

Inside `megatron_on_cpu()` the device "cuda" is the CPU in every call of torch, and the functions
listed in `REPLACEMENTS`, each with its reason, are replaced.

Nothing else of Megatron is changed: its model, its parallel state, its schedule, its gradient
buffers, its optimizers and its learning-rate schedule run unmodified.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state

from commfuse_npu.kernels import cpu as kernels
from mindspeed_patches.rehearsal.devices import DevicesAreTheCpu, Finished

CPU = torch.device("cpu")


def _wgrad_gemm_accum(
    total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """Our weight-gradient kernel, as in the fused layers, with the extension's arguments."""
    kernels.accumulate_weight_gradient(main_grad, grad_output, total_input)


def _own_part_of_positions(pos_emb: torch.Tensor, seq_dim: int, *_: Any) -> torch.Tensor:
    """The embeddings of this context-parallel rank's rows, a contiguous part of the sequence.

    Later versions also pass the group.
    """
    parts = pos_emb.chunk(parallel_state.get_context_parallel_world_size(), dim=seq_dim)
    return parts[parallel_state.get_context_parallel_rank()]


_RANDOM = "megatron.core.tensor_parallel.random"
_GENERATOR = torch.default_generator
_LAYERS = "megatron.core.tensor_parallel.layers"
_SOFTMAX = "megatron.core.fusions.fused_softmax"
_ACCUMULATE = SimpleNamespace(
    wgrad_gemm_accum_fp32=_wgrad_gemm_accum, wgrad_gemm_accum_fp16=_wgrad_gemm_accum
)

REPLACEMENTS: tuple[tuple[str, str, Any], ...] = (
    # Buffers of the linear layers, collectives and gradients are allocated on this device.
    ("torch.cuda", "current_device", lambda: CPU),
    # The buffers of core 0.19 ask for the stream before they reduce gradients.
    ("torch.cuda", "current_stream", Finished),
    # Recomputation saves and restores the device's generator, and the tracker of model-parallel
    # random states records what it has seeded: the CPU's generator replaces the device's.
    (_RANDOM, "_get_cuda_rng_state", lambda *_, **__: _GENERATOR.get_state()),
    (_RANDOM, "_set_cuda_rng_state", lambda state, *_, **__: _GENERATOR.set_state(state)),
    ("torch.cuda", "get_rng_state", lambda *_, **__: _GENERATOR.get_state()),
    ("torch.cuda", "manual_seed", lambda seed: _GENERATOR.manual_seed(int(seed))),
    # The mode is inactive in a backward, where the forward of a recomputed layer runs again; core
    # 0.16 makes the mask in every forward, earlier versions in the first.
    (_SOFTMAX, "get_default_causal_mask",
     lambda length: torch.ones(length, length, dtype=torch.bool).triu(1)),
    # The CUDA extension of gradient_accumulation_fusion: the same sum in plain torch. Without it
    # the constructor refuses the option.
    (_LAYERS, "fused_weight_gradient_mlp_cuda", _ACCUMULATE),
    (_LAYERS, "_grad_accum_fusion_available", True),
    # Without TransformerEngine the distributed optimizer fails here, though nothing is in fp8.
    ("megatron.core.optimizer.distrib_optimizer", "quantize_param_shard", lambda *_: None),
    # Megatron gives ranks a part from both ends of the sequence, which balances ring attention;
    # Ulysses needs them in sequence order (and Megatron's function indexes on the device).
    ("megatron.core.models.common.embeddings.rotary_pos_embedding",
     "get_pos_emb_on_this_cp_rank", _own_part_of_positions),
)  # fmt: skip
"""``module.attribute`` is replaced by the stand-in inside `megatron_on_cpu()`."""


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Apply `REPLACEMENTS` and the mode; undo both at the end of the block."""
    with ExitStack() as undone:
        for module, attribute, stand_in in REPLACEMENTS:
            patch = mock.patch.object(import_module(module), attribute, stand_in, create=True)
            undone.enter_context(patch)
        undone.enter_context(DevicesAreTheCpu("cuda"))
        yield
