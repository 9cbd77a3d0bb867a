"""What every rehearsal changes in a launch, beside making it short."""

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
"""It goes without ``--use-commfuse``, and beside what excludes that."""
INSTRUCTIONS = "--is-instruction-dataset"
"""Fine-tuning, which mock data does not do for (:mod:`.instruction_files`)."""
_SWAP = ("--swap-attention", "--swap-modules")
_MEMORY = ("--swap-optimizer", "--swap-optimizer-times", "--reuse-fp32-param")


def prepare(options: Options, iterations: int, folder: Path) -> None:
    """Change ``options`` for a rehearsal of so many iterations.

    Args:
        options: changed in place.
        iterations: how many to train.
        folder: where relative paths of the launch begin.
    """
    shorten(options, iterations)
    # What a forward keeps for its backward is of interest where both run side by side.
    memory = _MEMORY if FB_OVERLAP in options else (*_MEMORY, *_SWAP)
    options.drop(*memory, why="there is no device memory to save")
    if "--use-commfuse" not in options and FB_OVERLAP not in options:
        # A launch that asks for both is shown how CommFuse refuses them.
        options.drop(*PEERS, why="CommFuse takes its place")
    # Megatron's own default is 0.1.
    if options.text("--attention-dropout") not in ("0", "0.0"):
        options.set("--attention-dropout", "0.0", why="attention on CPU has no dropout")
    if INSTRUCTIONS not in options:
        replace_missing_data(options, folder)


def reference_run(options: Options) -> list[str]:
    """The words of the run without CommFuse."""
    own = options.copy()
    own.drop("--use-commfuse", "--no-use-commfuse", *commfuse_names(options))
    return own.words


def commfuse_run(options: Options) -> list[str]:
    """The words of the run with CommFuse, with the options of the launch for it."""
    own = options.copy()
    own.drop("--no-use-commfuse")
    if FB_OVERLAP not in own:
        own.set("--use-commfuse")
    return own.words
