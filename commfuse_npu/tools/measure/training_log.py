"""What a training printed, read: Megatron's line per iteration, memory, a hash of the weights.

Lines of MindSpeed-LLM 26.1.0 (Megatron-LM core_v0.12.1, ``training_log`` and ``report_memory``)
and, alike, of the CPU pretraining with ``--mindspeed-log``.  Of the same lines is made what system
tests of MindSpeed-LLM compare with: :meth:`TrainingLog.baseline`.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["BASELINE", "TrainingLog", "read_log"]

BASELINE = ("lm loss", "grad norm", "throughput", "time info", "memo info")
"""What a baseline of MindSpeed-LLM's system tests has a list of, one number per iteration."""

_ITERATION = re.compile(r"^(?:.*\])? *iteration +\d+/ *\d+ \|(.*)$", re.M)
_MEMORY = re.compile(
    r"\[Rank (\d+)\] \(after \d+ iterations\) memory \(MB\) \| allocated: ([\d.]+) \| "
    r"max allocated: ([\d.]+)"
)
_PEAK = re.compile(r"^most memory taken of a device \(MB\): ([\d.]+)$", re.M)
_WEIGHTS = re.compile(r"^sha256 of all weights: (\w{64})$", re.M)
_FIELDS = {
    "losses": "lm loss",
    "grad_norms": "grad norm",
    "teraflops": "throughput per GPU (TFLOP/s/GPU)",
    "milliseconds": "elapsed time per iteration (ms)",
}


@dataclass
class TrainingLog:
    """A training, as far as it said something of itself.

    Attributes:
        losses, grad_norms: of each iteration, as printed.
        teraflops: TFLOP/s per device.
        milliseconds: wall time.
        megabytes: by rank, allocated after the first iteration and the most until then.
        peak: megabytes of the fullest device at the end, where it is known: what torch has
            reserved, HCCL's buffers, whose number is not that of every form, and the runtime.
        weights: SHA-256 of the weights of all ranks at the end.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    teraflops: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    megabytes: list[tuple[int, float, float]] = field(default_factory=list)
    peak: float | None = None
    weights: str | None = None

    def as_json(self) -> dict[str, Any]:
        """What :func:`TrainingLog` takes."""
        return asdict(self)

    def baseline(self) -> dict[str, list[Any]]:
        """As ``tests/st/baseline_results`` of MindSpeed-LLM has it; ms, MB and TFLOP/s."""
        memory = [
            {"rank": rank, "allocated memory": now, "max allocated memory": most}
            | {"format": "megatron"}
            for rank, now, most in self.megabytes
        ]
        lists = self.losses, self.grad_norms, self.teraflops, self.milliseconds, memory
        return dict(zip(BASELINE, lists, strict=True))


def read_log(text: str) -> TrainingLog:
    """Read what a training printed."""
    log = TrainingLog()
    for line in _ITERATION.findall(text):
        said = dict(part.rpartition(":")[::2] for part in line.split("|"))
        values = {name.strip(): value for name, value in said.items()}
        for attribute, name in _FIELDS.items():
            if name in values:
                getattr(log, attribute).append(float(values[name]))
    found = {int(rank): (float(now), float(most)) for rank, now, most in _MEMORY.findall(text)}
    log.megabytes = [(rank, *found[rank]) for rank in sorted(found)]
    if peak := _PEAK.findall(text):
        log.peak = float(peak[-1])
    if weights := _WEIGHTS.findall(text):
        log.weights = weights[-1]
    return log
