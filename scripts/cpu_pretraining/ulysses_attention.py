"""Megatron's core attention under Ulysses context parallelism, with plain collectives.

Megatron-core's own attention in plain torch refuses context parallelism, so this module wraps it.
It has the attributes of MindSpeed's ``UlyssesContextAttention``, so the same wrapper
(``mindspeed_patches.ulysses_wrappers``) fuses either.  It exchanges q, k, v and the output one by
one, and repeats key heads as MindSpeed does.  It shares no code with the fused form, whose
reference it is.
"""

import copy
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention

from commfuse_npu.runtime.collectives import all_to_all


class UlyssesAttention(torch.nn.Module):
    """``[s, B, A, D]`` in, ``[s, B, A * D]`` out: A heads, s rows of the sequence per rank.

    Replaces ``DotProductAttention`` in a layer's specification, with the same arguments.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        group = parallel_state.get_context_parallel_group()
        size = group.size()
        self._key_heads = config.num_query_groups // config.tensor_model_parallel_size
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        self._times = heads // self._key_heads if self._key_heads % size else 1
        local = copy.copy(config)
        # The attention inside sees this rank's heads as all heads.
        local.context_parallel_size = 1
        local.num_attention_heads = config.num_attention_heads // size
        local.num_query_groups = config.num_query_groups * self._times // size
        self.local_attn = DotProductAttention(local, *args, **kwargs)
        # The wrapper reads this attribute.
        self.local_attn.ulysses_comm_para = {"spg": group}

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Exchange rows for heads, attend, and back; the mask is that of the full sequence."""
        if self._times > 1:
            key, value = (x.repeat_interleave(self._times, dim=2) for x in (key, value))
        query, key, value = (self._to_heads(x) for x in (query, key, value))
        return self._to_rows(self.local_attn(query, key, value, attention_mask, **kwargs))

    def _to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """``[s, B, A, D]`` to ``[S, B, A / N, D]``."""
        group = self.local_attn.ulysses_comm_para["spg"]
        return all_to_all(torch.cat(x.chunk(group.size(), dim=2)), group)

    def _to_rows(self, x: torch.Tensor) -> torch.Tensor:
        """``[S, B, F]`` to ``[s, B, N * F]``."""
        group = self.local_attn.ulysses_comm_para["spg"]
        return torch.cat(all_to_all(x, group).chunk(group.size()), dim=2)
