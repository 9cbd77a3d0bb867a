"""What is fused, said once at the start of a training, on rank 0: a line per kind of layer.

::

    CommFuse: qkv: 28 of 28 fused
    CommFuse: fc1: 1 of 28 fused; 27 not: expert layers communicate by their own rules
    CommFuse: gradients: 3 of 4 fused; 1 not: these parameters are sharded over another group ...

Counted when the model is made, from the modules as they are, over all stages of the pipeline.
What a single call may be left for (its mask, a short sequence) is logged when that happens, and
what was said here is not logged again.

Where nothing is fused the training ends here, on all ranks alike, before its first iteration,
unless ``--commfuse-allow-nothing`` is given.

===================  ===========================================================================
kind                 counted
===================  ===========================================================================
linear layers        every column- and row-parallel one, by its name in :mod:`.layer_names`, else
                     by its attribute; of experts the modules that hold them
attention            self-attention layers, with ``--commfuse-attention``
ulysses              layers whose core attention exchanges heads
gradients,           buckets
parameters
===================  ===========================================================================
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_patches.data_parallel import BucketWrappers
from mindspeed_patches.layer_names import LAYERS, layer_name
from mindspeed_patches.obstacles import told
from mindspeed_patches.refusals import IncompatibleOptionsError
from mindspeed_patches.wrappers import EXPERTS, LinearWrappers

__all__ = ["StartReport"]

Counts = Counter[tuple[str, str]]
"""By kind and reason; an empty reason is that of what is fused."""

_GET_MODEL = "megatron.training.training.get_model"


class StartReport:
    """Says what is fused in a model, once.

    Args:
        linears: of the tensor-parallel layers, and where reasons are kept that were said.
        tensor_parallel: whether these layers are wrapped.
        attention, ulysses: whether they are to be fused.
        buckets: of data parallelism, if they are.
        allow_nothing: go on where nothing is fused.
    """

    def __init__(
        self,
        linears: LinearWrappers,
        *,
        tensor_parallel: bool = True,
        attention: bool = False,
        ulysses: bool = False,
        buckets: BucketWrappers | None = None,
        allow_nothing: bool = False,
    ) -> None:
        self._linears = linears
        self._tensor_parallel = tensor_parallel
        self._attention, self._ulysses, self._buckets = attention, ulysses, buckets
        self._allow_nothing = allow_nothing
        self._done = False

    def register(self, manager: Any) -> None:
        """Register with MindSpeed's patch manager, where Megatron makes the model to train."""
        manager.register_patch(_GET_MODEL, self.get_model_wrapper)

    def get_model_wrapper(self, get_model: Callable[..., Any]) -> Callable[..., Any]:
        """``get_model(provider, model_type, wrap_with_ddp=True)``, a list of model chunks."""

        @functools.wraps(get_model)
        def get_model_and_report(provider: Any, *args: Any, **kwargs: Any) -> Any:
            model = get_model(provider, *args, **kwargs)
            # Without, it is a model that is not trained.
            if kwargs.get("wrap_with_ddp", args[1] if len(args) > 1 else True):
                self.tell(model)
            return model

        return get_model_and_report

    def tell(self, model: Sequence[torch.nn.Module]) -> None:
        """Print what is fused; the first model only.

        A collective of the pipeline's stages.

        Args:
            model: the chunks of this rank, with their buckets if they have any.

        Raises:
            IncompatibleOptionsError: nothing is fused, on any stage.
        """
        if self._done:
            return
        self._done = True
        here: Counts = Counter()
        for chunk in model:
            here.update(self._count(chunk))
        for name, reason in here:
            if reason:
                self._linears.was_said(name, reason)
        counts = _of_all_stages(here)
        if all(reason for _, reason in counts) and not self._allow_nothing:
            raise IncompatibleOptionsError(_nothing(counts))
        if dist.get_rank() == 0:
            for line in _lines(counts):
                print(f"CommFuse: {line}", flush=True)

    def _count(self, chunk: torch.nn.Module) -> Iterator[tuple[str, str]]:
        if self._tensor_parallel:
            yield from self._layers(chunk)
        if self._attention:
            yield from self._of_attention(chunk)
        if self._ulysses:
            yield from _exchanges(chunk)
        if self._buckets is not None:
            yield from self._of_buckets(self._buckets, chunk)

    def _layers(self, chunk: torch.nn.Module) -> Iterator[tuple[str, str]]:
        done: tuple[str, ...] = ()
        for path, module in chunk.named_modules():
            if path.startswith(done):
                continue
            attribute = path.rpartition(".")[2]
            if attribute == "experts":
                yield "experts", EXPERTS
                done += (f"{path}.",)
            elif _is_tensor_parallel(module):
                name = layer_name(module)
                reason = self._linears.standing_obstacle(module) or ""
                yield (attribute if name == "unnamed" else name), reason

    def _of_attention(self, chunk: torch.nn.Module) -> Iterator[tuple[str, str]]:
        from megatron.core.transformer.attention import SelfAttention

        for layer in chunk.modules():
            if isinstance(layer, SelfAttention):
                yield "attention", self._of_projection(layer) or ""

    def _of_projection(self, layer: Any) -> str | None:
        """Why attention does not wait for its projection, as far as the modules say."""
        if layer.checkpoint_core_attention:
            return "selective recomputation runs the core attention by itself"
        if not layer.linear_proj.sequence_parallel:
            return "without sequence parallelism nothing is split"
        return self._linears.standing_obstacle(layer.linear_proj)

    @staticmethod
    def _of_buckets(buckets: BucketWrappers, chunk: Any) -> Iterator[tuple[str, str]]:
        for group in (
            *getattr(chunk, "bucket_groups", ()),
            *getattr(chunk, "expert_parallel_bucket_groups", ()),
        ):
            for direction in (buckets.gradients, buckets.parameters):
                reason = buckets.obstacle(group, direction) or ""
                for _ in group.buckets:
                    yield direction.name, reason


def _exchanges(chunk: torch.nn.Module) -> Iterator[tuple[str, str]]:
    for module in chunk.modules():
        core = getattr(module, "core_attention", None)
        if core is not None:
            exchanges = hasattr(core, "local_attn")
            yield "ulysses", "" if exchanges else f"{type(core).__name__} exchanges no heads"


def _is_tensor_parallel(module: torch.nn.Module) -> bool:
    """By what all such layers have, Megatron's, MindSpeed's and Transformer Engine's."""
    return hasattr(module, "output_size_per_partition") or hasattr(
        module, "input_size_per_partition"
    )


def _of_all_stages(here: Counts) -> Counts:
    from megatron.core import parallel_state

    stages = parallel_state.get_pipeline_model_parallel_group()
    if stages.size() == 1:
        return here
    everywhere: list[Any] = [None] * stages.size()
    dist.all_gather_object(everywhere, here, group=stages)
    return sum(everywhere, Counter())


def _kinds(counts: Counts) -> dict[str, dict[str, int]]:
    """How many of each kind for each reason, in the order of :data:`LAYERS`, others after them."""
    kinds = dict.fromkeys((*LAYERS, *(name for name, _ in counts)))
    of_kinds = {
        kind: {reason: count for (name, reason), count in counts.items() if name == kind}
        for kind in kinds
    }
    return {kind: found for kind, found in of_kinds.items() if found}


def _lines(counts: Counts) -> Iterator[str]:
    """A line per kind; the way out where its reason comes first."""
    said: set[str] = set()
    for kind, found in _kinds(counts).items():
        total, fused = sum(found.values()), found.pop("", 0)
        line = f"{kind}: {fused} of {total} fused"
        for reason, count in found.items():
            line += f"; {count} not: {str(reason) if reason in said else told(reason)}"
            said.add(reason)
        yield line


def _nothing(counts: Counts) -> str:
    """That nothing is fused, with a line per reason."""
    kinds = _kinds(counts)
    reasons = {reason: None for found in kinds.values() for reason in found}
    lines = [
        f"  {', '.join(kind for kind, found in kinds.items() if reason in found)}: {told(reason)}"
        for reason in reasons
    ]
    return "\n".join(
        (
            "--use-commfuse would fuse nothing:",
            *(lines or ["  the model has no layer for it"]),
            "change that, leave --use-commfuse out, or pass --commfuse-allow-nothing to train "
            "without it all the same",
        )
    )
