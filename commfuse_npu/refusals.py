"""Options that exclude CommFuse, why, and the way out: one table for the launch and the tools.

The launch looks options up in argparse's namespaces, twice: at patch time, because features that
replace Megatron's linear classes do so before any argument is checked, when options that nobody
typed are absent and values are strings; and again with the real arguments.  The doctor looks them
up in the words of a command line, where Megatron's default stands for what nobody typed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from commfuse_npu.options import value_of

__all__ = [
    "ATTENTION_REFUSALS",
    "DATA_PARALLEL_REFUSALS",
    "FB_OVERLAP_REFUSALS",
    "REFUSALS",
    "REFUSALS_OF",
    "ULYSSES_REFUSALS",
    "Needs",
    "Refusal",
    "missing",
]


def _set(value: Any) -> bool:
    """Given and not switched off; an option that takes a list may be an empty one."""
    return bool(value) and value not in ("False", "false", "0", "0.0")


def _above(limit: float) -> Callable[[Any], bool]:
    def applies(value: Any) -> bool:
        try:
            return float(value or 0) > limit
        except ValueError:
            return True  # Whatever it is, it is not known to be harmless.

    return applies


_more_than_one = _above(1)


def _one_of(*values: str) -> Callable[[Any], bool]:
    return lambda value: value in values


def _other_than(*numbers: int) -> Callable[[Any], bool]:
    harmless = {str(number) for number in numbers}
    return lambda value: value is not None and str(value) not in harmless


@dataclass(frozen=True)
class Refusal:
    """An option that excludes ``--use-commfuse``, or another option of CommFuse.

    Attributes:
        option: how a user writes it.
        why: what it does that does not go together.
        instead: the way out.
        applies: whether a value of it is one that is meant.
        also: another attribute in a namespace that means the same.
        ours: the option of CommFuse.
        default: Megatron's, where it excludes without being typed.
    """

    option: str
    why: str
    instead: str = "leave one of the two out"
    applies: Callable[[Any], bool] = _set
    also: tuple[str, ...] = ()
    ours: str = "--use-commfuse"
    default: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Its attributes in a namespace."""
        return self.option.split()[0].removeprefix("--").replace("-", "_"), *self.also

    def given(self, args: argparse.Namespace) -> bool:
        """Whether a namespace has it."""
        return any(self.applies(getattr(args, name, None)) for name in self.names)

    def value_in(self, options: Sequence[str]) -> str | None:
        """The value with which a command line has it; ``None`` if it has none that is meant."""
        value = value_of(options, self.option.split()[0])
        if value is None:
            return None if self.default is None else f"{self.default}, Megatron's default"
        return (value or "given") if self.applies(value or True) else None

    @property
    def way_out(self) -> str:
        return self.instead.format(ours=self.ours)

    def __str__(self) -> str:
        return f"{self.ours} and {self.option} exclude each other: {self.why}; {self.way_out}"


def _with(ours: str, *refusals: Refusal) -> tuple[Refusal, ...]:
    return tuple(replace(refusal, ours=ours) for refusal in refusals)


_REPLACES = "it replaces Megatron's column- and row-parallel linear layers by its own"
_REPAIRED = "after a fault it goes on with process groups made anew, and lanes are not made anew"
_NO_WGRAD = "it takes the weight gradients out of the backward of the linear layers"

REFUSALS: tuple[Refusal, ...] = (
    Refusal("--use-ascend-mc2", _REPLACES),
    Refusal("--use-ascend-coc", _REPLACES),
    Refusal("--unaligned-linear", _REPLACES),
    Refusal(
        "--tp-2d", "it splits each linear layer over two dimensions with collectives of its own"
    ),
    Refusal(
        "--moe-fb-overlap",
        "it takes the backward of the linear layers apart to overlap it with expert transfers",
    ),
    Refusal("--use-nanopipe", _NO_WGRAD),
    Refusal(
        "--schedules-method dualpipev",
        _NO_WGRAD,
        "leave {ours} out or choose another pipeline schedule",
        _one_of("dualpipev"),
    ),
    Refusal("--qat-scheme", "quantization-aware training quantizes inside the linear layers"),
    Refusal(
        "--fp8-format",
        "the fused layers compute in fp32, bf16 and fp16 only",
        "leave one of the two out and train in --bf16",
        also=("fp8",),
    ),
    Refusal(
        "--lora-target-modules", "LoRA wraps the linear layers and trains adapters beside them"
    ),
    Refusal("--tp-comm-overlap", "it is Transformer Engine's own overlap of the same transfers"),
    Refusal(
        "--output-layer-slice-num",
        "it runs the output layer slice by slice with collectives of its own",
        applies=_more_than_one,
    ),
    Refusal(
        "--enable-high-availability",
        _REPAIRED,
        "leave one of the two out, and HIGH_AVAILABILITY unset, which switches it on, too",
    ),
    Refusal("--ttp-enabled", _REPAIRED),
    Refusal(
        "--use-legacy-models",
        "legacy models do not use Megatron core's linear layers",
        "leave one of the two out; --use-mcore-models has the layers that are fused",
    ),
)
"""Every option that excludes CommFuse (MindSpeed's and MindSpeed-LLM's feature sources, read)."""


_WINDOW = "a query sees a window of the keys only"

ATTENTION_REFUSALS = _with(
    "--commfuse-attention",
    Refusal(
        "--attention-dropout",
        "the fused attention has no dropout",
        "pass --attention-dropout 0.0 or leave {ours} out",
        _above(0),
        default="0.1",
    ),
    Refusal(
        "--multi-latent-attention",
        "its queries and keys are not those of Megatron's SelfAttention",
    ),
    Refusal(
        "--context-parallel-size", "a rank has a part of the sequence only", applies=_more_than_one
    ),
    Refusal(
        "--position-embedding-type alibi",
        "alibi adds a bias to the scores",
        applies=_one_of("alibi"),
    ),
    Refusal("--sliding-window", _WINDOW),
    Refusal("--interleave-sliding-window", _WINDOW),
    Refusal(
        "--pre-tockens",
        _WINDOW,
        "leave one of the two out, or pass the default",
        # MindSpeed's default and MindSpeed-LLM's: more than any sequence that they expect.
        _other_than(65536, 1048576),
    ),
    Refusal(
        "--next-tockens",
        "queries see later keys, too",
        "leave one of the two out, or pass 0",
        _other_than(0),
    ),
    Refusal(
        "--sparse-mode",
        "other modes than 0 and 2 have other masks than causal and none",
        "leave one of the two out, or choose 0 or 2",
        _other_than(0, 2),
    ),
    Refusal("--query-pre-attn-scalar", "it scales the scores otherwise"),
    Refusal("--attn-logit-softcapping", "it bends the scores before the softmax"),
)
"""Every option that excludes ``--commfuse-attention``."""


ULYSSES_REFUSALS = _with(
    "--commfuse-ulysses",
    *(other for other in ATTENTION_REFUSALS if other.option != "--context-parallel-size"),
    Refusal(
        "--context-parallel-kv-cache-policy",
        "it exchanges the heads inside the local attention, and again in the backward",
    ),
    Refusal("--use-ulysses-allgather-kv", "it gathers keys and values instead of exchanging heads"),
)
"""Every option that excludes ``--commfuse-ulysses``, besides what the layout has to be."""


_OWN_SCHEDULE = "it has a pipeline schedule of its own"

FB_OVERLAP_REFUSALS = _with(
    "--commfuse-fb-overlap",
    Refusal("--moe-fb-overlap", "it overlaps the same forwards and backwards"),
    Refusal(
        "--schedules-method dualpipev",
        _OWN_SCHEDULE,
        "leave {ours} out or choose another pipeline schedule",
        _one_of("dualpipev"),
    ),
    *(
        Refusal(option, _OWN_SCHEDULE)
        for option in (
            *("--recompute-in-bubble", "--recompute-in-advance", "--use-nanopipe"),
            *("--optimize-send-recv-comm", "--automated-pipeline-perf"),
            *("--use-multiparameter-pipeline-model-parallel", "--layerwise-disaggregated-training"),
        )
    ),
    Refusal("--stage dpo", _OWN_SCHEDULE, "leave {ours} out", _one_of("dpo")),
    Refusal("--use-torch-fsdp2", "a backward frees parameters that the forward beside it uses"),
    Refusal("--use-custom-fsdp", "a backward frees parameters that the forward beside it uses"),
    Refusal("--enable-cuda-graph", "a graph cannot hold a forward and a backward at once"),
)
"""Every option that excludes ``--commfuse-fb-overlap``."""


_OWN_BUFFERS = "it shards parameters and gradients in buffers of its own"

DATA_PARALLEL_REFUSALS = _with(
    "--commfuse-dp",
    Refusal(
        "--num-distributed-optimizer-instances",
        "gradients are then reduced in two steps, over two groups",
        applies=_more_than_one,
    ),
    Refusal("--use-custom-fsdp", _OWN_BUFFERS),
    Refusal("--use-torch-fsdp2", _OWN_BUFFERS),
    Refusal("--layerzero", _OWN_BUFFERS),
    Refusal(
        "--quant-grads",
        "the ranks agree on scales of the quantized gradients before they sum them",
    ),
    Refusal(
        "--optimizer muon",
        "it shards whole layers and gathers them in transfers of its own",
        "leave {ours} out or choose another optimizer",
        _one_of("muon", "dist_muon"),
    ),
    Refusal(
        "--layerwise-disaggregated-training",
        "its first pipeline stage does not reduce gradients",
    ),
)
"""Every option that excludes ``--commfuse-dp``."""


REFUSALS_OF = {
    "--use-commfuse": REFUSALS,
    "--commfuse-attention": ATTENTION_REFUSALS,
    "--commfuse-ulysses": ULYSSES_REFUSALS,
    "--commfuse-dp": DATA_PARALLEL_REFUSALS,
    "--commfuse-fb-overlap": FB_OVERLAP_REFUSALS,
}
"""By the option of CommFuse that they exclude."""


class Needs(NamedTuple):
    """What options of CommFuse need of a launch; ``None``: not known, and not checked.

    Attributes:
        tensor, context: sizes of the parallel groups.
        algorithm: of context parallelism.
        heads, length: of the model and its sequence.
    """

    tensor: int
    context: int
    distributed_optimizer: bool
    algorithm: str | None = None
    heads: int | None = None
    length: int | None = None


def missing(ours: str, needs: Needs) -> str:
    """What an option of CommFuse needs and a launch lacks, with the way out; empty for nothing."""
    check = {"--commfuse-dp": _dp, "--commfuse-ulysses": _ulysses}
    return check[ours](needs) if ours in check else ""


def _dp(needs: Needs) -> str:
    if needs.distributed_optimizer:
        return ""
    return (
        "--commfuse-dp needs --use-distributed-optimizer: without it gradients are all-reduced "
        "and parameters never gathered; add it, or leave --commfuse-dp out"
    )


def _ulysses(needs: Needs) -> str:
    size, tensor, heads, length = needs.context, needs.tensor, needs.heads, needs.length
    if size < 2:
        return (
            "--commfuse-ulysses needs --context-parallel-size of at least 2: a context-parallel "
            "group of one exchanges no heads; leave one of the two out"
        )
    if needs.algorithm != "ulysses_cp_algo":
        return (
            "--commfuse-ulysses needs --context-parallel-algo ulysses_cp_algo, not "
            f"{needs.algorithm}: others do not exchange heads, or do so over a part of the group; "
            "choose it, or leave --commfuse-ulysses out"
        )
    if heads is not None and heads % (tensor * size):
        return (
            f"--commfuse-ulysses: --num-attention-heads {heads} is not divisible by "
            f"--tensor-model-parallel-size {tensor} times --context-parallel-size {size}; "
            f"choose sizes whose product divides {heads}"
        )
    if length is not None and length % size:
        return (
            f"--commfuse-ulysses: --seq-length {length} is not divisible by "
            f"--context-parallel-size {size}; choose {-(-length // size) * size}"
        )
    return ""
