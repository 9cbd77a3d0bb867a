"""verl's Megatron engine without a GPU: what it, mbridge and Megatron hardwire, replaced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch

from tests.megatron.training import experts_on_cpu


@contextmanager
def verl_on_cpu() -> Iterator[None]:
    """Stand-ins for the device and TransformerEngine; weights are random, not loaded."""
    with ExitStack() as undone, experts_on_cpu():

        def replace(owner: Any, **replacements: Any) -> None:
            undone.enter_context(mock.patch.multiple(owner, **replacements))

        replace(torch.cuda, synchronize=_nothing, mem_get_info=lambda *_: (1, 1))
        replace(torch.Tensor, record_stream=_nothing)

        import mbridge.core.llm_bridge
        import verl.workers.engine.megatron.transformer_impl as engine
        from mbridge.core.bridge import Bridge
        from megatron.core import tensor_parallel
        from megatron.core.transformer.dot_product_attention import DotProductAttention
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        from scripts.cpu_pretraining.model import RMSNorm

        replace(Bridge, load_weights=_nothing)
        # mbridge always asks for TransformerEngine's layers.
        specs = mbridge.core.llm_bridge.get_gpt_decoder_block_spec
        local = wraps(specs)(
            lambda config, use_transformer_engine, **more: specs(config, False, **more)
        )
        replace(mbridge.core.llm_bridge, get_gpt_decoder_block_spec=local)
        # Megatron's wrapper of torch's norm refuses sequence parallelism.
        norm = lambda _, config, hidden_size, eps=1e-5, **__: RMSNorm(config, hidden_size, eps)  # noqa: E731
        replace(WrappedTorchNorm, __new__=norm)
        replace(DotProductAttention, forward=_packed(DotProductAttention.forward))
        # verl seeds Megatron's random states only for a GPU or an NPU.
        seeds = engine.set_random_seed

        def seed(seed: int) -> None:
            seeds(seed)
            tensor_parallel.model_parallel_cuda_manual_seed(seed)

        replace(engine, set_random_seed=seed)
        yield


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _packed(own: Any) -> Any:
    """Megatron's local attention, also of packed sequences, which it refuses."""

    @wraps(own)
    def forward(core: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        packed = kwargs.pop("packed_seq_params", None)
        if packed is None:
            return own(core, q, k, v, *args, **kwargs)
        ends = packed.cu_seqlens_q_padded
        ends = (packed.cu_seqlens_q if ends is None else ends).long().contiguous()
        at = torch.arange(len(q))
        document = torch.searchsorted(ends, at, right=True)
        seen = (document[:, None] == document) & (at[:, None] >= at)
        heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(*heads, seen, enable_gqa=True)[0].transpose(0, 1).flatten(1)

    return forward
