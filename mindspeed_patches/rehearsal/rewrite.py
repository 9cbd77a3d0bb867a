"""Changes that every rehearsal makes to a launch, besides shortening it."""

from __future__ import annotations

from pathlib import Path

from commfuse_npu.tools.launch_script.options import Options
from commfuse_npu.tools.launch_script.short_run import (
    PEERS,
    commfuse_names,
    replace_missing_data,
    shorten,
)

__all__ = ["INSTRUCTIONS", "commfuse_run", "prepare", "reference_run"]

FB_OVERLAP = "--commfuse-fb-overlap"
"""It does not require ``--use-commfuse``, and works with options that exclude that."""
INSTRUCTIONS = "--is-instruction-dataset"
"""The option of fine-tuning, which mock data cannot replace (:mod:`.instruction_files`)."""
_SWAP = ("--swap-attention", "--swap-modules")
_PERMUTE = ("--moe-permute-fusion", "--use-fused-moe-token-permute-and-unpermute")
_MEMORY = ("--swap-optimizer", "--swap-optimizer-times", "--reuse-fp32-param")


def prepare(options: Options, iterations: int, folder: Path) -> None:
    """Change ``options`` for a rehearsal of ``iterations`` iterations.

    Args:
        options: changed in place.
        iterations: number of iterations.
        folder: base of the launch's relative paths.
    """
    shorten(options, iterations)
    # In forward-backward overlap, keep options that change what a forward saves for its backward.
    memory = _MEMORY if FB_OVERLAP in options else (*_MEMORY, *_SWAP)
    options.drop(*memory, why="there is no device memory to save")
    options.drop(*_PERMUTE, why="its kernels are not emulated; Megatron's own code takes its place")
    if "--use-commfuse" not in options and FB_OVERLAP not in options:
        # If a launch asks for both, the rehearsal shows how CommFuse refuses them.
        options.drop(*PEERS, why="CommFuse takes its place")
    # Megatron's own default is 0.1.
    if options.text("--attention-dropout") not in ("0", "0.0"):
        options.set("--attention-dropout", "0.0", why="attention on CPU has no dropout")
    if INSTRUCTIONS not in options:
        replace_missing_data(options, folder)


def reference_run(options: Options) -> list[str]:
    """The script's arguments for the run without CommFuse."""
    result = options.copy()
    result.drop("--use-commfuse", "--no-use-commfuse", *commfuse_names(options))
    return result.words


def commfuse_run(options: Options) -> list[str]:
    """The script's arguments for the run with CommFuse, including the launch's options for it."""
    result = options.copy()
    result.drop("--no-use-commfuse")
    if FB_OVERLAP not in result:
        result.set("--use-commfuse")
    return result.words
