"""Options that exclude CommFuse, the reasons and the alternatives, for the launch and the tools.

The launch checks an argparse namespace twice.  The first time is when patches are applied, because
features that replace Megatron's linear classes do so before arguments are checked; options not
given are then absent, and values are strings.  The second time is with the parsed arguments.  The
tools check the words of a command line, where Megatron's default applies to options not given.

:func:`layer_obstacle` decides for the wrappers and for the tools which linear layers of an accepted
launch are not fused.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from commfuse_npu.launch.options import LAYERS, option_name


def _set(value: Any) -> bool:
    """Whether a value is given and not off; the value of a list option may be an empty list."""
    return bool(value) and value not in ("False", "false", "0", "0.0")


def _above(limit: float) -> Callable[[Any], bool]:
    def applies(value: Any) -> bool:
        try:
            return float(value or 0) > limit
        except ValueError:
            return True  # An unknown value may not be harmless.

    return applies


def _one_of(*values: str) -> Callable[[Any], bool]:
    return lambda value: str(value) in values


def _other_than(*numbers: int) -> Callable[[Any], bool]:
    harmless = {str(number) for number in numbers}
    return lambda value: value is not None and str(value) not in harmless


@dataclass(frozen=True)
class Refusal:
    """An option that excludes ``--use-commfuse``, or another option of CommFuse.

    Attributes:
        option: as on a command line.
        why: what it does that excludes CommFuse.
        instead: what to do instead.
        applies: whether a value of the option is refused.
        ours: the option of CommFuse.
        default: Megatron's default, if that is refused, too.
    """

    option: str
    why: str
    instead: str
    applies: Callable[[Any], bool]
    ours: str
    default: str | None

    @property
    def attribute(self) -> str:
        """Its name in a namespace."""
        return self.option.split()[0].removeprefix("--").replace("-", "_")

    def given(self, args: argparse.Namespace) -> bool:
        """Whether a namespace has the option with a refused value."""
        return self.applies(getattr(args, self.attribute, None))

    @property
    def way_out(self) -> str:
        return self.instead.format(ours=self.ours)

    def __str__(self) -> str:
        return f"{self.ours} and {self.option} exclude each other: {self.why}; {self.way_out}"


_Row = str | tuple[str, str] | tuple[str, str, Callable[[Any], bool]]
"""Why; optionally what to do instead; optionally which values apply (default: all but off)."""

_CHOOSE = "leave one of the two out"
_REPLACES = "it replaces Megatron's column- and row-parallel linear layers by its own"
_REPAIRED = "after a fault it recreates the process groups, but not the lanes"
_NO_WGRAD = "it takes the weight gradients out of the backward of the linear layers"
_WINDOW = "a query sees a window of the keys only"
_OWN_SCHEDULE = "it has a pipeline schedule of its own"
BESIDE = "forwards beside backwards"
"""A part of ``--commfuse-overlap`` that a launch may exclude by itself."""
_OTHER_SCHEDULE = "leave {ours} out or choose another pipeline schedule"
_OWN_BUFFERS = "it shards parameters and gradients in buffers of its own"
_FREES = "a backward frees parameters that the forward beside it uses"

_LEVEL: _Row = (
    "MindSpeed leaves features of level 2 out of lower levels, and this is one",
    f"{_CHOOSE}, or pass 2",
    _one_of("0", "1"),
)
_FP8 = "the fused layers compute in fp32, bf16 and fp16 only", f"{_CHOOSE} and train in --bf16"

_ATTENTION: dict[str, _Row] = {
    "--attention-dropout": (
        "the fused attention has no dropout",
        "pass --attention-dropout 0.0 or leave {ours} out",
        _above(0),
    ),
    "--multi-latent-attention": "its queries and keys are not those of Megatron's SelfAttention",
    "--context-parallel-size": ("a rank has a part of the sequence only", _CHOOSE, _above(1)),
    "--position-embedding-type alibi": ("alibi adds a bias to the scores", _CHOOSE),
    **dict.fromkeys(("--sliding-window", "--interleave-sliding-window"), _WINDOW),
    # The defaults of MindSpeed and MindSpeed-LLM, longer than any sequence they expect.
    "--pre-tockens": (_WINDOW, f"{_CHOOSE}, or pass the default", _other_than(65536, 1048576)),
    "--next-tockens": ("queries see later keys, too", f"{_CHOOSE}, or pass 0", _other_than(0)),
    "--sparse-mode": (
        "other modes than 0 and 2 have other masks than causal and none",
        f"{_CHOOSE}, or choose 0 or 2",
        _other_than(0, 2),
    ),
    "--attn-logit-softcapping": "it caps the scores before the softmax",
}
_TABLE: dict[str, dict[str, _Row]] = {
    "--use-commfuse": {
        "--optimization-level": _LEVEL,
        **dict.fromkeys(("--use-ascend-mc2", "--use-ascend-coc", "--unaligned-linear"), _REPLACES),
        "--tp-2d": "it splits each linear layer over two dimensions with collectives of its own",
        "--moe-fb-overlap": "it takes the backward of the linear layers apart to overlap it with "
        "expert transfers",
        "--use-nanopipe": _NO_WGRAD,
        "--schedules-method dualpipev": (_NO_WGRAD, _OTHER_SCHEDULE),
        "--qat-scheme": "quantization-aware training quantizes inside the linear layers",
        # Megatron's own --fp8-format is args.fp8.
        **dict.fromkeys(("--fp8-format", "--fp8"), _FP8),
        "--lora-target-modules": "LoRA wraps the linear layers and trains adapters beside them",
        "--tp-comm-overlap": "it is Transformer Engine's own overlap of the same transfers",
        "--output-layer-slice-num": (
            "it runs the output layer slice by slice with collectives of its own",
            _CHOOSE,
            _above(1),
        ),
        "--enable-high-availability": (
            _REPAIRED,
            f"{_CHOOSE}, and HIGH_AVAILABILITY unset, which switches it on, too",
        ),
        "--ttp-enabled": _REPAIRED,
        "--use-legacy-models": (
            "legacy models do not use Megatron core's linear layers",
            f"{_CHOOSE}; --use-mcore-models has the layers that are fused",
        ),
    },
    "--commfuse-attention": _ATTENTION,
    # The requirements on the layout are in :func:`missing`.
    "--commfuse-ulysses": {
        **{option: row for option, row in _ATTENTION.items() if "context-parallel" not in option},
        "--context-parallel-kv-cache-policy": "it exchanges the heads inside the local attention, "
        "and again in the backward",
        "--use-ulysses-allgather-kv": "it gathers keys and values instead of exchanging heads",
    },
    "--commfuse-dp": {
        "--num-distributed-optimizer-instances": (
            "gradients are then reduced in two steps, over two groups",
            _CHOOSE,
            _above(1),
        ),
        **dict.fromkeys(("--use-custom-fsdp", "--use-torch-fsdp2", "--layerzero"), _OWN_BUFFERS),
        "--quant-grads": "the ranks agree on scales of the quantized gradients before they sum "
        "them",
        "--optimizer muon": (
            "it shards whole layers and gathers them in transfers of its own",
            "leave {ours} out or choose another optimizer",
            _one_of("muon", "dist_muon"),
        ),
        "--layerwise-disaggregated-training": "its first pipeline stage does not reduce gradients",
    },
    "--commfuse-overlap": {
        "--optimization-level": _LEVEL,
        "--moe-fb-overlap": "it overlaps the same forwards and backwards",
        "--schedules-method dualpipev": (_OWN_SCHEDULE, _OTHER_SCHEDULE),
        **dict.fromkeys(
            (
                *("--recompute-in-bubble", "--recompute-in-advance", "--use-nanopipe"),
                "--layerwise-disaggregated-training",
            ),
            _OWN_SCHEDULE,
        ),
        **dict.fromkeys(("--use-torch-fsdp2", "--use-custom-fsdp"), _FREES),
        "--enable-cuda-graph": "a graph cannot hold a forward and a backward at once",
    },
    BESIDE: dict.fromkeys(
        (
            *("--stage dpo", "--optimize-send-recv-comm", "--automated-pipeline-perf"),
            "--use-multiparameter-pipeline-model-parallel",
        ),
        _OWN_SCHEDULE,
    ),
}
_DEFAULTS = {"--attention-dropout": "0.1"}


def _refusal(ours: str, option: str, row: _Row) -> Refusal:
    why, instead, *applies = (row, _CHOOSE) if isinstance(row, str) else row
    name, *values = option.split()
    refused = applies[0] if applies else _one_of(*values) if values else _set
    return Refusal(option, why, instead, refused, ours, _DEFAULTS.get(name))


REFUSALS_OF = {
    ours: tuple(_refusal(ours, option, row) for option, row in rows.items())
    for ours, rows in _TABLE.items()
}
"""By the excluded option of CommFuse (read in the feature sources of MindSpeed and
MindSpeed-LLM)."""


class IncompatibleOptionsError(AssertionError):
    """Options that exclude each other; an AssertionError, as MindSpeed's own checks raise."""


def check_compatible(args: argparse.Namespace, ours: str = "--use-commfuse") -> None:
    """Refuse options that exclude an option of CommFuse, as far as ``args`` has them.

    Raises:
        IncompatibleOptionsError: lists all such options, with the reason and the remedy of each.
    """
    problems = [str(refusal) for refusal in REFUSALS_OF[ours] if refusal.given(args)]
    if problems:
        raise IncompatibleOptionsError("\n".join(problems))


def missing(ours: str, args: argparse.Namespace) -> str:
    """A message about what a launch lacks for an option of CommFuse; empty if nothing.

    Args:
        args: all arguments of the launch, parsed.
    """
    if ours == "--commfuse-dp" and not getattr(args, "use_distributed_optimizer", False):
        return (
            "--commfuse-dp needs --use-distributed-optimizer: without it gradients are all-reduced "
            "and parameters never gathered; add it, or leave --commfuse-dp out"
        )
    if ours == "--commfuse-attention" and args.tensor_model_parallel_size < 2:
        return (
            f"{ours} needs --tensor-model-parallel-size of at least 2: it is fused with a "
            "projection that transfers nothing in a group of one; leave one of the two out"
        )
    if ours != "--commfuse-ulysses":
        return ""
    size = args.context_parallel_size
    tensor = args.tensor_model_parallel_size
    if size < 2:
        return (
            f"{ours} needs --context-parallel-size of at least 2: a context-parallel "
            "group of one exchanges no heads; leave one of the two out"
        )
    if args.context_parallel_algo != "ulysses_cp_algo":
        return (
            f"{ours} needs --context-parallel-algo ulysses_cp_algo, not "
            f"{args.context_parallel_algo}: others do not exchange heads, or do so over a part of "
            f"the group; choose it, or leave {ours} out"
        )
    heads = args.num_attention_heads
    if heads % (tensor * size):
        return (
            f"{ours}: --num-attention-heads {heads} is not divisible by "
            f"--tensor-model-parallel-size {tensor} times --context-parallel-size {size}; "
            f"choose sizes whose product divides {heads}"
        )
    if more := args.seq_length % size:
        return (
            f"{ours}: --seq-length {args.seq_length} is not divisible by "
            f"--context-parallel-size {size}; choose {args.seq_length - more + size}"
        )
    return ""


# ------------------------------------------------------------------ layers that are not fused

EXPERTS = "expert layers are left to the token dispatcher"
"""Why no layer of an expert is fused."""

RECOMPUTED = "selective recomputation runs core attention separately"
"""Why attention is not fused with its projection."""

UNSPLIT = (
    "without sequence parallelism its all-reduce stays Megatron's, because from three ranks on a "
    "fused sum may have another order (--sequence-parallel fuses it; --commfuse-overlap hides "
    "it with the same bits)"
)
"""Why a row-parallel layer, and with it attention, is not fused."""

_GATHERS = "mla_up_proj_tp_overlap", "gathers its input before the call"
_ELSEWHERE = {
    "output": ("defer_embedding_wgrad_compute", "keeps the gradients for later"),
    "q_up": _GATHERS,
    "kv_up": _GATHERS,
}
"""Options that change how a layer transfers, and what they do."""


def unlisted(layer: str) -> str:
    """Why a layer outside of ``--commfuse-layers`` is not fused."""
    remedy = f" (add {layer} to --commfuse-layers)" if layer in LAYERS else ""
    return f"{layer} is not in the list of layers to fuse{remedy}"


def layer_obstacle(
    layer: str,
    *,
    column: bool,
    split: bool,
    size: int,
    layers: Collection[str],
    given: Callable[[str], bool],
    rows: int | None,
    least: int,
) -> str | None:
    """Why a linear layer keeps Megatron's forward, and a way out; ``None`` if it is fused.

    Args:
        layer: its name in ``--commfuse-layers``.
        column: whether it is column-parallel.
        split: whether activations are split along the sequence.
        size: number of tensor-parallel ranks.
        layers: those to fuse.
        given: whether an option of Megatron is set, by its attribute.
        rows: of a rank's block, if known; with fewer than ``least`` Megatron's order is faster.
    """
    if not split and not column:
        return UNSPLIT
    if not split:
        return (
            "without sequence parallelism the forward has no transfer (Megatron hides that of the "
            "backward behind wgrad; --sequence-parallel has both)"
        )
    option, does = _ELSEWHERE.get(layer, ("", ""))
    if option and given(option):
        return f"{option} {does} (leave {option_name(option)} out)"
    if layer not in layers:
        return unlisted(layer)
    if size == 1:
        return "a tensor-parallel group of one has nothing to transfer"
    if given("cpu_offloading"):
        return "cpu_offloading needs Transformer Engine's layers (leave it out)"
    if rows is not None and rows < least:
        return (
            f"a block has fewer than {least} rows, for which Megatron's own order is faster "
            "(simulated; --commfuse-chunks 1 fuses it, a smaller TP or longer sequences lengthen "
            "it)"
        )
    return None
