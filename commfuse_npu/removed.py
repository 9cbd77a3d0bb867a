"""Names and options that this version does not have, or calls otherwise."""

from __future__ import annotations

__all__ = ["REMOVED", "RENAMED", "missing_name", "removed"]

RENAMED = {
    "--commfuse-fb-overlap": "--commfuse-overlap",
    "--commfuse-fb-overlap-memory": "--commfuse-overlap-memory",
}
"""Old names of options, which work until the next release, and say so."""

_SHARDS = (
    "PyTorch's FSDP2 shards a model over its data-parallel ranks, with torch.distributed.fsdp."
    "fully_shard(module), torch.optim and torch.nn.utils.clip_grad_norm_"
)
_FORMS = (
    "in a checkout, python -m scripts.evidence.measured compares forms of a layer on a CPU; "
    "commfuse-npu measure --launch compares those of a launch on NPUs"
)

REMOVED = {
    **dict.fromkeys(
        (
            *("ShardedLinear", "shard_linears", "sharded_linear"),
            *("average_gradients", "clip_gradient_norm"),
        ),
        _SHARDS,
    ),
    "--commfuse-wgrad": "a weight gradient is one GEMM over all rows, as in Megatron; leave it out",
    "--commfuse-taper": "all chunks of a block have one length; leave it out, or choose their "
    "number with --commfuse-chunks",
    "taper_down": "all chunks have one length; Schedule.runs cuts a block into them",
    **dict.fromkeys(
        ("Order", "HandOverPoint"), "passes take turns by one rule (commfuse_npu.plan.turn_rule)"
    ),
    "SideState": "it is called PassState",
    "OtherSideError": "it is called OtherPassError",
    "commfuse-npu bench": _FORMS,
    **{f"commfuse-npu measure --{name}": _FORMS for name in ("works", "forms", "ratios", "rounds")},
}
"""By name: a name in Python, an option of a launch with its dashes, or a command's words."""


def removed(name: str) -> str:
    """``NAME was removed: what to use in its place``; empty if it was not."""
    return f"{name} was removed: {REMOVED[name]}" if name in REMOVED else ""


def missing_name(module: str, name: str) -> Exception:
    """The error for a name that a module does not have.

    For a removed one it is an ImportError, which ``from module import name`` passes on; it would
    replace an AttributeError by an error without the way out.
    """
    if why := removed(name):
        return ImportError(f"{module}: {why}")
    return AttributeError(f"module {module!r} has no attribute {name!r}")
