"""Which tensor-parallel linear layers a launch has, which are fused, and why others are not.

It reads options only.  At run time the wrappers around Megatron's layers decide
(``mindspeed_patches``); a test compares the reasons.  What layers a launch has was read in
Megatron-LM core_v0.12.1, MindSpeed 26.1.0 and MindSpeed-LLM 26.1.0; any other ``--spec`` is taken
for Megatron's GPTModel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal, NamedTuple

from commfuse_npu.options import LAYERS
from commfuse_npu.tools.launch_script.options import Options

__all__ = [
    "LINEAR_LAYERS",
    "Judged",
    "LinearLayer",
    "attention_obstacle",
    "judge",
    "sequence_parallel",
    "size_of",
]

Has = Callable[[Options], bool]
Why = Callable[[Options], str]


class LinearLayer(NamedTuple):
    """A kind of linear layer.

    Attributes:
        name: of the kind.
        column: whether it is column-parallel, and gathers; else it is row-parallel, and reduces.
        there: whether a launch has it.
        known_as: one of ``--commfuse-layers``; ``None``: it cannot be fused.
        own: why it keeps a forward of its own, or empty.
        silent: why it has no transfer at all, or empty.
    """

    name: str
    column: bool
    there: Has
    known_as: str | None
    own: Why = lambda options: ""
    silent: Why = lambda options: ""


class Judged(NamedTuple):
    """The forward of a layer.

    Attributes:
        layer: its name.
        state: ``fused``; ``left`` to Megatron; or ``silent``, it has no transfer to hide.
        reason: why it is not fused, or empty.
        column: whether it is column-parallel.
    """

    layer: str
    state: Literal["fused", "left", "silent"]
    reason: str
    column: bool


def judge(options: Options, layers: Collection[str] = LAYERS) -> list[Judged]:
    """The forward of each linear layer of a launch, whatever its length.

    Args:
        options: of its command line.
        layers: that are to be fused (``--commfuse-layers``).
    """
    return [_judged(layer, options, layers) for layer in LINEAR_LAYERS if layer.there(options)]


def _judged(layer: LinearLayer, options: Options, layers: Collection[str]) -> Judged:
    known_as, unsplit = layer.known_as, layer.column and not sequence_parallel(options)
    alone = size_of(options, "tensor-model") == 1
    reasons: tuple[tuple[Literal["left", "silent"], str | bool], ...] = (
        ("silent", layer.silent(options)),
        ("silent", unsplit and "without sequence parallelism the forward has no transfer"),
        ("left", known_as is None and "it is not among the layers that can be fused"),
        ("left", known_as not in layers and f"{known_as} is not in the list of layers to fuse"),
        ("left", layer.own(options)),
        ("silent", alone and "a tensor-parallel group of one has nothing to transfer"),
        (
            "left",
            "--cpu-offloading" in options and "cpu_offloading needs Transformer Engine's layers",
        ),
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
    return max(1, options.number(f"--{kind}-parallel-size", 1))


def sequence_parallel(options: Options) -> bool:
    """Whether activations are split along the sequence: never in a group of one."""
    return "--sequence-parallel" in options and size_of(options, "tensor-model") > 1


def _given(*names: str) -> Has:
    return lambda options: any(name in options for name in names)


def _part(options: Options, option: str) -> bool:
    """Whether a ratio of layers is given that is not 0."""
    return (options.text(option) or "").strip("0.") != ""


def _spec(name: str) -> Has:
    return lambda options: name in (options.text("--spec") or "")


_mamba, _compressed, _longcat = _spec("mamba_spec"), _spec("deepseek4_spec"), _spec("longcat_spec")
# Qwen3-Next: every so many layers attend, with q, k and v apart; the others are linear.
_delta_net = _given("--full-attention-interval")


def _latent(options: Options) -> bool:
    return "--multi-latent-attention" in options and not _compressed(options)


def _attends(options: Options) -> bool:
    return not _mamba(options) or _part(options, "--hybrid-attention-ratio")


def _usual_attention(options: Options) -> bool:
    others = _latent, _compressed, _delta_net
    return _attends(options) and not any(other(options) for other in others)


def _experts(options: Options) -> bool:
    return options.number("--num-experts", 0) > 0


def _dense(options: Options) -> bool:
    """With experts, the first layers only, if asked for (MindSpeed-LLM's transformer_block.py)."""
    if not _experts(options) or _longcat(options):
        return not _mamba(options) or _part(options, "--hybrid-mlp-ratio")
    return options.number("--first-k-dense-replace", 0) > 0


def _shared_experts(options: Options) -> bool:
    names = "--n-shared-experts", "--moe-shared-expert-intermediate-size"
    return _experts(options) and any(options.number(name, 0) for name in names)


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


def _why(option: str, why: str) -> Why:
    return lambda options: why if option in options else ""


_GATHERED = _why(
    "--mla-up-proj-tp-overlap", "mla_up_proj_tp_overlap gathers its input before the call"
)
_DEFERRED = _why(
    "--defer-embedding-wgrad-compute",
    "defer_embedding_wgrad_compute keeps the gradients for later",
)


def _of_experts(options: Options) -> str:
    return "expert layers communicate by their own rules"


def _projects(options: Options) -> bool:
    return _attends(options) and not _compressed(options)


LINEAR_LAYERS = (
    LinearLayer("qkv", True, _usual_attention, "qkv"),
    LinearLayer("q_up", True, _latent, "q_up", _GATHERED),
    LinearLayer("kv_up", True, _latent, "kv_up", _GATHERED),
    LinearLayer("q, k, v apart", True, _delta_net, "qkv"),
    LinearLayer("delta-net in", True, _delta_net, "fc1"),
    LinearLayer("delta-net out", False, _delta_net, "fc2"),
    LinearLayer("CSA's q_up, o_down", True, _compressed, None),
    LinearLayer("CSA's o_up", False, _compressed, None),
    LinearLayer("mamba in", True, _mamba, "fc1"),
    LinearLayer("mamba out", False, _mamba, "fc2"),
    LinearLayer("proj", False, _projects, "proj"),
    LinearLayer("fc1", True, _dense, "fc1"),
    LinearLayer("fc2", False, _dense, "fc2"),
    LinearLayer("shared_fc1", True, _shared_experts, "shared_fc1", _overlapped),
    LinearLayer("shared_fc2", False, _shared_experts, "shared_fc2", _overlapped),
    LinearLayer("experts", False, _experts, "fc2", _of_experts, _dispatched),
    LinearLayer("eh_proj", True, _given("--mtp-num-layers"), "eh_proj"),
    LinearLayer("output", True, lambda options: True, "output", _DEFERRED),
)
"""A line per kind of linear layer."""
