"""Shortens a launch to a few iterations that need no files and leave none.

Only necessary options are changed; a reason is recorded where it is not obvious.
"""

from __future__ import annotations

from pathlib import Path

from commfuse_npu.tools.launch_script.options import Options

__all__ = [
    "MOCK_VOCABULARY",
    "PEERS",
    "commfuse_names",
    "drop_data_and_tokenizer",
    "missing_tokenizer",
    "replace_missing_data",
    "shorten",
]

MOCK_VOCABULARY = 4607
"""Mock data has tokens up to 4095 and an end token after the vocabulary of the null tokenizer.

A smaller vocabulary is not refused: tokens beyond it are masked in the embedding and in the loss,
and every gradient is zero.
"""

PEERS = (
    *("--use-ascend-coc", "--coc-parallel-num", "--coc-fused-kernel", "--coc-mode"),
    "--use-ascend-mc2",
)
"""Options of other overlaps, which exclude CommFuse."""

_NEVER = 1_000_000
"""An interval longer than any short run."""
_FILES = (
    *("--load", "--save", "--pretrained-checkpoint", "--exit-on-missing-checkpoint"),
    *("--enable-hf2mg-convert", "--enable-mg2hf-convert", "--hf-cfg-dir"),
)
_LOGS = "--tensorboard-", "--wandb-", "--profile"
"""Prefixes of options."""
_LENGTH = (
    *("--train-samples", "--rampup-batch-size", "--lr-decay-samples", "--lr-warmup-samples"),
    *("--exit-interval", "--exit-duration-in-mins"),
)
_DATA = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
_DATA_OPTIONS = (*_DATA, "--data-args-path", "--data-cache-path")
_TOKENIZER_FILES = ("--tokenizer-model", "--tokenizer-name-or-path")
_TOKENIZER = (
    *(*_TOKENIZER_FILES, "--vocab-file", "--merge-file"),
    *("--tokenizer-not-use-fast", "--padded-vocab-size", "--tokenizer-padding-side"),
)


def shorten(options: Options, iterations: int) -> None:
    """Train ``iterations`` iterations, each logged, without checkpoints and profiles."""
    options.set("--train-iters", iterations)
    options.drop(*_LENGTH)
    if "--lr-warmup-iters" in options:
        warmup = options.number("--lr-warmup-iters", 0)
        options.set("--lr-warmup-iters", min(warmup, iterations - 1))
    if options.number("--lr-decay-iters", _NEVER) < iterations:
        options.drop("--lr-decay-iters")
    options.set("--log-interval", 1)
    options.set("--save-interval", _NEVER)
    options.set("--eval-interval", _NEVER)
    options.set("--eval-iters", 0)
    logs = (name for name in options.names if name.startswith(_LOGS))
    options.drop(*_FILES, *logs, why="no checkpoints, logs or profiles")


def replace_missing_data(options: Options, folder: Path) -> None:
    """Use mock data if a file of the data or of the tokenizer is missing on this machine.

    Args:
        options: changed in place.
        folder: base of the launch's relative paths.
    """
    no_tokenizer = missing_tokenizer(options, folder)
    if no_tokenizer or not _has_data(options, folder):
        why = "" if "--mock-data" in options else "the data is not on this machine"
        options.drop(*_DATA_OPTIONS, why=why)
        options.set("--mock-data", why=why)
    if no_tokenizer:
        why = "the tokenizer is not on this machine"
        options.drop(*_TOKENIZER, why=why)
        options.set("--tokenizer-type", "NullTokenizer", why=why)
    if options.text("--tokenizer-type") == "NullTokenizer" and "--mock-data" in options:
        size = max(options.number("--vocab-size", 0), MOCK_VOCABULARY)
        options.set("--vocab-size", size, why="mock data has tokens up to 4095")


def drop_data_and_tokenizer(options: Options, why: str) -> None:
    """Remove the options of both, so that others can be set."""
    options.drop(*_DATA_OPTIONS, "--mock-data", *_TOKENIZER, why=why)


def _has_data(options: Options, folder: Path) -> bool:
    words = (word for name in _DATA for word in options.values(name))
    # A path may be preceded by its weight.
    paths = [word for word in words if not word.replace(".", "", 1).isdecimal()]
    return bool(paths) and all(
        (folder / f"{path}{suffix}").is_file() for path in paths for suffix in (".bin", ".idx")
    )


def missing_tokenizer(options: Options, folder: Path) -> bool:
    """Whether files of the tokenizer are missing; ``folder`` is the base of relative paths."""
    if options.text("--tokenizer-type") == "NullTokenizer":
        return False
    files = [file for name in _TOKENIZER_FILES if (file := options.text(name)) is not None]
    return not files or not all((folder / file).exists() for file in files)


def commfuse_names(options: Options) -> list[str]:
    """The names of the given CommFuse options, except ``--use-commfuse`` itself."""
    return [name for name in options.names if name.startswith(("--commfuse-", "--no-commfuse-"))]
