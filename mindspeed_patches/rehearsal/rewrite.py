"""What every rehearsal changes in a launch: a short run that needs no files and leaves none.

Only what has to be changed is, and each change is noted with its reason where it is not obvious.
"""

from __future__ import annotations

from pathlib import Path

from commfuse_npu.tools.launch_script.options import Options

__all__ = ["MOCK_VOCABULARY", "commfuse_run", "prepare", "reference_run"]

MOCK_VOCABULARY = 4607
"""Mock data has tokens up to 4095 and an end token after the vocabulary of the null tokenizer.

A smaller vocabulary is not refused: tokens beyond it are masked in the embedding and in the loss,
and every gradient is zero.
"""

_NEVER = 1_000_000  # an interval that no rehearsal reaches
_FILES = (
    *("--load", "--save", "--pretrained-checkpoint", "--exit-on-missing-checkpoint"),
    *("--tensorboard-dir", "--wandb-project", "--wandb-exp-name", "--wandb-save-dir"),
    *("--enable-hf2mg-convert", "--enable-mg2hf-convert", "--hf-cfg-dir"),
)
_LENGTH = (
    *("--train-samples", "--rampup-batch-size", "--lr-decay-samples", "--lr-warmup-samples"),
    *("--exit-interval", "--exit-duration-in-mins"),
)
_PROFILER = (
    *("--profile", "--profile-step-start", "--profile-step-end", "--profile-ranks"),
    *("--profile-level", "--profile-with-cpu", "--profile-with-stack", "--profile-with-memory"),
    *("--profile-record-shapes", "--profile-save-path"),
)
_MEMORY = (
    *("--swap-attention", "--swap-modules", "--swap-optimizer", "--swap-optimizer-times"),
    "--reuse-fp32-param",
)
_PEERS = (
    *("--use-ascend-coc", "--coc-parallel-num", "--coc-fused-kernel", "--coc-mode"),
    "--use-ascend-mc2",
)
_DATA = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
_TOKENIZER = (
    *("--tokenizer-model", "--tokenizer-name-or-path", "--vocab-file", "--merge-file"),
    *("--tokenizer-not-use-fast", "--padded-vocab-size", "--tokenizer-padding-side"),
)


def prepare(options: Options, iterations: int, folder: Path) -> None:
    """Change ``options`` for a rehearsal of so many iterations.

    Args:
        options: changed in place.
        iterations: how many to train.
        folder: where relative paths of the launch begin.
    """
    _shorten(options, iterations)
    options.drop(*_FILES, why="a rehearsal reads and writes no checkpoints and no logs")
    options.drop(*_PROFILER, why="there is no NPU to profile")
    options.drop(*_MEMORY, why="there is no device memory to save")
    if "--use-commfuse" not in options:
        # A launch that asks for both is shown how CommFuse refuses them.
        options.drop(*_PEERS, why="CommFuse takes its place")
    # Megatron's own default is 0.1.
    if options.text("--attention-dropout") not in ("0", "0.0"):
        options.set("--attention-dropout", "0.0", why="attention on CPU has no dropout")
    _replace_missing_data(options, folder)


def _shorten(options: Options, iterations: int) -> None:
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


def _replace_missing_data(options: Options, folder: Path) -> None:
    tokenizer_is_here = not _missing_tokenizer(options, folder)
    if not _has_data(options, folder) or not tokenizer_is_here:
        why = "" if "--mock-data" in options else "the data is not on this machine"
        options.drop(*_DATA, "--data-args-path", "--data-cache-path", why=why)
        options.set("--mock-data", why=why)
    if not tokenizer_is_here:
        why = "the tokenizer is not on this machine"
        options.drop(*_TOKENIZER, why=why)
        options.set("--tokenizer-type", "NullTokenizer", why=why)
    if options.text("--tokenizer-type") == "NullTokenizer" and "--mock-data" in options:
        size = options.number("--vocab-size", 0)
        why = "mock data has tokens up to 4095"
        options.set("--vocab-size", max(size, MOCK_VOCABULARY), why=why)


def _has_data(options: Options, folder: Path) -> bool:
    paths = [
        value for name in _DATA for value in options.values(name) if not _is_number(value)
    ]  # a path may have its weight before it
    return bool(paths) and all(
        (folder / f"{path}.bin").is_file() and (folder / f"{path}.idx").is_file() for path in paths
    )


def _missing_tokenizer(options: Options, folder: Path) -> bool:
    if options.text("--tokenizer-type") == "NullTokenizer":
        return False
    files = [options.text(name) for name in ("--tokenizer-model", "--tokenizer-name-or-path")]
    named = [file for file in files if file is not None]
    return not named or not all((folder / file).exists() for file in named)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def reference_run(options: Options) -> list[str]:
    """The words of the run without CommFuse."""
    own = options.copy()
    own.drop("--use-commfuse", "--no-use-commfuse", *_commfuse(options))
    return own.words


def commfuse_run(options: Options) -> list[str]:
    """The words of the run with CommFuse, with the options of the launch for it."""
    own = options.copy()
    own.drop("--no-use-commfuse")
    own.set("--use-commfuse")
    return own.words


def _commfuse(options: Options) -> list[str]:
    return [name for name in options.names if name.startswith(("--commfuse-", "--no-commfuse-"))]
