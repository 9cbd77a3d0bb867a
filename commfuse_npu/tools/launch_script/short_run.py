"""Short runs of a launch: a few iterations that need no files, leave none and end in time.

Only necessary options are changed; a reason is recorded where it is not obvious.

torchrun makes every rank a session leader, with its data loaders in the session, so no process
group has them all.  They are identified by an environment variable (Linux).
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from commfuse_npu.runtime.child_process import die_with_parent
from commfuse_npu.tools.launch_script.option_words import Options

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


def names_files(name: str) -> bool:
    """Whether an option names data, checkpoints or logs, and no size of the training."""
    return name in (*_FILES, *_DATA_OPTIONS, *_TOKENIZER) or name.startswith(_LOGS)


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
    """Use mock data if a file of the data or of the tokenizer is missing in the launch's folder."""
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


# ------------------------------------------------------------------ running it


def torchrun_here(processes: int) -> list[str]:
    """torchrun for ranks of this machine alone, which meet at a free port."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1"),
        *("--nproc_per_node", str(processes), "--rdzv_backend", "c10d"),
        *("--rdzv_endpoint", "127.0.0.1:0", "--local_addr", "127.0.0.1"),
    ]


_MARK = "COMMFUSE_STARTED_BY"
"""The environment variable of all processes that a command started."""

_GRACE = 20.0
"""Seconds from SIGTERM to SIGKILL, and then the longest wait for the processes to end."""


def run_bounded(
    command: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    log: Path,
    seconds: float,
) -> int:
    """Run a command in a folder, with its output in ``log``; returns its exit code.

    Args:
        seconds: time limit.

    Raises:
        TimeoutError: it exceeded the time limit and was ended.
    """
    mark = f"{os.getpid()}-{time.time_ns()}"
    with log.open("w", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**environment, _MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"did not end within {seconds:.0f} s") from error
        finally:
            # No process outlives the command, not even after an error or Ctrl-C.
            _end(process, mark)


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    if process.poll() is None:
        # torchrun forwards the signal to its ranks.
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    # A device is free only once the processes that used it have gone.
    end = time.monotonic() + _GRACE
    while (pids := list(_marked(mark))) and time.monotonic() < end:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _marked(mark: str) -> Iterator[int]:
    """Processes that a command started, directly or indirectly."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if f"{_MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)


# C++ stacks, lists of all kernels of an operator, and messages that follow a rank's failure.
_NOISE = re.compile(r"frame #|registered at |\[ERROR\] .* ERR\d+|[WEI]\d{4} .*elastic")


def last_lines(log: Path) -> list[str]:
    """The last 30 lines of a log: the traceback of the first failed rank, if there is one."""
    text = log.read_text("utf-8", errors="replace").splitlines()
    text = [line for line in text if line.strip() and not _NOISE.search(line)]
    own = next((i for i, line in enumerate(text) if "torch/distributed/run.py" in line), len(text))
    starts = [i for i, line in enumerate(text[:own]) if "Traceback (most recent call last)" in line]
    if own < len(text) and starts:
        own = starts.pop()  # torchrun's own traceback says nothing that the ranks did not
    text = text[starts[0] if starts else 0 : own]
    # torch prefixes the lines of a rank's traceback; those of several ranks are interleaved.
    mark = re.match(r"\[rank\d+\]: ", text[0]) if text else None
    if mark is not None:
        text = [line.removeprefix(mark[0]) for line in text if line.startswith(mark[0])]
    return text[-30:]
