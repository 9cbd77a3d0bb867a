"""Which tensor-parallel linear layers a launch has, which are fused, and why others are not.

Reads the words of a command line only.  What decides at run time are the wrappers around Megatron's
layers (``mindspeed_patches``); this says the same beforehand, in their words, and tests hold the
two against each other.  What layers a launch has was read in Megatron-LM core_v0.12.1, MindSpeed
26.1.0 and MindSpeed-LLM 26.1.0; any other ``--spec`` is taken for Megatron's GPTModel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from commfuse_npu.tools.launch_script.options import value_of

__all__ = [
    "LAYERS",
    "LINEAR_LAYERS",
    "Judged",
    "LinearLayer",
    "attention_obstacle",
    "judge",
    "recomputes_attention",
    "sequence_parallel",
    "size_of",
]

LAYERS = (
    *("qkv", "q_down", "q_up", "kv_down", "kv_up", "proj"),
    *("fc1", "fc2", "shared_fc1", "shared_fc2", "eh_proj", "output"),
)
"""By which names ``--commfuse-layers`` knows them."""

_UNKNOWN = "it is not among the layers that can be fused"

Words = Sequence[str]
State = Literal["fused", "left", "silent"]


@dataclass(frozen=True)
class LinearLayer:
    """A kind of linear layer, and the rules for it.  A rule is a function of the words of a launch.

    Attributes:
        name: of the kind.
        column: whether it is column-parallel, and gathers; else it is row-parallel, and reduces.
        there: whether a launch has it.
        known_as: one of :data:`LAYERS`; ``None``: it is not among the layers that are fused.
        own: why it keeps a forward of its own, or empty.
        silent: why it has no transfer at all, or empty.
    """

    name: str
    column: bool
    there: Callable[[Words], bool]
    known_as: str | None
    own: Callable[[Words], str] = lambda words: ""
    silent: Callable[[Words], str] = lambda words: ""


@dataclass(frozen=True)
class Judged:
    """What becomes of a layer's forward.

    Attributes:
        layer: its name.
        state: ``fused``; ``left`` to Megatron; or ``silent``, it has no transfer to hide.
        reason: why it is not fused, or empty.
    """

    layer: str
    state: State
    reason: str = ""


def judge(words: Words, layers: Collection[str] = LAYERS) -> list[Judged]:
    """What becomes of each linear layer of a launch, whatever its length.

    Args:
        words: of its command line.
        layers: that are to be fused (``--commfuse-layers``).
    """
    return [_judged(layer, words, layers) for layer in LINEAR_LAYERS if layer.there(words)]


def _judged(layer: LinearLayer, words: Words, layers: Collection[str]) -> Judged:
    if reason := layer.silent(words):
        return Judged(layer.name, "silent", reason)
    if layer.column and not sequence_parallel(words):
        reason = "without sequence parallelism the forward has no transfer"
        return Judged(layer.name, "silent", reason)
    if layer.known_as not in layers:
        unlisted = f"{layer.known_as} is not in the list of layers to fuse"
        return Judged(layer.name, "left", unlisted if layer.known_as else _UNKNOWN)
    if reason := layer.own(words):
        return Judged(layer.name, "left", reason)
    if size_of(words, "tensor-model") == 1:
        reason = "a tensor-parallel group of one has nothing to transfer"
        return Judged(layer.name, "silent", reason)
    if _has(words, "--cpu-offloading"):
        reason = "cpu_offloading needs Transformer Engine's layers"
        return Judged(layer.name, "left", reason)
    return Judged(layer.name, "fused")


def recomputes_attention(words: Words) -> bool:
    """Whether the core attention is recomputed by itself.

    MindSpeed's attention does so at this granularity whatever ``--recompute-modules`` lists.
    """
    selective = value_of(words, "--recompute-granularity") == "selective"
    return selective or _has(words, "--recompute-activations")


def attention_obstacle(words: Words) -> str:
    """Why no attention waits for its projection (``--commfuse-attention``); empty if it does."""
    if recomputes_attention(words):
        return "selective recomputation runs the core attention by itself"
    if not sequence_parallel(words):
        return "without sequence parallelism nothing is split"
    return ""


def size_of(words: Words, kind: str) -> int:
    """Of a parallel dimension: ``tensor-model``, ``expert-model`` ...; 1 if it is not given.

    What is no number counts as 1.
    """
    return max(1, _number(words, f"--{kind}-parallel-size"))


def sequence_parallel(words: Words) -> bool:
    """Whether activations are split along the sequence: never in a group of one."""
    return _has(words, "--sequence-parallel") and size_of(words, "tensor-model") > 1


def _has(words: Words, option: str) -> bool:
    return value_of(words, option) is not None


def _number(words: Words, option: str) -> int:
    value = value_of(words, option) or ""
    return int(value) if value.isdecimal() and len(value) <= 18 else 0


def _part(words: Words, option: str) -> bool:
    """Whether a ratio of layers is given that is not 0."""
    return (value_of(words, option) or "").strip("0.") != ""


def _spec(name: str) -> Callable[[Words], bool]:
    return lambda words: name in (value_of(words, "--spec") or "")


_mamba, _compressed, _longcat = _spec("mamba_spec"), _spec("deepseek4_spec"), _spec("longcat_spec")


def _latent(words: Words) -> bool:
    return _has(words, "--multi-latent-attention") and not _compressed(words)


def _delta_net(words: Words) -> bool:
    """Qwen3-Next: every so many layers attend, with q, k and v apart; the others are linear."""
    return _has(words, "--full-attention-interval")


def _attends(words: Words) -> bool:
    return not _mamba(words) or _part(words, "--hybrid-attention-ratio")


def _usual_attention(words: Words) -> bool:
    others = _latent, _compressed, _delta_net
    return _attends(words) and not any(other(words) for other in others)


def _experts(words: Words) -> bool:
    return _number(words, "--num-experts") > 0


def _dense(words: Words) -> bool:
    """With experts, the first layers only, if asked for (MindSpeed-LLM's transformer_block.py)."""
    if not _experts(words) or _longcat(words):
        return not _mamba(words) or _part(words, "--hybrid-mlp-ratio")
    return _number(words, "--first-k-dense-replace") > 0


def _shared_experts(words: Words) -> bool:
    names = ("--n-shared-experts", "--moe-shared-expert-intermediate-size")
    return _experts(words) and any(_number(words, name) for name in names)


_OVERLAPS = (
    "--moe-alltoall-overlap-comm",
    "--moe-allgather-overlap-comm",
    "--moe-shared-expert-overlap",
)


def _overlapped(words: Words) -> str:
    """With these, shared experts have linear layers of MindSpeed, or ones that transfer nothing."""
    given = [option for option in _OVERLAPS if _has(words, option)]
    return f"{given[0]} runs them beside the experts' transfers" if given else ""


def _dispatched(words: Words) -> str:
    """Why experts have no collective of the tensor-parallel group in their linear layers.

    Grouped GEMMs have no linear layers.  Others have, and Megatron leaves their transfers to the
    dispatcher (``explicit_expert_comm``) where tensor or expert parallelism of experts is above 1;
    else their row-parallel layers reduce over the tensor-parallel group as others do
    (megatron/core/tensor_parallel/layers.py of core_v0.12.1).
    """
    if _has(words, "--moe-grouped-gemm"):
        return "grouped GEMMs, no tensor-parallel linear layer; tokens are moved by the dispatcher"
    tensor = size_of(words, "expert-tensor" if _has(words, _EXPERT_TP) else "tensor-model")
    if tensor > 1 or size_of(words, "expert-model") > 1 or _has(words, "--moe-tp-extend-ep"):
        return "no collective of the tensor-parallel group; tokens are moved by the dispatcher"
    return ""


_EXPERT_TP = "--expert-tensor-parallel-size"


def _gathered_before(words: Words) -> str:
    if _has(words, "--mla-up-proj-tp-overlap"):
        return "mla_up_proj_tp_overlap gathers its input before the call"
    return ""


def _of_experts(words: Words) -> str:
    return "expert layers communicate by their own rules"


def _deferred(words: Words) -> str:
    if _has(words, "--defer-embedding-wgrad-compute"):
        return "defer_embedding_wgrad_compute keeps the gradients for later"
    return ""


LINEAR_LAYERS = (
    LinearLayer("qkv", True, _usual_attention, "qkv"),
    LinearLayer("q_up", True, _latent, "q_up", _gathered_before),
    LinearLayer("kv_up", True, _latent, "kv_up", _gathered_before),
    LinearLayer("q, k, v apart", True, _delta_net, "qkv"),
    LinearLayer("delta-net in", True, _delta_net, "fc1"),
    LinearLayer("delta-net out", False, _delta_net, "fc2"),
    LinearLayer("CSA's q_up, o_down", True, _compressed, None),
    LinearLayer("CSA's o_up", False, _compressed, None),
    LinearLayer("mamba in", True, _mamba, "fc1"),
    LinearLayer("mamba out", False, _mamba, "fc2"),
    LinearLayer("proj", False, lambda words: _attends(words) and not _compressed(words), "proj"),
    LinearLayer("fc1", True, _dense, "fc1"),
    LinearLayer("fc2", False, _dense, "fc2"),
    LinearLayer("shared_fc1", True, _shared_experts, "shared_fc1", _overlapped),
    LinearLayer("shared_fc2", False, _shared_experts, "shared_fc2", _overlapped),
    LinearLayer("experts", False, _experts, "fc2", _of_experts, _dispatched),
    LinearLayer("eh_proj", True, lambda words: _has(words, "--mtp-num-layers"), "eh_proj"),
    LinearLayer("output", True, lambda words: True, "output", _deferred),
)
"""A line per kind: where another kind is fused, or no longer, its line changes."""
