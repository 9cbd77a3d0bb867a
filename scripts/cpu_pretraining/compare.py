"""`--compare`: the same training three times, and whether fusing changed a single bit.

"plain" runs collectives and GEMMs one after the other, with the row blocks of the fused layers;
"commfuse" runs the fused layers; "megatron" runs Megatron's own layers, whose GEMMs are not split.
Plain and fused must agree in every loss and every weight. Megatron's are shown for information: a
GEMM that is not split may round differently. With `--commfuse-fb-overlap`, "overlap" runs
Megatron's layers once more, forwards beside backwards, and must agree with Megatron's in every bit.

Their tokens per second are shown too. The trainings run one after the other, so whatever else the
machine does may fall on one of them: a ratio comes with the range that the quartiles give, and not
at all from fewer than `LEAST_COUNTED` iterations. With `--link-rate` there is
a wire to hide, without it there is none.
"""

from __future__ import annotations

import argparse
import struct
import sys
from pathlib import Path

import torch.distributed as dist

from .compare_page import compare_page
from .data import Corpus
from .interrupt import StopRequest, exit_code
from .link_rate import COLLECTIVES_NOTE
from .metrics import written
from .speed import LEAST_COUNTED, WARM_UP_ITERATIONS
from .training import Outcome, train

__all__ = ["COMPARED_MODES", "compare"]

COMPARED_MODES = ("plain", "commfuse", "megatron")


def compare(args: argparse.Namespace, corpus: Corpus, folder: Path, stop: StopRequest) -> int:
    """Train once per mode from the same seed and report; collective. Returns the exit code.

    0 if plain and fused are identical, 1 if not, 128 + signal if interrupted.
    """
    outcomes: dict[str, Outcome] = {}
    first = dist.get_rank() == 0
    modes = (*COMPARED_MODES, *(["overlap"] if args.commfuse_fb_overlap else []))
    for mode in modes:
        overlap = mode == "overlap"
        if first:
            print(f"--- training with {mode} linear layers", flush=True)
        outcome = train(
            args,
            corpus,
            mode="megatron" if overlap else mode,
            folder=folder / "compare" / mode,
            stop=stop,
            checkpoints=False,
            overlap=overlap,
        )
        if outcome.stopped_by:
            if first:
                print("interrupted: a comparison cannot be resumed, start it again", flush=True)
            return exit_code(outcome.stopped_by)
        outcomes[mode] = outcome
    identical = _same_bits(outcomes["plain"], outcomes["commfuse"])
    if "overlap" in outcomes:
        identical &= _same_bits(outcomes["megatron"], outcomes["overlap"])
    if first:
        print("\n".join(_report(outcomes)), flush=True)
        if args.html is not None:
            _write_page(args.html, outcomes, identical)
        for mode in modes:
            print(written(folder / "compare" / mode))
        print(f"identical: {identical}", flush=True)
    return 0 if identical else 1


def _write_page(path: Path, outcomes: dict[str, Outcome], identical: bool) -> None:
    """A page that cannot be written costs no verdict: it is printed all the same."""
    command = ["bash", "scripts/pretrain_llama_cpu.sh", *sys.argv[1:]]
    try:
        compare_page(path, command, outcomes, identical, [*_against(outcomes), *_ratios(outcomes)])
    except (OSError, ValueError) as error:
        print(f"cpu_pretraining: --html {path} was not written: {error}", file=sys.stderr)
    else:
        print(f"Written: {path}", flush=True)


def _same_bits(one: Outcome, other: Outcome) -> bool:
    return one.weights_sha256 == other.weights_sha256 and _loss_bits(one) == _loss_bits(other)


def _loss_bits(outcome: Outcome) -> list[bytes]:
    return [struct.pack("<d", loss) for loss in outcome.losses.values()]


def _report(outcomes: dict[str, Outcome]) -> list[str]:
    """Loss columns (nine digits tell any two float32 apart), finals, hashes and differences."""
    plain, fused = outcomes["plain"], outcomes["commfuse"]
    lines = ["", f"{'iteration':>9} " + " ".join(f"{mode:>15}" for mode in outcomes)]
    for iteration in plain.losses:
        row = " ".join(f"{outcomes[mode].losses[iteration]:15.9g}" for mode in outcomes)
        lines.append(f"{iteration:9d} {row}")
    for mode, outcome in outcomes.items():
        final = outcome.losses[outcome.iteration]
        lines.append(f"final lm loss, {mode}: {final:.9g}")
    for mode, outcome in outcomes.items():
        lines.append(f"sha256 of all weights, {mode}: {outcome.weights_sha256}")
    lines += [f"commfuse: {line}" for line in fused.linears]
    return [*lines, *_speeds(outcomes), *_against(outcomes)]


def _against(outcomes: dict[str, Outcome]) -> list[str]:
    """Fused beside Megatron's layers."""
    fused, megatron = outcomes["commfuse"], outcomes["megatron"]
    difference = max(abs(loss - megatron.losses[i]) for i, loss in fused.losses.items())
    same = fused.weights_sha256 == megatron.weights_sha256
    return [
        f"commfuse against Megatron's unsplit GEMMs: largest loss difference {difference:.3g}, "
        f"weights {'equal' if same else 'not equal'} bit for bit"
    ]


def _speeds(outcomes: dict[str, Outcome]) -> list[str]:
    """Tokens per second of each mode, and how they compare; nothing if all was warm-up."""
    ratios = _ratios(outcomes)
    if not ratios:
        return []
    return [f"tokens/s, {mode}: {outcome.speed}" for mode, outcome in outcomes.items()] + ratios


def _ratios(outcomes: dict[str, Outcome]) -> list[str]:
    """How the speeds compare, if enough iterations count.

    The range of a ratio: one mode at its fast quartile, the other at its slow one.
    """
    speeds = {mode: outcome.speed for mode, outcome in outcomes.items() if outcome.speed}
    fused = speeds.get("commfuse")
    if fused is None or len(speeds) < len(outcomes):
        return []
    lines = []
    if fused.counted < LEAST_COUNTED:
        lines.append(
            f"no ratio of tokens/s from {fused.counted} iterations: give --train-iters "
            f"{WARM_UP_ITERATIONS + LEAST_COUNTED} or more"
        )
    else:
        fast, slow = fused.quartiles
        for mode, other in speeds.items():
            if mode == "commfuse":
                continue
            low, high = other.quartiles[0] / slow, other.quartiles[1] / fast
            ratio = other.seconds / fused.seconds
            lines.append(
                f"tokens/s, commfuse / {mode}: {ratio:.3f} ({low:.3f} to {high:.3f} by the "
                f"quartiles of {fused.counted} iterations)"
            )
    if fused.link_rate is not None:
        lines.append(COLLECTIVES_NOTE)
    return lines
