"""`--compare`: the same training in several forms, compared bit for bit.

=========  =================================================================================
plain      the fused layers' GEMMs, each after or before the whole collective
commfuse   fused layers: transfers overlap with the GEMMs
megatron   Megatron's own layers, whose GEMMs are not split and may round differently
overlap    Megatron's own layers, forwards beside backwards (``--commfuse-overlap``)
=========  =================================================================================

The second of each pair must agree with the first in every loss and every weight.

The forms take turns, so that other load on the machine affects all of them.  A difference in time
is that of iterations of the same number.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, median_low

from commfuse_npu.tools.quartiles import quartiles

from .timeline import RecordedSpan, write_timelines

_WARM_UP = 3
"""Iterations that do not count: they create buffers and threads and prepare GEMM kernels."""
_COUNTED = 10
LEAST = _WARM_UP + _COUNTED
"""Smallest number of iterations of which times are compared and drawn."""


@dataclass
class TrainingOutcome:
    """How a training ended, on one rank.

    Attributes:
        losses, times: of each iteration: its loss, and its seconds as a mean over the ranks.
        spans: of each of the last 10 iterations, what this rank did.
        weights_sha256: of all ranks' weights and optimizers.
        layers: lines about the layers and their calls.
        error: why the training failed.
    """

    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    spans: list[list[RecordedSpan]] = field(default_factory=list)
    weights_sha256: str = ""
    layers: list[str] = field(default_factory=list)
    error: str = ""

    def add(self, loss: float, seconds: float, spans: list[RecordedSpan]) -> None:
        """Add an iteration."""
        self.losses.append(loss)
        self.times.append(seconds)
        self.spans = [*self.spans[1 - _COUNTED :], spans]


Outcomes = Mapping[str, TrainingOutcome]
"""Outcomes of a rank, by form."""

_PAIRS = (("plain", "commfuse"), ("megatron", "overlap"))
"""Pairs of forms: without and with overlap."""
_TITLES = {"plain": "blocking collectives", "commfuse": "fused layers",
          "megatron": "Megatron's order", "overlap": "--commfuse-overlap"}  # fmt: skip


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


def report(outcomes: Outcomes) -> Iterator[str]:
    """The fused layers' calls, differences of the times, verdicts."""
    if fused := outcomes.get("commfuse"):
        yield from (f"commfuse: {line}" for line in fused.layers)
    pairs = _pairs(outcomes)
    if len(outcomes["megatron"].times) >= LEAST:
        across = [("megatron", "commfuse")] if fused else []
        for form, other in [*pairs[:1], *across, *pairs[1:]]:
            yield _less_time(form, other, outcomes)
    for form, other in pairs:
        hashes = dict.fromkeys(outcomes[name].weights_sha256[:16] for name in (form, other))
        verdict = "bitwise equal" if _same(outcomes[form], outcomes[other]) else "not equal"
        of = f" of {form} and {other}" if len(pairs) > 1 else ""
        yield f"weights and losses{of}: {verdict}, sha256 {' and '.join(hashes)}..."


def _less_time(form: str, other: str, outcomes: Outcomes) -> str:
    """The median over iterations of the same number, and its quartiles."""
    pairs = zip(outcomes[form].times, outcomes[other].times, strict=True)
    less = [100 * (1 - seconds / before) for before, seconds in pairs][_WARM_UP:]
    kind = "less"
    if median(less) < 0:
        less = [-percent for percent in less]
        kind = "more"
    low, middle, high = quartiles(less)
    return (
        f"{other}: {middle:.1f} % {kind} time per iteration than {_TITLES[form]} "
        f"({low:.1f} to {high:.1f}, quartiles of {len(less)} pairs)"
    )


def write_median_iterations(
    ranks: Sequence[Outcomes], link_rate: float | None, folder: Path
) -> str:
    """Draw and trace each form's iteration of median time; returns a line about the files.

    Args:
        ranks: outcomes by rank.
    """
    iterations = {}
    for form, outcome in ranks[0].items():
        times = outcome.times[-len(outcome.spans) :]
        middle = times.index(median_low(times))
        iterations[_TITLES[form]] = [outcomes[form].spans[middle] for outcomes in ranks]
    links = "loopback" if link_rate is None else f"links of {link_rate:g} MB/s"
    return write_timelines(iterations, f"The same training over {links}", folder)
