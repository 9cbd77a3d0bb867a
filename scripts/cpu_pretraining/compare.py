"""`--compare`: the same training in several forms, compared bit for bit.

=========  =================================================================================
plain      the fused layers' GEMMs, each after or before the whole collective
commfuse   fused layers: transfers overlap with the GEMMs
megatron   Megatron's own layers, whose GEMMs are not split and may round differently
overlap    Megatron's own layers, forwards beside backwards (``--commfuse-overlap``)
=========  =================================================================================

The second of each pair must agree with the first in every loss and every weight.

The trainings run one after the other, so other load on the machine may affect only one of them. A
difference in time is therefore reported with a range from the quartiles, and only if there are
enough iterations.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from commfuse_npu.tools.drawing import Bit, Row, draw, gantt
from commfuse_npu.tools.quartiles import quartiles

WARM_UP_ITERATIONS = 3
"""Iterations that do not count: they create buffers and threads and prepare GEMM kernels."""


@dataclass
class TrainingOutcome:
    """How a training ended, on one rank.

    Attributes:
        losses, times, waits: of each iteration: its loss, its seconds as a mean over the ranks, and
            this rank's waits for transfers, as (start, end) in seconds since its start.
        weights_sha256: of all ranks' weights and optimizers.
        layers: lines about the layers and their calls.
        error: why the training failed.
    """

    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    waits: list[list[tuple[float, float]]] = field(default_factory=list)
    weights_sha256: str = ""
    layers: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def counted(self) -> list[float]:
        """The times after the first :data:`WARM_UP_ITERATIONS`."""
        return self.times[WARM_UP_ITERATIONS:]


Outcomes = Mapping[str, TrainingOutcome]
"""Outcomes of rank 0, by form."""

_PAIRS = (("plain", "commfuse"), ("megatron", "overlap"))
"""Pairs of forms: without and with overlap."""
_TITLES = {"plain": "fused layers' GEMMs, blocking collectives", "commfuse": "fused layers",
           "megatron": "Megatron's own order", "overlap": "forward-backward overlap"}  # fmt: skip
_LEAST = 10
"""Smallest number of iterations for a comparison of times."""


def forms(args: argparse.Namespace) -> list[str]:
    """The forms that are compared with these options."""
    fused = ["plain", "commfuse"] if args.use_commfuse else []
    return [*fused, "megatron", *(["overlap"] if args.commfuse_overlap else [])]


def _pairs(outcomes: Outcomes) -> list[tuple[str, str]]:
    return [pair for pair in _PAIRS if outcomes.keys() >= set(pair)]


def identical(outcomes: Outcomes) -> bool:
    """Whether overlap changed no bit of losses and weights in any pair."""
    return all(_same(outcomes[form], outcomes[other]) for form, other in _pairs(outcomes))


def _same(one: TrainingOutcome, other: TrainingOutcome) -> bool:
    return one.weights_sha256 == other.weights_sha256 and one.losses == other.losses


def report(outcomes: Outcomes) -> list[str]:
    """Hashes, verdicts, the fused layers' calls, and differences of the times."""
    printed = [""]
    for form, outcome in outcomes.items():
        printed.append(f"sha256 of all weights, {form}: {outcome.weights_sha256}")
    for form, other in _pairs(outcomes):
        verdict = "equal" if _same(outcomes[form], outcomes[other]) else "not equal"
        printed.append(f"losses and weights, {form} and {other}: {verdict} bit for bit")
    if fused := outcomes.get("commfuse"):
        printed += [f"commfuse: {line}" for line in fused.layers]
    return printed + list(_times(outcomes))


def _times(outcomes: Outcomes) -> Iterator[str]:
    """A comparison of the times, if enough iterations count.

    The range compares one form's fast quartile with the other's slow one.
    """
    counted = len(outcomes["megatron"].counted)
    if counted < _LEAST:
        enough = WARM_UP_ITERATIONS + _LEAST
        yield f"no comparison of the times: give --train-iters {enough} or more"
        return
    pairs = _pairs(outcomes)
    if "commfuse" in outcomes:
        pairs.insert(1, ("megatron", "commfuse"))
    for form, other in pairs:
        (fast, without, slow), (faster, middle, slower) = (
            quartiles(outcomes[name].counted) for name in (form, other)
        )
        less, low, high = (
            100 * (1 - part) for part in (middle / without, slower / fast, faster / slow)
        )
        yield (
            f"time of an iteration, {other} against {form}: {abs(less):.1f} % "
            f"{'shorter' if less >= 0 else 'longer'} ({middle:.3f} s, not {without:.3f} s; "
            f"{low:.1f} to {high:.1f} % shorter by the quartiles of {counted} iterations)"
        )


def draw_timelines(
    ranks: Mapping[str, Sequence[TrainingOutcome]], link_rate: float | None, path: Path
) -> str:
    """Draw each form's fastest measured iteration: when a rank computed and waited.

    ``ranks`` are the outcomes of all ranks by form.  Returns a line about the result.
    """
    rows = []
    for form, outcomes in ranks.items():
        if not outcomes[0].counted:
            return f"{path} was not drawn: no iteration after the first {WARM_UP_ITERATIONS}"
        seconds = min(outcomes[0].counted)
        fastest = outcomes[0].times.index(seconds, WARM_UP_ITERATIONS)
        bits = list[Bit]()
        end = 1e3 * seconds
        lanes = tuple(f"rank {rank}" for rank in range(len(outcomes)))
        for lane, outcome in zip(lanes, outcomes, strict=True):
            waits = [(1e3 * begin, 1e3 * until) for begin, until in outcome.waits[fastest]]
            bits += [Bit(lane, *wait, "waiting") for wait in waits]
            between = pairwise([(0.0, 0.0), *waits, (end, end)])
            bits += [Bit(lane, start, stop, "work") for (_, start), (stop, _) in between]
        waited = sum(bit.end - bit.start for bit in bits if bit.kind == "waiting") / len(lanes)
        text = f"{seconds:.3f} s, of which {waited / 1e3:.3f} s waiting for transfers"
        rows.append(Row(f"{form}, {_TITLES[form]}: {text}", lanes, tuple(bits)))
    link = f"links of {link_rate:g} MB/s" if link_rate is not None else "loopback"
    picture = gantt(f"The fastest iteration of each over {link}, measured", "milliseconds", rows)
    try:
        draw(picture, "The same training without and with overlap", path)
    except (OSError, ValueError) as error:
        return f"{path} was not drawn: {getattr(error, 'strerror', None) or error}"
    return f"written: {path}"
