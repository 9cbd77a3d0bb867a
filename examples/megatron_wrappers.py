"""Megatron-core's MLP with its linear layers fused, compared with Megatron's own layers.

pip install -e . torch numpy einops packaging megatron-core==0.12.1
torchrun --standalone --nproc_per_node 2 examples/megatron_wrappers.py
"""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules

# cut: megatron
from commfuse_npu import Schedule, Transport
from commfuse_npu.ops import LinearOptions
from mindspeed_patches import LinearWrappers, PatchManager

# end

S, B, H, FFN = 64, 2, 32, 128


def passed() -> list[torch.Tensor]:
    """Output, input gradient and weight gradients of an MLP that is the same in every call."""
    size = dist.get_world_size()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=H,
        ffn_hidden_size=FFN,
        num_attention_heads=4,
        add_bias_linear=False,
        tensor_model_parallel_size=size,
        sequence_parallel=True,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    torch.manual_seed(dist.get_rank())
    model = MLP(config, MLPSubmodules(ColumnParallelLinear, RowParallelLinear))
    x = torch.randn(S // size, B, H, requires_grad=True)  # this rank's part of the sequence
    output, _ = model(x)
    output.square().mean().backward()
    return [output, x.grad, *(weight.grad for weight in model.parameters())]


def main() -> None:
    own = passed()

    # cut: megatron
    options = LinearOptions(Schedule(chunks=2))
    wrappers = LinearWrappers(options, layers=("qkv", "proj", "fc1", "fc2", "output"))
    manager = PatchManager()
    wrappers.register(manager)
    manager.apply_patches()  # before the model is built
    wrappers.transport = Transport.create(parallel_state.get_tensor_model_parallel_group())
    # end

    fused = passed()
    gap = max(float((a - b).abs().max()) for a, b in zip(fused, own, strict=True))
    if dist.get_rank() == 0:
        print("\n".join(wrappers.describe()))
        print(f"largest difference to Megatron's own layers, GEMMs not split: {gap:.1e}")
    dist.barrier()  # no rank exits while another still communicates
    wrappers.transport.close()


dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
# Megatron allocates receive buffers on the current device.
with mock.patch("torch.cuda.current_device", return_value=torch.device("cpu")):
    main()
parallel_state.destroy_model_parallel()
dist.destroy_process_group()
