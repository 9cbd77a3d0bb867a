"""`python -m scripts.cpu_pretraining OPTIONS`: check the options, start the ranks, report.

Errors in the options are reported within a second, before any rank starts. Only one appears later:
connections that cannot have the rate of `--link-rate`.

Exit codes: 0 done, 1 failed or not identical (`--compare`), 2 invalid request, 130 stopped by
Ctrl-C and 143 by SIGTERM.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.ranks import Ranks, RanksError

from . import compare
from .arguments import parse_arguments
from .data import Corpus, load_corpus

_DEMONSTRATION = """\
--compare --no-use-commfuse --commfuse-overlap --link-rate 80
--num-layers 2 --micro-batch-size 2 --recompute --train-iters 13"""
"""Options of the comparison that comes first without arguments."""
_FOREVER = 2e6
"""Seconds that the ranks may train: 23 days, the longest that a poll accepts."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, without options also the demonstration; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv:
        return _run(argv)
    print(f"What overlap is worth over slow links:\n{_DEMONSTRATION}", flush=True)
    code = _run(_DEMONSTRATION.split())
    if code not in (0, 2):  # 2 was reported: these connections cannot have a rate
        return code
    print("\nA training over links as they are, two minutes; Ctrl-C ends it.", flush=True)
    return _run([])


def _run(argv: Sequence[str]) -> int:
    try:
        args = parse_arguments(argv)
        corpus = load_corpus(args.seq_length)
        try:
            for folder in filter(None, (args.output, args.commfuse_order_log)):
                Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{error}; choose another folder") from error
        print(
            f"data: Python's standard library, {corpus.documents} documents, "
            f"{len(corpus.tokens)} tokens",
            flush=True,
        )
        return _train(args, corpus)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (UsageError, RanksError) as error:
        print(f"cpu_pretraining: error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UsageError) else 1


def _train(args: argparse.Namespace, corpus: Corpus) -> int:
    if args.compare and args.train_iters < compare.LEAST:
        print(
            f"no comparison of times and no picture: --train-iters {args.train_iters} is less than "
            f"{compare.LEAST}",
            flush=True,
        )
    single = "plain" if args.plain else "commfuse" if args.use_commfuse else "megatron"
    # Megatron's advice for GPUs, and its use of names that newer versions of torch rename.
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning,ignore::FutureWarning")
    minutes = args.distributed_timeout_minutes
    worker = f"{compare.__package__}.training_worker:TrainingWorker"
    limit = {"timeout": 60 * minutes, "option": "--distributed-timeout-minutes"}
    with Ranks(args.world_size, device="cpu", **limit, worker=worker) as ranks:
        paced = [] if args.link_rate is None else ranks.ask("pace", args.link_rate)
        if why := next(filter(None, paced), ""):
            raise UsageError(
                f"--link-rate {args.link_rate:g} cannot be set: {why}; leave --link-rate out for "
                "the loopback as it is, or run on Linux 4.20 or newer, outside of sandboxes that "
                "replace the kernel's sockets"
            )
        ranks.timeout = _FOREVER
        forms = compare.forms(args) if args.compare else [single]
        outcomes = ranks.ask("train", args, corpus, forms)
        for outcome in outcomes[0].values():
            if outcome.error:
                raise RanksError(outcome.error)
        if args.commfuse_order_log is not None:
            ranks.ask("close_order_log", args.commfuse_order_log)
    first = outcomes[0]
    if not args.compare:
        print("\n".join(first[single].layers))
        print(f"sha256 of all weights: {first[single].weights_sha256}", flush=True)
        return 0
    print("", *compare.report(first), sep="\n")
    if args.train_iters >= compare.LEAST:
        print(compare.write_median_iterations(outcomes, args.link_rate, args.output), flush=True)
    return 0 if compare.identical(first) else 1


if __name__ == "__main__":
    # Raise SystemExit, so that the ranks are ended and their folder is removed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
