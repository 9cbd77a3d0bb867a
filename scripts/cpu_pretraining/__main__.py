"""`python -m scripts.cpu_pretraining OPTIONS`: check the options, start the ranks, report.

Errors in the options are reported within a second, before any rank starts. Only two appear later:
connections that cannot have the rate of `--link-rate`, and a training in which nothing is fused.

Exit codes: 0 done, 1 failed or not identical (`--compare`), 2 invalid request, 130 stopped by
Ctrl-C and 143 by SIGTERM, both with a checkpoint.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from commfuse_npu.tools.ranks import Ranks, RanksError

from . import compare
from .arguments import UsageError, parse_arguments
from .checkpoint import CheckpointError, find_checkpoint, run_facts
from .data import Corpus, load_corpus
from .outcome import Outcome, plot_loss, written

_DEMONSTRATION = (
    "--compare --no-use-commfuse --commfuse-fb-overlap --link-rate 80 --num-layers 2 "
    "--micro-batch-size 2 --train-iters 13"
)
"""Options of the final demonstration without arguments: Megatron's order, then with overlap."""
_FOREVER = 2e6
"""Seconds that the ranks may train: 23 days, the longest that a poll accepts."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, without options also the demonstration; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    code = _run(argv)
    if argv or code:
        return code
    print(f"\nWhat overlap is worth over slower links: the options {_DEMONSTRATION}", flush=True)
    code = _run(_DEMONSTRATION.split())
    return 0 if code == 2 else code  # reported: these connections cannot have a rate


def _run(argv: Sequence[str]) -> int:
    try:
        args = parse_arguments(argv)
        corpus = load_corpus(args.data_path, args.seq_length)
        folder, checkpoint, notes = args.runs_dir / args.name, None, list[str]()
        if args.resume:
            facts = run_facts(args, corpus.fingerprint())
            checkpoint, notes = find_checkpoint(folder / "checkpoints", facts)
        for path, option in (
            (folder, "--runs-dir"),
            (args.commfuse_order_log, "--commfuse-order-log"),
        ):
            try:
                Path(path or folder).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(
                    f"cannot make the folder {path}: {error.strerror}; choose another {option}"
                ) from error
            if not os.access(path or folder, os.W_OK | os.X_OK):
                raise UsageError(f"no permission to write to {path}; choose another {option}")
        print(f"data: {corpus.source}, {corpus.documents} documents, {len(corpus.tokens)} tokens")
        if checkpoint is not None:
            print("\n".join([*(f"note: {note}" for note in notes), f"resuming from {checkpoint}"]))
        elif not args.compare and any(folder.glob("checkpoints/iter_*")):
            _set_aside(folder)
        sys.stdout.flush()
        return _train(args, corpus, folder, checkpoint)
    except KeyboardInterrupt:  # before there are ranks
        return 128 + signal.SIGINT
    except (UsageError, CheckpointError) as error:
        return _failed(error, 2 if isinstance(error, UsageError) else 1)
    except RanksError as error:
        return _failed(f"{error}\nWhat was saved is there: give the same command with --resume", 1)


def _failed(error: object, code: int) -> int:
    print(f"cpu_pretraining: error: {error}", file=sys.stderr, flush=True)
    return code


def _set_aside(folder: Path) -> None:
    """Rename an older run's folder, so that a new run does not destroy its checkpoints."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)
    print(f"{folder} held checkpoints of an older run and was renamed to {aside}")


@contextmanager
def _started(args: argparse.Namespace) -> Iterator[tuple[Ranks, list[int]]]:
    """Start the ranks; yields them and the received signals, which are passed on to the ranks.

    A signal that arrives while the ranks start is blocked until they can handle it.
    """
    received: list[int] = []

    def pass_on(number: int, _: Any) -> None:
        received.append(number)
        for rank in multiprocessing.active_children():
            rank.terminate()

    # Megatron's advice for GPUs, and its use of names that newer versions of torch rename.
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning,ignore::FutureWarning")
    before = {number: signal.signal(number, pass_on) for number in _SIGNALS}
    resource_tracker.ensure_running()  # started later, it would unblock the signals
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        minutes = args.distributed_timeout_minutes
        worker = f"{compare.__package__}.training:Worker"
        with Ranks(args.world_size, device="cpu", timeout=60 * minutes, worker=worker) as ranks:
            ranks.timeout = _FOREVER
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            yield ranks, received
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        for number, handler in before.items():
            signal.signal(number, handler)


def _train(args: argparse.Namespace, corpus: Corpus, folder: Path, checkpoint: Path | None) -> int:
    folders = {"plain" if args.plain else "commfuse" if args.use_commfuse else "megatron": folder}
    if args.compare:
        folder /= "compare"
        folders = {form: folder / form for form in compare.forms(args)}
    outcomes: dict[str, list[Outcome]] = {}
    with _started(args) as (ranks, received):
        for form, place in folders.items():
            if args.compare:
                print(f"--- training: {form}", flush=True)
            outcomes[form] = ranks.ask("train", args, corpus, form, place, checkpoint)
            if failed := next((result for result in outcomes[form] if result.error), None):
                return _failed(failed.error, failed.code)
            outcome = outcomes[form][0]
            plot_loss(place)
            if outcome.stopped:
                break
        if args.commfuse_order_log is not None:
            ranks.ask("close_order_log", args.commfuse_order_log)
    if not args.compare:
        _report(outcome, folder)
    if not outcome.stopped:
        return _compared(outcomes, folder) if args.compare else 0
    number = received[0] if received else signal.SIGTERM
    advice = "give the same command with --resume to go on"
    if args.compare:
        advice = "a comparison cannot be resumed, start it again"
    print(f"stopped by signal {number} after iteration {outcome.iteration}; {advice}", flush=True)
    return 128 + number


def _report(outcome: Outcome, folder: Path) -> None:
    print("\n".join(outcome.layers))
    if speed := outcome.describe_speed():
        print(f"tokens/s: {speed}")
    if not outcome.entries:
        print(f"nothing to do: the run is at iteration {outcome.iteration}; raise --train-iters")
    print(f"sha256 of all weights: {outcome.weights_sha256}\n{written(folder)}", flush=True)


def _compared(ranks: dict[str, list[Outcome]], folder: Path) -> int:
    outcomes = {form: on_ranks[0] for form, on_ranks in ranks.items()}
    lines = [*(written(folder / form) for form in outcomes), *compare.report(outcomes)]
    print("\n".join(lines), flush=True)
    print(compare.draw_timelines(ranks, folder / "timelines.png"))
    equal = compare.identical(outcomes)
    print(f"identical: {equal}", flush=True)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
