"""The tensor-parallel linear layers of a launch: which are fused, and why others are not.

It reads only options.  At run time the wrappers of Megatron's layers decide
(``mindspeed_patches``); a test compares the reasons.  The layers of a launch were read in
Megatron-LM core_v0.12.1, MindSpeed 26.1.0 and MindSpeed-LLM 26.1.0; any other ``--spec`` is treated
as Megatron's GPTModel.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

from commfuse_npu.options import LAYERS
from commfuse_npu.tools.launch_script.options import Options

__all__ = ["Judged", "attention_obstacle", "judge", "sequence_parallel", "size_of"]


class Judged(NamedTuple):
    """The verdict on the forward of a kind of linear layer.

    Attributes:
        layer: its name.
        state: ``fused``; ``left`` to Megatron; or ``silent``: it has no transfer to hide.
        reason: why it is not fused, or empty.
        operator: the op that runs in its place; empty for Megatron's own forward.
    """

    layer: str
    state: Literal["fused", "left", "silent"]
    reason: str
    operator: str = ""

    def left(self, reason: str) -> Judged:
        """The same layer, left to Megatron."""
        return Judged(self.layer, "left", reason)

    def __str__(self) -> str:
        if not self.operator:
            return f"{self.layer}: Megatron's own forward, because {self.reason}"
        return f"{self.layer}: {self.operator}"


class _Layer(NamedTuple):
    """A kind of linear layer in a launch.

    Attributes:
        present: whether the launch has it.
        known_as: its name in ``--commfuse-layers``; ``None`` if it cannot be fused.
        exclusion: why it keeps its own forward, or empty.
        silent: why it has no transfer at all, or empty.
    """

    name: str
    column: bool
    present: bool
    known_as: str | None
    exclusion: str = ""
    silent: str = ""


def _layers(options: Options) -> tuple[_Layer, ...]:
    """All kinds of linear layers, whether or not the launch has them."""
    spec = options.text("--spec") or ""
    mamba, compressed, longcat = (
        name in spec for name in ("mamba_spec", "deepseek4_spec", "longcat_spec")
    )
    latent = "--multi-latent-attention" in options and not compressed
    # Qwen3-Next: every n-th layer has attention with separate q, k and v; others are linear.
    delta_net = "--full-attention-interval" in options
    attends = not mamba or _part(options, "--hybrid-attention-ratio")
    usual = attends and not (latent or compressed or delta_net)
    experts = options.number("--num-experts", 0) > 0
    dense = not mamba or _part(options, "--hybrid-mlp-ratio")
    if experts and not longcat:
        # With experts, only the first layers are dense (MindSpeed-LLM's transformer_block.py).
        dense = options.number("--first-k-dense-replace", 0) > 0
    names = "--n-shared-experts", "--moe-shared-expert-intermediate-size"
    shared = experts and any(options.number(name, 0) for name in names)
    overlapped = _overlapped(options)
    gathered, deferred = (
        f"{option} {why}" if f"--{option.replace('_', '-')}" in options else ""
        for option, why in (
            ("mla_up_proj_tp_overlap", "gathers its input before the call"),
            ("defer_embedding_wgrad_compute", "keeps the gradients for later"),
        )
    )
    of_experts = "expert layers are left to the token dispatcher"
    return (
        _Layer("qkv", True, usual, "qkv"),
        _Layer("q_up", True, latent, "q_up", gathered),
        _Layer("kv_up", True, latent, "kv_up", gathered),
        _Layer("q, k, v apart", True, delta_net, "qkv"),
        _Layer("delta-net in", True, delta_net, "fc1"),
        _Layer("delta-net out", False, delta_net, "fc2"),
        _Layer("CSA's q_up, o_down", True, compressed, None),
        _Layer("CSA's o_up", False, compressed, None),
        _Layer("mamba in", True, mamba, "fc1"),
        _Layer("mamba out", False, mamba, "fc2"),
        _Layer("proj", False, attends and not compressed, "proj"),
        _Layer("fc1", True, dense, "fc1"),
        _Layer("fc2", False, dense, "fc2"),
        _Layer("shared_fc1", True, shared, "shared_fc1", overlapped),
        _Layer("shared_fc2", False, shared, "shared_fc2", overlapped),
        _Layer("experts", False, experts, "fc2", of_experts, _dispatched(options)),
        _Layer("eh_proj", True, "--mtp-num-layers" in options, "eh_proj"),
        _Layer("output", True, True, "output", deferred),
    )


def judge(
    options: Options, layers: Collection[str] = LAYERS, attention: bool = False
) -> list[Judged]:
    """The verdict on each linear layer of a launch, for any sequence length.

    Args:
        options: of its command line.
        layers: names of layers to fuse (``--commfuse-layers``).
        attention: whether attention is fused with its projection, unless something prevents it.
    """
    attention = attention and not attention_obstacle(options)
    present = (layer for layer in _layers(options) if layer.present)
    return [_judged(layer, options, layers, attention) for layer in present]


def _judged(layer: _Layer, options: Options, layers: Collection[str], attention: bool) -> Judged:
    known_as, unsplit = layer.known_as, layer.column and not sequence_parallel(options)
    alone = size_of(options, "tensor-model") == 1
    offloaded = "--cpu-offloading" in options
    reasons: tuple[tuple[Literal["left", "silent"], str | bool], ...] = (
        ("silent", layer.silent),
        ("silent", unsplit and "without sequence parallelism the forward has no transfer"),
        ("left", known_as is None and "it is not among the layers that can be fused"),
        ("left", known_as not in layers and f"{known_as} is not in the list of layers to fuse"),
        ("left", layer.exclusion),
        ("silent", alone and "a tensor-parallel group of one has nothing to transfer"),
        ("left", offloaded and "cpu_offloading needs Transformer Engine's layers"),
    )
    for state, reason in reasons:
        if reason:
            return Judged(layer.name, state, str(reason))
    operator = "linear_reduce_scatter" if sequence_parallel(options) else "linear_all_reduce"
    if layer.column:
        operator = "all_gather_linear"
    elif layer.name == "proj" and attention:
        operator = "attention_linear_reduce_scatter"
    return Judged(layer.name, "fused", "", operator)


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
    """Why the experts' linear layers use no collective of the tensor-parallel group, or empty.

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
    return ""
