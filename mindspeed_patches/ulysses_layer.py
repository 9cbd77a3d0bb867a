"""Whether the projections of a self-attention layer can take part in the exchange of heads.

Megatron's ``SelfAttention`` computes q, k and v of its rows, embeds positions, attends and
projects.  During one call, the first projection gets another ``forward``
(:func:`.patching.replaced`), and the layer's head counts are those of this rank only.  Module hooks
therefore run as usual (those of the distributed optimizer wait for weights), and so does Megatron's
code between the projections, on the full sequence instead of the rows of a rank.  The core
attention returns a :class:`.DeferredAttention`, which the output projection runs.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

from commfuse_npu.launch.refusals import RECOMPUTED
from commfuse_npu.runtime.collectives import all_gather_rows
from mindspeed_patches.self_attention import Arguments


def projections_obstacle(layer: Any, arguments: Arguments) -> str | None:
    """Why neither projection of a layer can take part; ``arguments`` follow the mask."""
    config = layer.config
    if config.tensor_model_parallel_size > 1:
        return (
            f"a tensor-parallel group of {config.tensor_model_parallel_size} shares the weights of "
            "the projections, which have to be whole"
        )
    if "forward" in vars(layer.core_attention):
        return "the forward of its core attention was replaced"
    if layer.checkpoint_core_attention and layer.training:
        return RECOMPUTED
    if any(arguments.get(name) is not None for name in ("inference_context", "inference_params")):
        return "inference keeps keys of other calls"
    return None


def qkv_obstacle(layer: Any, rows: int, size: int, arguments: Arguments) -> str | None:
    """Why the projection to q, k and v cannot take part in the exchange, or ``None``.

    Args:
        rows: of the sequence on this rank.
        size: number of ranks that exchange heads.
    """
    from megatron.core.transformer.attention import SelfAttention

    groups = layer.num_query_groups_per_partition
    linear = layer.linear_qkv
    if type(layer).get_query_key_value_tensors is not SelfAttention.get_query_key_value_tensors:
        return f"{type(layer).__name__} makes q, k and v in its own way"
    if groups % size:
        return (
            f"{groups} query groups are not divisible by {size} ranks: key heads are repeated "
            "before the exchange"
        )
    if qkv_method(linear) is None:
        return f"the forward of its {type(linear).__name__} is not Megatron's"
    if arguments.get("packed_seq_params") is not None:
        rows *= size  # embeddings of all positions, from which the rows pick theirs
    for part in tree_leaves(arguments.get("rotary_pos_emb")):
        if part is not None and (part.requires_grad or part.shape[0] != rows):
            return "its rotary embedding is trained, or not of the positions of its rows"
    return None


def qkv_method(linear: Any) -> str | None:
    """The name of the method in which a column-parallel layer multiplies; ``None`` if unknown."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    if "forward" in vars(linear):
        return None
    if type(linear).forward is ColumnParallelLinear.forward:
        return "forward"
    # MindSpeed's layer with norm calls this attribute for the product.
    return "_linear_forward_impl" if "_linear_forward_impl" in vars(linear) else None


class WholePositions:
    """Gathers positions or their embeddings, and caches the last four results.

    Under context parallelism a rank has the positions of its own rows.  After heads are exchanged
    for rows it has all rows, in rank order: the parts of all ranks, one after the other.

    All layers of a forward pass the same tensor, and recomputation passes another tensor with the
    same memory: both hit the cache.  A hit depends on how the program handles its tensors, never on
    their values, so it is the same on every rank, as it must be before a collective.
    """

    _KEPT = 4

    def __init__(self) -> None:
        # Keep the parts alive, so that no other tensor reuses their memory.
        self._known: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, parts: Any, group: dist.ProcessGroup) -> Any:
        """Gather ``[s, ...]`` of each rank, also in a tuple, to ``[N * s, ...]``."""
        return tree_map_only(torch.Tensor, lambda part: self._of(part, group), parts)

    def _of(self, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        if part.is_inference():  # has no version counter
            return all_gather_rows(part, group)
        memory = part.device, part.data_ptr(), part.dtype, part.shape, part.stride()
        key = group, part._version, memory
        if key not in self._known:
            with torch.no_grad():
                gathered = part.detach(), all_gather_rows(part, group)
            latest = list(self._known.items())[1 - self._KEPT :]
            self._known = dict(latest) | {key: gathered}
        return self._known[key][1]


def picked(embeddings: Any, positions: torch.Tensor) -> Any:
    """``[S, B, 1, D]`` of the ``[S, 1, 1, D]`` embeddings (or a tuple) at ``[S, B]`` positions."""
    rows = positions.flatten()
    shape = (*positions.shape, 1, -1)
    return tree_map_only(torch.Tensor, lambda whole: whole[rows].view(shape), embeddings)
