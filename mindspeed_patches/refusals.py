"""With what CommFuse cannot be combined, why, and what to do instead.

Asked twice: at patch time, because features that replace Megatron's linear classes do so before
any argument is checked, and again with the real arguments.  At patch time options that nobody typed
are absent and values are strings.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

__all__ = [
    "ATTENTION_REFUSALS",
    "DATA_PARALLEL_REFUSALS",
    "REFUSALS",
    "ULYSSES_REFUSALS",
    "IncompatibleOptionsError",
    "Refusal",
    "check_compatible",
    "check_data_parallel",
    "check_ulysses_layout",
]


class IncompatibleOptionsError(AssertionError):
    """Options that exclude each other; an AssertionError as in MindSpeed's own checks."""


def _set(value: Any) -> bool:
    """Given and not switched off; an option that takes a list may be an empty one."""
    return bool(value) and value not in ("False", "false", "0")


def _more_than_one(value: Any) -> bool:
    return int(value or 1) > 1


@dataclass(frozen=True)
class Refusal:
    """An option that excludes ``--use-commfuse``, or another option of CommFuse.

    Attributes:
        option: how a user writes it.
        names: its attributes in a namespace.
        why: what it does that does not go together.
        instead: the way out.
        applies: whether a value of it is one that is meant.
        ours: the option of CommFuse.
    """

    option: str
    names: tuple[str, ...]
    why: str
    instead: str
    applies: Callable[[Any], bool] = _set
    ours: str = "--use-commfuse"

    def given(self, args: argparse.Namespace) -> bool:
        return any(self.applies(getattr(args, name, None)) for name in self.names)

    def __str__(self) -> str:
        return f"{self.ours} and {self.option} exclude each other: {self.why}; {self.instead}"


_CHOOSE = "leave one of the two out"
_REPLACES = "it replaces Megatron's column- and row-parallel linear layers by its own"

REFUSALS: tuple[Refusal, ...] = (
    Refusal("--use-ascend-mc2", ("use_ascend_mc2",), _REPLACES, _CHOOSE),
    Refusal("--use-ascend-coc", ("use_ascend_coc",), _REPLACES, _CHOOSE),
    Refusal("--unaligned-linear", ("unaligned_linear",), _REPLACES, _CHOOSE),
    Refusal(
        "--tp-2d",
        ("tp_2d",),
        "it splits each linear layer over two dimensions with collectives of its own",
        _CHOOSE,
    ),
    Refusal(
        "--moe-fb-overlap",
        ("moe_fb_overlap",),
        "it takes the backward of the linear layers apart to overlap it with expert transfers",
        _CHOOSE,
    ),
    Refusal(
        "--use-nanopipe",
        ("use_nanopipe",),
        "it takes the weight gradients out of the backward of the linear layers",
        _CHOOSE,
    ),
    Refusal(
        "--schedules-method dualpipev",
        ("schedules_method",),
        "it takes the weight gradients out of the backward of the linear layers",
        "leave --use-commfuse out or choose another pipeline schedule",
        lambda value: value == "dualpipev",
    ),
    Refusal(
        "--qat-scheme",
        ("qat_scheme",),
        "quantization-aware training quantizes inside the linear layers",
        _CHOOSE,
    ),
    Refusal(
        "--fp8-format",
        ("fp8_format", "fp8"),
        "the fused layers compute in fp32, bf16 and fp16 only",
        "leave one of the two out and train in --bf16",
    ),
    Refusal(
        "--lora-target-modules",
        ("lora_target_modules",),
        "LoRA wraps the linear layers and trains adapters beside them",
        _CHOOSE,
    ),
    Refusal(
        "--tp-comm-overlap",
        ("tp_comm_overlap",),
        "it is Transformer Engine's own overlap of the same transfers",
        _CHOOSE,
    ),
    Refusal(
        "--output-layer-slice-num",
        ("output_layer_slice_num",),
        "it runs the output layer slice by slice with collectives of its own",
        "leave one of the two out",
        _more_than_one,
    ),
    Refusal(
        "--use-legacy-models",
        ("use_legacy_models",),
        "legacy models do not use Megatron core's linear layers",
        "leave one of the two out; --use-mcore-models has the layers that are fused",
    ),
)
"""Every option that excludes CommFuse (MindSpeed's and MindSpeed-LLM's feature sources, read)."""


_WINDOW = "a query sees a window of the keys only"

ATTENTION_REFUSALS: tuple[Refusal, ...] = tuple(
    replace(refusal, ours="--commfuse-attention")
    for refusal in (
        Refusal(
            "--reset-attention-mask",
            ("reset_attention_mask",),
            "attention stops at the ends of documents, which a split of the queries ignores",
            _CHOOSE,
        ),
        Refusal(
            "--attention-dropout",
            ("attention_dropout",),
            "the fused attention has no dropout",
            "pass --attention-dropout 0.0 or leave --commfuse-attention out",
            lambda value: float(value or 0) > 0,
        ),
        Refusal(
            "--multi-latent-attention",
            ("multi_latent_attention",),
            "its queries and keys are not those of Megatron's SelfAttention",
            _CHOOSE,
        ),
        Refusal(
            "--context-parallel-size",
            ("context_parallel_size",),
            "a rank has a part of the sequence only",
            _CHOOSE,
            _more_than_one,
        ),
        Refusal(
            "--position-embedding-type alibi",
            ("position_embedding_type",),
            "alibi adds a bias to the scores",
            _CHOOSE,
            lambda value: value == "alibi",
        ),
        Refusal("--sliding-window", ("sliding_window",), _WINDOW, _CHOOSE),
        Refusal("--interleave-sliding-window", ("interleave_sliding_window",), _WINDOW, _CHOOSE),
        Refusal(
            "--pre-tockens",
            ("pre_tockens",),
            _WINDOW,
            "leave one of the two out, or pass the default",
            # MindSpeed's default and MindSpeed-LLM's: more than any sequence that they expect.
            lambda value: value is not None and int(value) not in (65536, 1048576),
        ),
        Refusal(
            "--next-tockens",
            ("next_tockens",),
            "queries see later keys, too",
            "leave one of the two out, or pass 0",
            lambda value: value is not None and int(value) != 0,
        ),
        Refusal(
            "--sparse-mode",
            ("sparse_mode",),
            "other modes than 0 and 2 have other masks than causal and none",
            "leave one of the two out, or choose 0 or 2",
            lambda value: value is not None and int(value) not in (0, 2),
        ),
        Refusal(
            "--shape-order TND",
            ("shape_order",),
            "sequences are packed one after the other, and a split of the queries ignores their "
            "ends",
            "leave one of the two out, or choose SBH",
            lambda value: value == "TND",
        ),
        Refusal(
            "--query-pre-attn-scalar",
            ("query_pre_attn_scalar",),
            "it scales the scores otherwise",
            _CHOOSE,
        ),
        Refusal(
            "--attn-logit-softcapping",
            ("attn_logit_softcapping",),
            "it bends the scores before the softmax",
            _CHOOSE,
        ),
    )
)
"""Every option that excludes ``--commfuse-attention``."""


ULYSSES_REFUSALS: tuple[Refusal, ...] = tuple(
    replace(
        refusal,
        ours="--commfuse-ulysses",
        instead=refusal.instead.replace("--commfuse-attention", "--commfuse-ulysses"),
    )
    for refusal in (
        *(other for other in ATTENTION_REFUSALS if other.option != "--context-parallel-size"),
        Refusal(
            "--context-parallel-kv-cache-policy",
            ("context_parallel_kv_cache_policy",),
            "it exchanges the heads inside the local attention, and again in the backward",
            _CHOOSE,
        ),
        Refusal(
            "--use-ulysses-allgather-kv",
            ("use_ulysses_allgather_kv",),
            "it gathers keys and values instead of exchanging heads",
            _CHOOSE,
        ),
        Refusal(
            "--attention-mask-type general",
            ("attention_mask_type",),
            "queries then see what the mask of the data says",
            "leave one of the two out, or choose causal",
            lambda value: value == "general",
        ),
    )
)
"""Every option that excludes ``--commfuse-ulysses``, besides what the layout has to be."""


_OWN_BUFFERS = "it shards parameters and gradients in buffers of its own"

DATA_PARALLEL_REFUSALS: tuple[Refusal, ...] = tuple(
    replace(refusal, ours="--commfuse-dp")
    for refusal in (
        Refusal(
            "--num-distributed-optimizer-instances",
            ("num_distributed_optimizer_instances",),
            "gradients are then reduced in two steps, over two groups",
            _CHOOSE,
            _more_than_one,
        ),
        Refusal("--use-custom-fsdp", ("use_custom_fsdp",), _OWN_BUFFERS, _CHOOSE),
        Refusal("--use-torch-fsdp2", ("use_torch_fsdp2",), _OWN_BUFFERS, _CHOOSE),
        Refusal("--layerzero", ("layerzero",), _OWN_BUFFERS, _CHOOSE),
        Refusal(
            "--quant-grads",
            ("quant_grads",),
            "the ranks agree on scales of the quantized gradients before they sum them",
            _CHOOSE,
        ),
        Refusal(
            "--enable-high-availability",
            ("enable_high_availability",),
            "it all-reduces gradients, so that ranks hold replicas of each other's shards",
            _CHOOSE,
        ),
        Refusal(
            "--ttp-enabled",
            ("ttp_enabled",),
            "after a fault it goes on with repaired process groups, and lanes are not repaired",
            _CHOOSE,
        ),
        Refusal(
            "--optimizer muon",
            ("optimizer",),
            "it shards whole layers and gathers them in transfers of its own",
            "leave --commfuse-dp out or choose another optimizer",
            lambda value: value in ("muon", "dist_muon"),
        ),
        Refusal(
            "--layerwise-disaggregated-training",
            ("layerwise_disaggregated_training",),
            "its first pipeline stage does not reduce gradients",
            _CHOOSE,
        ),
    )
)
"""Every option that excludes ``--commfuse-dp``."""


def check_data_parallel(args: argparse.Namespace) -> None:
    """Refuse ``--commfuse-dp`` where gradients and parameters are not sharded.

    Args:
        args: the real arguments, complete.

    Raises:
        IncompatibleOptionsError: no distributed optimizer.
    """
    if not getattr(args, "use_distributed_optimizer", None):
        raise IncompatibleOptionsError(
            "--commfuse-dp needs --use-distributed-optimizer: without it gradients are all-reduced "
            "and parameters never gathered; add it, or leave --commfuse-dp out"
        )


def check_ulysses_layout(args: argparse.Namespace) -> None:
    """Refuse a layout over which ``--commfuse-ulysses`` cannot exchange heads.

    Args:
        args: the real arguments, complete.

    Raises:
        IncompatibleOptionsError: no Ulysses context parallelism, or sizes that do not divide.
    """
    size = int(getattr(args, "context_parallel_size", None) or 1)
    if size < 2:
        raise IncompatibleOptionsError(
            "--commfuse-ulysses needs --context-parallel-size of at least 2: a context-parallel "
            "group of one exchanges no heads; leave one of the two out"
        )
    algorithm = getattr(args, "context_parallel_algo", None)
    if algorithm != "ulysses_cp_algo":
        raise IncompatibleOptionsError(
            f"--commfuse-ulysses needs --context-parallel-algo ulysses_cp_algo, not {algorithm}: "
            "others do not exchange heads, or do so over a part of the group; choose it, or leave "
            "--commfuse-ulysses out"
        )
    tensor_parallel = int(getattr(args, "tensor_model_parallel_size", None) or 1)
    heads = getattr(args, "num_attention_heads", None)
    if heads is not None and heads % (tensor_parallel * size):
        raise IncompatibleOptionsError(
            f"--commfuse-ulysses: --num-attention-heads {heads} is not divisible by "
            f"--tensor-model-parallel-size {tensor_parallel} times --context-parallel-size {size}; "
            f"choose sizes whose product divides {heads}"
        )
    length = getattr(args, "seq_length", None)
    if length is not None and length % size:
        raise IncompatibleOptionsError(
            f"--commfuse-ulysses: --seq-length {length} is not divisible by "
            f"--context-parallel-size {size}; choose {-(-length // size) * size}"
        )


def check_compatible(args: argparse.Namespace, refusals: Sequence[Refusal] = REFUSALS) -> None:
    """Refuse what is already known to exclude CommFuse.

    Raises:
        IncompatibleOptionsError: names all such options, the reasons and the way out.
    """
    found = [str(refusal) for refusal in refusals if refusal.given(args)]
    if found:
        raise IncompatibleOptionsError("\n".join(found))
