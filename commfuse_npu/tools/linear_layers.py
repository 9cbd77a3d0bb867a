"""Which tensor-parallel linear layers a launch has, which are fused, and why others are not.

It reads options only.  At run time the wrappers around Megatron's layers decide
(``mindspeed_patches``); a test compares the reasons.  What layers a launch has was read in
Megatron-LM core_v0.12.1, MindSpeed 26.1.0 and MindSpeed-LLM 26.1.0; any other ``--spec`` is taken
for Megatron's GPTModel.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

from commfuse_npu.options import LAYERS
from commfuse_npu.tools.launch_script.options import Options

__all__ = ["Judged", "attention_obstacle", "judge", "sequence_parallel", "size_of"]


class Judged(NamedTuple):
    """The forward of a kind of linear layer.

    Attributes:
        layer: its name.
        state: ``fused``; ``left`` to Megatron; or ``silent``, it has no transfer to hide.
        reason: why it is not fused, or empty.
        column: whether it is column-parallel, and gathers; else it is row-parallel, and reduces.
    """

    layer: str
    state: Literal["fused", "left", "silent"]
    reason: str
    column: bool


class _Layer(NamedTuple):
    """A kind of linear layer in a launch.

    Attributes:
        there: whether the launch has it.
        known_as: one of ``--commfuse-layers``; ``None``: it cannot be fused.
        own: why it keeps a forward of its own, or empty.
        silent: why it has no transfer at all, or empty.
    """

    name: str
    column: bool
    there: bool
    known_as: str | None
    own: str = ""
    silent: str = ""


def _layers(options: Options) -> tuple[_Layer, ...]:
    """A line per kind of linear layer."""
    spec = options.text("--spec") or ""
    mamba, compressed, longcat = (
        name in spec for name in ("mamba_spec", "deepseek4_spec", "longcat_spec")
    )
    latent = "--multi-latent-attention" in options and not compressed
    # Qwen3-Next: every so many layers attend, with q, k and v apart; the others are linear.
    delta_net = "--full-attention-interval" in options
    attends = not mamba or _part(options, "--hybrid-attention-ratio")
    usual = attends and not (latent or compressed or delta_net)
    experts = options.number("--num-experts", 0) > 0
    dense = not mamba or _part(options, "--hybrid-mlp-ratio")
    if experts and not longcat:
        # The first layers only, if asked for (MindSpeed-LLM's transformer_block.py).
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
    of_experts = "expert layers communicate by their own rules"
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


def judge(options: Options, layers: Collection[str] = LAYERS) -> list[Judged]:
    """The forward of each linear layer of a launch, whatever its length.

    Args:
        options: of its command line.
        layers: that are to be fused (``--commfuse-layers``).
    """
    return [_judged(layer, options, layers) for layer in _layers(options) if layer.there]


def _judged(layer: _Layer, options: Options, layers: Collection[str]) -> Judged:
    known_as, unsplit = layer.known_as, layer.column and not sequence_parallel(options)
    alone = size_of(options, "tensor-model") == 1
    offloaded = "--cpu-offloading" in options
    reasons: tuple[tuple[Literal["left", "silent"], str | bool], ...] = (
        ("silent", layer.silent),
        ("silent", unsplit and "without sequence parallelism the forward has no transfer"),
        ("left", known_as is None and "it is not among the layers that can be fused"),
        ("left", known_as not in layers and f"{known_as} is not in the list of layers to fuse"),
        ("left", layer.own),
        ("silent", alone and "a tensor-parallel group of one has nothing to transfer"),
        ("left", offloaded and "cpu_offloading needs Transformer Engine's layers"),
    )
    for state, reason in reasons:
        if reason:
            return Judged(layer.name, state, str(reason), layer.column)
    return Judged(layer.name, "fused", "", layer.column)


def attention_obstacle(options: Options) -> str:
    """Why no attention waits for its projection (``--commfuse-attention``); empty if it does.

    MindSpeed's attention is recomputed by itself at the granularity ``selective``, whatever
    ``--recompute-modules`` lists.
    """
    selective = options.text("--recompute-granularity") == "selective"
    if selective or "--recompute-activations" in options:
        return "selective recomputation runs the core attention by itself"
    return "" if sequence_parallel(options) else "without sequence parallelism nothing is split"


def size_of(options: Options, kind: str) -> int:
    """Of a parallel dimension: ``tensor-model``, ``expert-model`` ...; 1 if it is not given.

    Raises:
        UsageError: it is no number.
    """
    return options.number(f"--{kind}-parallel-size", 1)


def sequence_parallel(options: Options) -> bool:
    """Whether activations are split along the sequence: never in a group of one."""
    return "--sequence-parallel" in options and size_of(options, "tensor-model") > 1


def _part(options: Options, option: str) -> bool:
    """Whether a ratio of layers is given that is not 0."""
    return (options.text(option) or "").strip("0.") != ""


def _overlapped(options: Options) -> str:
    """With these, shared experts have linear layers of MindSpeed, or ones that transfer nothing."""
    overlaps = (
        *("--moe-alltoall-overlap-comm", "--moe-allgather-overlap-comm"),
        "--moe-shared-expert-overlap",
    )
    given = next((option for option in overlaps if option in options), "")
    return given and f"{given} runs them beside the experts' transfers"


def _dispatched(options: Options) -> str:
    """Why experts have no collective of the tensor-parallel group in their linear layers.

    Grouped GEMMs have no linear layers.  Others have, and Megatron leaves their transfers to the
    dispatcher (``explicit_expert_comm``) where tensor or expert parallelism of experts is above 1;
    else their row-parallel layers reduce over the tensor-parallel group as others do
    (megatron/core/tensor_parallel/layers.py of core_v0.12.1).
    """
    if "--moe-grouped-gemm" in options:
        return "grouped GEMMs, no tensor-parallel linear layer; tokens are moved by the dispatcher"
    own = "--expert-tensor-parallel-size" in options
    tensor = size_of(options, "expert-tensor" if own else "tensor-model")
    if tensor > 1 or size_of(options, "expert-model") > 1 or "--moe-tp-extend-ep" in options:
        return "no collective of the tensor-parallel group; tokens are moved by the dispatcher"
    return ""
