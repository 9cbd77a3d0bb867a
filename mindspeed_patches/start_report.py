"""Prints once, when training starts, which layers are fused: on rank 0, a line per kind of layer.

::

    CommFuse: qkv: 28 of 28 fused
    CommFuse: fc1: 1 of 28 fused; 27 not: expert layers are left to the token dispatcher
    CommFuse: gradients: 3 of 4 fused; 1 not: these parameters are sharded over another group ...

Layers are counted when the model is built, from its modules, over all pipeline stages.  Reasons
that concern a single call (its mask, a short sequence) are logged when they occur; reasons that are
reported here are not logged again.

If nothing is fused, the training stops here on all ranks, before its first iteration.  Linear
layers are counted by their names in :mod:`.layer_names`, else by their attributes, and experts by
the modules that contain them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.launch.options import LAYERS
from commfuse_npu.launch.refusals import EXPERTS, RECOMPUTED, IncompatibleOptionsError
from mindspeed_patches.core_attention import softmax_scale
from mindspeed_patches.data_parallel import BucketWrappers
from mindspeed_patches.layer_names import layer_name
from mindspeed_patches.patching import Function, around, register
from mindspeed_patches.self_attention import attention_arguments
from mindspeed_patches.ulysses_wrappers import innermost
from mindspeed_patches.wrappers import LinearWrappers

Counts = Counter[tuple[str, str]]
"""Number of layers by (kind, reason); the reason is empty for those that are fused."""


@dataclass
class StartReport:
    """Reports once what is fused in a model.

    Attributes:
        linears: the linear wrappers, which also keep the reasons that have been logged.
        attention, ulysses, buckets: what else is to be fused.
    """

    linears: LinearWrappers
    attention: bool = False
    ulysses: bool = False
    buckets: BucketWrappers | None = None
    done: bool = False

    def register(self, manager: Any) -> None:
        """Register with MindSpeed's patch manager: wrap Megatron's ``get_model``."""
        register(manager, "megatron.training.training", self.get_model_wrapper)

    @around
    def get_model_wrapper(
        self, get_model: Function, provider: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """``get_model(provider, model_type, wrap_with_ddp=True)``, a list of model chunks."""
        model = get_model(provider, *args, **kwargs)
        # A model without DDP is not trained.
        if kwargs.get("wrap_with_ddp", args[1] if len(args) > 1 else True):
            self.tell(model)
        return model

    def tell(self, model: Sequence[torch.nn.Module]) -> None:
        """Print what is fused, for the first model only; collective over the pipeline stages.

        Args:
            model: the chunks of this rank, with their buckets if they have any.

        Raises:
            IncompatibleOptionsError: nothing is fused on any stage.
        """
        if self.done:
            return
        self.done = True
        here = Counter(layer for chunk in model for layer in self._count(chunk))
        self.linears.reported.update(here)
        counts = _of_all_stages(here)
        if all(reason for _, reason in counts):
            lines = list(_lines(counts)) or ["the model has no layer for it"]
            raise IncompatibleOptionsError(
                "\n  ".join(["--use-commfuse would fuse nothing:", *lines])
                + "\nchange that, or leave --use-commfuse out"
            )
        if dist.get_rank() == 0:
            for line in _lines(counts):
                print(f"CommFuse: {line}", flush=True)

    def _count(self, chunk: Any) -> Iterator[tuple[str, str]]:
        """Pairs of a kind and the reason why it is not fused, one for each candidate."""
        from megatron.core.transformer.attention import Attention, SelfAttention

        experts: tuple[str, ...] = ()
        for path, module in chunk.named_modules():
            attribute = path.rpartition(".")[2]
            if self.linears.transport is not None and not path.startswith(experts):
                if attribute == "experts":
                    yield "experts", EXPERTS
                    experts += (f"{path}.",)
                elif _is_tensor_parallel(module):
                    name = layer_name(module)
                    reason = self.linears.static_obstacle(module) or ""
                    yield (attribute if name == "unnamed" else name), reason
            if self.attention and isinstance(module, SelfAttention):
                yield "attention", self._attention_obstacle(module) or ""
            # A core attention may have a core_attention, too.
            if self.ulysses and isinstance(module, Attention):
                local = getattr(module.core_attention, "local_attn", None)
                reason = f"{type(module.core_attention).__name__} exchanges no heads"
                if local is not None:
                    reason = _core_obstacle(innermost(local)) or ""
                yield "ulysses", reason
        if self.buckets is not None:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                for name in self.buckets.users:
                    reason = self.buckets.obstacle(group, name) or ""
                    yield from [(name, reason)] * len(group.buckets)

    def _attention_obstacle(self, layer: Any) -> str | None:
        """Why attention cannot be deferred to its projection, as far as the modules show."""
        if layer.checkpoint_core_attention:
            return RECOMPUTED
        proj = self.linears.static_obstacle(layer.linear_proj)
        return proj or _core_obstacle(layer.core_attention)


def _core_obstacle(core: Any) -> str | None:
    found: Any = softmax_scale(core)
    # Only a call has the ends of packed documents.
    if not isinstance(found, str) and not getattr(core.config, "reset_attention_mask", False):
        found = attention_arguments(core, (), {}, 1, 1)
    return found if isinstance(found, str) else None


def _is_tensor_parallel(module: torch.nn.Module) -> bool:
    """Whether it has the attributes of such layers in Megatron, MindSpeed or TransformerEngine."""
    names = "output_size_per_partition", "input_size_per_partition"
    return any(hasattr(module, name) for name in names)


def _of_all_stages(here: Counts) -> Counts:
    from megatron.core import parallel_state

    stages = parallel_state.get_pipeline_model_parallel_group()
    everywhere: list[Any] = [here] * stages.size()
    if stages.size() > 1:
        dist.all_gather_object(everywhere, here, group=stages)
    return sum(everywhere, Counter())


def _lines(counts: Counts) -> Iterator[str]:
    """One line per kind, in the order of :data:`LAYERS`, others last."""
    kinds: dict[str, dict[str, int]] = {name: {} for name in LAYERS}
    for (name, reason), count in counts.items():
        kinds.setdefault(name, {})[reason] = count
    for kind, reasons in kinds.items():
        total = sum(reasons.values())
        fused = reasons.pop("", 0)
        if total:
            others = (f"; {count} not: {reason}" for reason, count in reasons.items())
            yield f"{kind}: {fused} of {total} fused{''.join(others)}"
