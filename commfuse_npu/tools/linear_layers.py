"""The tensor-parallel linear layers of a launch: which are fused, and why others are not.

It reads only options.  At run time the wrappers of Megatron's layers decide
(``mindspeed_patches``); a test compares the reasons.  The layers of a launch were read in
Megatron-LM core_v0.12.1, MindSpeed 26.1.0 and MindSpeed-LLM 26.1.0; any other ``--spec`` is treated
as Megatron's GPTModel.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from commfuse_npu.options import LAYERS
from commfuse_npu.tools.launch_script.options import Options

__all__ = ["Judged", "attention_obstacle", "judge", "sequence_parallel", "size_of"]


class Judged(NamedTuple):
    """The forward of a kind of linear layer: the op that runs, or why it is Megatron's own."""

    layer: str
    reason: str
    operator: str

    def __str__(self) -> str:
        if not self.operator:
            return f"{self.layer}: Megatron's own forward, because {self.reason}"
        return f"{self.layer}: {self.operator}"


class _Layer(NamedTuple):
    """A kind of linear layer in a launch.

    Attributes:
        known_as: its name in ``--commfuse-layers``.
        kept: why it keeps its own forward, or empty.
    """

    name: str
    column: bool
    known_as: str
    kept: str = ""


def _layers(options: Options) -> Iterator[_Layer]:
    """The kinds of linear layers of a launch."""
    spec = options.text("--spec") or ""
    mamba, compressed, longcat = (
        name in spec for name in ("mamba_spec", "deepseek4_spec", "longcat_spec")
    )
    latent = "--multi-latent-attention" in options and not compressed
    # Qwen3-Next: every n-th layer has attention with separate q, k and v; others are linear.
    delta_net = "--full-attention-interval" in options
    attends = not mamba or _part(options, "--hybrid-attention-ratio")
    if attends and not (latent or compressed or delta_net):
        yield _Layer("qkv", True, "qkv")
    if latent:
        overlap = "mla_up_proj_tp_overlap gathers its input before the call"
        gathered = overlap * ("--mla-up-proj-tp-overlap" in options)
        yield _Layer("q_up", True, "q_up", gathered)
        yield _Layer("kv_up", True, "kv_up", gathered)
    if delta_net:
        yield _Layer("q, k, v apart", True, "qkv")
        yield _Layer("delta-net in", True, "fc1")
        yield _Layer("delta-net out", False, "fc2")
    if compressed:
        unknown = "it is not among the layers that can be fused"
        yield _Layer("CSA's q_up, o_down", True, "", unknown)
        yield _Layer("CSA's o_up", False, "", unknown)
    if mamba:
        yield _Layer("mamba in", True, "fc1")
        yield _Layer("mamba out", False, "fc2")
    if attends and not compressed:
        yield _Layer("proj", False, "proj")
    experts = options.number("--num-experts", 0) > 0
    dense = not mamba or _part(options, "--hybrid-mlp-ratio")
    if experts and not longcat:
        # With experts, only the first layers are dense (MindSpeed-LLM's transformer_block.py).
        dense = options.number("--first-k-dense-replace", -1) > 0
    if dense:
        yield _Layer("fc1", True, "fc1")
        yield _Layer("fc2", False, "fc2")
    shared = "--n-shared-experts", "--moe-shared-expert-intermediate-size"
    if experts and any(options.number(name, 0) for name in shared):
        yield _Layer("shared_fc1", True, "shared_fc1", _overlapped(options))
        yield _Layer("shared_fc2", False, "shared_fc2", _overlapped(options))
    if experts:
        yield _Layer("experts", False, "fc2", _dispatched(options))
    if "--mtp-num-layers" in options:
        yield _Layer("eh_proj", True, "eh_proj")
    later = "defer_embedding_wgrad_compute keeps the gradients for later"
    deferred = later * ("--defer-embedding-wgrad-compute" in options)
    yield _Layer("output", True, "output", deferred)


def judge(
    options: Options, layers: Collection[str] = LAYERS, attention: bool = False
) -> Iterator[Judged]:
    """The verdict on each linear layer of a launch, for any sequence length.

    Args:
        options: of its command line.
        layers: names of layers to fuse (``--commfuse-layers``).
        attention: whether attention is fused with its projection, unless something prevents it.
    """
    split, alone = sequence_parallel(options), size_of(options, "tensor-model") == 1
    offloaded = "--cpu-offloading" in options
    with_attention = attention and not attention_obstacle(options)
    for name, column, known_as, kept in _layers(options):
        unsplit = column and not split
        reasons = (
            kept,
            unsplit and "without sequence parallelism the forward has no transfer",
            known_as not in layers and f"{known_as} is not in the list of layers to fuse",
            alone and "a tensor-parallel group of one has nothing to transfer",
            offloaded and "cpu_offloading needs Transformer Engine's layers",
        )
        operator = "linear_reduce_scatter" if split else "linear_all_reduce"
        if column:
            operator = "all_gather_linear"
        elif name == "proj" and with_attention:
            operator = "attention_linear_reduce_scatter"
        reason = str(next(filter(None, reasons), ""))
        yield Judged(name, reason, "" if reason else operator)


def attention_obstacle(options: Options) -> str:
    """Why attention is not fused with its projection (``--commfuse-attention``); else empty.

    With granularity ``selective`` MindSpeed recomputes attention separately, whatever
    ``--recompute-modules`` lists.
    """
    selective = options.text("--recompute-granularity") == "selective"
    if selective or "--recompute-activations" in options:
        return "selective recomputation runs core attention separately"
    return "" if sequence_parallel(options) else "without sequence parallelism nothing is split"


def size_of(options: Options, kind: str) -> int:
    """The size of a parallel dimension: ``tensor-model``, ``expert-model`` ...; 1 if not given.

    Raises:
        UsageError: it is not a number.
    """
    return options.number(f"--{kind}-parallel-size", 1)


def sequence_parallel(options: Options) -> bool:
    """Whether activations are split along the sequence; never in a group of one rank."""
    return "--sequence-parallel" in options and size_of(options, "tensor-model") > 1


def _part(options: Options, option: str) -> bool:
    """Whether a ratio of layers other than 0 is given."""
    return (options.text(option) or "").strip("0.") != ""


def _overlapped(options: Options) -> str:
    """Why shared experts use MindSpeed's linear layers, or ones without transfers; else empty."""
    overlaps = (
        *("--moe-alltoall-overlap-comm", "--moe-allgather-overlap-comm"),
        "--moe-shared-expert-overlap",
    )
    overlap = next((option for option in overlaps if option in options), "")
    return overlap and f"{overlap} runs them beside the experts' transfers"


def _dispatched(options: Options) -> str:
    """Why the experts' linear layers keep their own forward.

    Grouped GEMMs have no linear layers.  Otherwise, if experts have tensor or expert parallelism
    above 1, Megatron leaves their transfers to the dispatcher (``explicit_expert_comm``).  If they
    have neither, their row-parallel layers reduce over the tensor-parallel group as others do
    (megatron/core/tensor_parallel/layers.py of core_v0.12.1).
    """
    if "--moe-grouped-gemm" in options:
        return "grouped GEMMs, no tensor-parallel linear layer; tokens are moved by the dispatcher"
    separate = "--expert-tensor-parallel-size" in options
    tensor = size_of(options, "expert-tensor" if separate else "tensor-model")
    if tensor > 1 or size_of(options, "expert-model") > 1 or "--moe-tp-extend-ep" in options:
        return "no collective of the tensor-parallel group; tokens are moved by the dispatcher"
    return "expert layers are left to the token dispatcher"
