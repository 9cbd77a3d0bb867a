"""`torchrun --nproc_per_node N -m scripts.cpu_pretraining`: read, check, then train.

What can go wrong in the request is found before Megatron is imported and before process groups
exist: a mistake is answered in a second by rank 0 with exit code 2. Only whether connections can
have the rate of `--link-rate` shows when there are some.

Exit codes: 0 done, 1 failed or not identical (`--compare`), 2 wrong request, 130 stopped by
Ctrl-C and 143 by SIGTERM, both with a checkpoint. torchrun itself answers 1 for all but 0.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from commfuse_npu.tools.bench.processes import die_with_parent

from .arguments import parse_arguments
from .checkpoint import CheckpointError, FoundCheckpoint, find_checkpoint, shape_of_run
from .data import Corpus, load_corpus
from .interrupt import StopRequest, exit_code, listen_for_stop
from .usage_error import UsageError, exit_with_usage_error, is_first_process, say_error

# Megatron's advice for GPUs and its use of names that newer torch renames, once per rank and call
# site. Nothing here that the reader could act on; other warnings are shown.
_EXPECTED_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "When using sequence parallelism it is recommended to set the environment variable CUDA_",
    r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code of this process."""
    try:
        args, corpus, found = _checked_request(argv)
    except UsageError as error:
        exit_with_usage_error(error)
    try:
        with listen_for_stop() as stop:
            return _run(args, corpus, found, stop)
    except UsageError as error:
        # What only the kernel could refuse: on every rank alike.
        exit_with_usage_error(error)


def _checked_request(
    argv: Sequence[str] | None,
) -> tuple[argparse.Namespace, Corpus, FoundCheckpoint | None]:
    args = parse_arguments(argv, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    corpus = load_corpus(
        args.data_path,
        valid_fraction=args.valid_fraction,
        seq_length=args.seq_length,
        need_valid=args.eval_interval > 0,
    )
    folder = _folder(args)
    found = None
    if args.resume:
        facts = shape_of_run(args, corpus.fingerprint())
        found = find_checkpoint(folder / "checkpoints", facts)
    _make_folder(folder, "for this run", "--runs-dir")
    if args.commfuse_order_log is not None:
        _make_folder(Path(args.commfuse_order_log), "of the log", "--commfuse-order-log")
    return args, corpus, found


def _make_folder(folder: Path, what: str, option: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot create the folder {folder} {what}: {error.strerror}; choose another {option}"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"no permission to write to {folder}; choose another {option}")


def _folder(args: argparse.Namespace) -> Path:
    return Path(args.runs_dir) / args.name


def _run(
    args: argparse.Namespace, corpus: Corpus, found: FoundCheckpoint | None, stop: StopRequest
) -> int:
    for message in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    from .compare import compare
    from .megatron_on_cpu import megatron_on_cpu
    from .process_groups import process_groups
    from .training import TrainingDiverged

    _set_single_process_defaults()
    try:
        with process_groups(args), megatron_on_cpu():
            if args.compare:
                return compare(args, corpus, _folder(args), stop)
            return _pretrain(args, corpus, found, stop)
    except (TrainingDiverged, CheckpointError) as error:
        # A failure of one rank has a cause there; the others only know that there was one.
        if is_first_process() or error.__cause__ is not None:
            say_error(error)
        return 1


def _set_single_process_defaults() -> None:
    """`python -m scripts.cpu_pretraining` without torchrun is a world of one."""
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "0"),
    ):
        os.environ.setdefault(name, value)


def _pretrain(
    args: argparse.Namespace, corpus: Corpus, found: FoundCheckpoint | None, stop: StopRequest
) -> int:
    from .metrics import written
    from .training import train

    folder = _folder(args)
    first = is_first_process()
    fused = "plain" if args.plain else "commfuse"
    if first:
        _announce(args, corpus, found)
        if found is None:
            _set_aside(folder)
    outcome = train(
        args,
        corpus,
        mode=fused if args.use_commfuse else "megatron",
        folder=folder,
        stop=stop,
        resume_from=found,
        overlap=args.commfuse_fb_overlap,
    )
    if first:
        print("\n".join(outcome.linears))
        if outcome.speed is not None:
            print(f"tokens/s: {outcome.speed}")
        print(f"sha256 of all weights: {outcome.weights_sha256}")
        print(written(folder), flush=True)
    if outcome.stopped_by:
        if first:
            print(
                f"stopped by signal {outcome.stopped_by} after iteration {outcome.iteration}; "
                "give the same command with --resume to go on",
                flush=True,
            )
        return exit_code(outcome.stopped_by)
    return 0


def _announce(args: argparse.Namespace, corpus: Corpus, found: FoundCheckpoint | None) -> None:
    print(
        f"data: {corpus.source}, {corpus.documents} documents, {len(corpus.train)} tokens to "
        f"train, {len(corpus.valid)} held out"
    )
    if found is not None:
        for note in found.notes:
            print(f"note: {note}")
        print(f"resuming from {found.folder}")
        if found.iteration >= args.train_iters:
            print(
                f"nothing to do: the run is at iteration {found.iteration} of {args.train_iters}; "
                "pass a larger --train-iters"
            )
    sys.stdout.flush()


def _set_aside(folder: Path) -> None:
    """A run that starts anew under a used name must not destroy the older run's checkpoints."""
    if not any((folder / "checkpoints").glob("iter_*")):
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)
    print(f"{folder} held checkpoints of an older run and was renamed to {aside}", flush=True)


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun ends its ranks, but not when it is killed itself.
        die_with_parent()
    sys.exit(main())
