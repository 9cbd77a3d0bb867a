"""The simulator charges the launches that a layer of Megatron core makes."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import attention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import build_module

from commfuse_npu.tools.simulate import llama
from commfuse_npu.tools.simulate.engine import Links
from commfuse_npu.tools.simulate.llama import LayerShape
from commfuse_npu.tools.simulate.rank import Rank
from commfuse_npu.tools.simulate.variants import Variant
from tests.megatron.models import BF16, Case, settings
from tests.megatron.training import layout
from tests.tools.simulate.machines import ideal

_NO_KERNEL = {
    *("view", "_unsafe_view", "t", "transpose", "permute", "slice", "split", "split_with_sizes"),
    *("select", "unsqueeze", "squeeze", "expand", "detach", "alias", "as_strided", "unbind"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
}


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        name = function.overloadpacket.__name__
        if name not in _NO_KERNEL:
            self.launches.append(name)
        return function(*args, **(kwargs or {}))


class _Kernel(torch.autograd.Function):
    """Stand-in for a kernel of an NPU: one launch forward, one backward."""

    @staticmethod
    def forward(ctx: Any, width: int, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        return inputs[0].new_empty((*inputs[0].shape[:-1], width)).zero_()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        results = [torch.empty_like(tensor) for tensor in ctx.saved_tensors]
        results[0].zero_()
        return None, *results


class _Norm(torch.nn.Module):
    def __init__(self, hidden_size: int, **options: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Kernel.apply(x.shape[-1], x, self.weight)


class _FlashAttention(torch.nn.Module):
    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__()

    def forward(self, q: Any, k: Any, v: Any, *given: Any, **options: Any) -> torch.Tensor:
        q, k, v = (x.reshape(*x.shape[:2], -1) for x in (q, k, v))
        return _Kernel.apply(q.shape[-1], q, k, v)


def _rotary(t: torch.Tensor, freqs: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
    """The operations of ``apply_rotary_pos_emb_bshd`` of MindSpeed 26.1.0, fused."""
    width = freqs.shape[-1]
    t, passed = t[..., :width], t[..., width:]
    cos, sin = ((function(freqs) * 1.0).to(t.dtype) for function in (torch.cos, torch.sin))
    return torch.cat((_Kernel.apply(width, t.contiguous(), cos, sin), passed), dim=-1)


def _mlp(self: Any, hidden: torch.Tensor, *given: Any) -> Any:
    gate_up, _ = self.linear_fc1(hidden)
    return self.linear_fc2(_Kernel.apply(gate_up.shape[-1] // 2, gate_up))


def _add_to_main_grad(weight: Any) -> None:
    weight.main_grad.add_(weight.grad)
    weight.grad = None


def test_a_layers_launches(one_rank: None) -> None:
    """One layer at TP 1, with gradients added to ``main_grad`` as Megatron's hooks do."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = _Norm
    spec.submodules.self_attention.submodules.core_attention = _FlashAttention
    sizes = {"hidden_size": 64, "ffn_hidden_size": 128, "num_query_groups": 2}
    case = Case(options=BF16 | sizes)
    x = torch.randn(8, 1, 64, dtype=torch.bfloat16, requires_grad=True)
    frequencies = torch.randn(8, 1, 1, 16)
    # As in a middle layer: the input is no leaf, whose gradient would be accumulated.
    entered = _Kernel.apply(64, x)
    with (
        layout(case),
        mock.patch.object(attention, "apply_rotary_pos_emb", _rotary),
        mock.patch.object(MLP, "forward", _mlp),
    ):
        layer = build_module(spec, config=settings(case), layer_number=1).to(torch.bfloat16)
        for weight in layer.parameters():
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
            weight.register_post_accumulate_grad_hook(_add_to_main_grad)
        with _Count() as forward:
            y, _ = layer(entered, attention_mask=None, rotary_pos_emb=frequencies)
        with _Count() as backward:
            y.backward(torch.empty_like(y))
    backward.launches.remove("zero_")  # zeroes the input's gradient
    shape = LayerShape(8, 8, 1, 64, 128, 128, 64, 1)
    for counted, build in ((forward, llama.forward), (backward, llama.backward)):
        rank = Rank(Links(ideal(), 1), 0, Variant("megatron", "megatron"))
        build(rank, shape)
        charged = sum(operation.launches for operation in rank.finish())
        assert charged == len(counted.launches), counted.launches
