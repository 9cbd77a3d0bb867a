"""Steps that others measured on NPUs, beside the simulated ones.

    python -m scripts.evidence.steps CHECKOUT... [--fit] [--markdown FILE]

MindSpeed-LLM keeps beside its system tests what its CI measured on real NPUs: milliseconds per
step and memory per rank, in ``baseline*/NAME.json`` next to ``NAME.sh``, the launch.  Branches
keep different ones: of a name the first checkout's counts.  Which servers they ran on is not said.

Two figures of the host (``host.launch_overhead``, ``host.expert_launches``) were fitted to every
second model family by sorted name, by the sum of ``|log(simulated / measured)|``; the others are
predicted.  ``--fit`` searches them again.  Memory has no fitted figure.  Launches whose samples are
not padded stand apart: their length is assumed, that of Alpaca's samples.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median

from commfuse_npu.tools.hardware.description import Hardware
from commfuse_npu.tools.hardware.machine import Machine
from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.plan.asked_launch import (
    NotSimulated,
    ask_about,
    form_of,
    roughly,
    training_of,
)
from commfuse_npu.tools.simulate.footprint import footprint
from commfuse_npu.tools.simulate.step import TrainingStep
from commfuse_npu.tools.simulate.training import Training
from commfuse_npu.tools.simulate.variants import Variant
from commfuse_npu.tools.terminal import table_head, table_row
from scripts.evidence.layers import publish

_HARDWARE = "ascend_910b_server"
_HOST_LIMIT = 0.9
"""The host is the limit if a step without host time takes less than this share."""
_ALPACA = 92, 12
"""Mean tokens of a sample of Alpaca: its own (the first 102 records have 387 characters each, some
4.2 a token), and those of a chat template."""
_DATA = re.compile("alpaca|a09b74b3ef9c3b56")
"""In paths of its files."""
_UNPADDED = "--no-pad-to-seq-lengths"


@dataclass(frozen=True)
class Measured:
    """A launch with its figures.

    Attributes:
        milliseconds, mebibytes: of the median step; of the fullest rank's peak, 0 if unknown.
        assumed: whether the length of its samples is not known.
    """

    name: str
    family: str
    training: Training
    form: Variant
    milliseconds: float
    mebibytes: float
    assumed: bool = False


def measured(checkouts: Sequence[Path]) -> Iterator[Measured | str]:
    """The launches of checkouts that can be simulated, and why the others cannot."""
    names: set[str] = set()
    for checkout in checkouts:
        for file in sorted((checkout / "tests").rglob("baseline*/*.json")):
            scripts = list(file.parents[1].rglob(f"{file.stem}.sh"))
            if file.stem in names or not scripts:
                continue
            try:
                content = json.loads(file.read_text("utf-8"))
                if not (times := content.get("time info")):
                    continue
                names.add(file.stem)
                yield _measured(file.stem, scripts[0], times, content.get("memo info"))
            except NotSimulated as error:
                yield f"{file.stem}: {error}"
            except UsageError:
                yield f"{file.stem}: no launch with Megatron's options, or one that needs its files"
            except json.JSONDecodeError:
                yield f"{file.stem}: its figures are not JSON"


def _measured(name: str, script: Path, times: Sequence[float], memory: object) -> Measured:
    launch = ask_about(None, [str(script)], {})
    rough = roughly(launch.options)
    data = launch.options.text("--data-path") or ""
    assumed = _UNPADDED in launch.options and bool(_DATA.search(data))
    if assumed:
        length = _alpaca_tokens(launch.config.micro_batch_size)
        launch = replace(launch, config=replace(launch.config, seq_length=length))
        rough = [line for line in rough if not line.startswith(_UNPADDED)]
    if rough:
        raise NotSimulated(rough[0])
    family = re.split(r"[_-]", re.sub("^(tune|pretrain)_", "", name))[0]
    training = training_of(launch)
    ranks = memory if isinstance(memory, list) else []
    most = max((rank.get("max allocated memory", 0.0) for rank in ranks), default=0.0)
    steady = median(times[len(times) // 3 :])
    return Measured(name, family, training, form_of(launch.options), steady, most, assumed)


def _alpaca_tokens(samples: int) -> int:
    """Mean length of a micro-batch that is padded to its longest sample, and to a multiple of 8.

    Lengths are exponentially distributed, as their median, 265 characters, suggests.
    """
    own, template = _ALPACA
    longest = own * sum(1 / number for number in range(1, samples + 1))
    return -(-round(longest + template) // 8) * 8


def fitted(steps: Sequence[Measured]) -> set[str]:
    """The families that are fitted; the others are predicted."""
    return set(sorted({step.family for step in steps})[::2])


def simulated(step: Measured, machine: Machine) -> float:
    """Milliseconds of a simulated step."""
    return 1e3 * TrainingStep(machine, step.training).time(step.form)


def fit(steps: Sequence[Measured], hardware: Hardware) -> Machine:
    """The machine with the host figures that fit these launches best."""

    def off(host: Machine) -> float:
        return sum(abs(math.log(simulated(step, host) / step.milliseconds)) for step in steps)

    def host(launch: float, experts: float) -> Machine:
        return replace(hardware.launching(launch).machine(), expert_launches=experts)

    at = (1e-4, 72.0)
    factor = 1.5
    while factor > 1.01:
        factors = product((1, 1 / factor, factor), repeat=2)
        nearest = min(
            ((at[0] * a, at[1] * b) for a, b in factors), key=lambda near: off(host(*near))
        )
        if nearest == at:
            factor **= 0.5
        at = nearest
    return host(*at)


def report(steps: Sequence[Measured], left_out: Sequence[str], hardware: Hardware) -> str:
    """Tables of every launch and of the errors of each half, and what is not simulated."""
    machine = hardware.machine()
    of_fit = fitted(steps)
    free = machine.launching_for_free
    head = ("launch", "TP PP CP EP", "form", "limit", "ms", "simulated", "off", "MiB",
            "simulated", "off", "half")  # fmt: skip
    lines = [table_head(head)]
    errors: dict[tuple[str, str], list[float]] = {}

    def compared(half: str, kind: str, measurement: float, simulation: float) -> list[str]:
        if not measurement:
            return ["-"] * 3
        off = simulation / measurement - 1
        errors.setdefault((half, kind), []).append(abs(off))
        return [f"{measurement:,.0f}", f"{simulation:,.0f}", f"{off:+.0%}"]

    def order(step: Measured) -> tuple[bool, bool, str]:
        return step.assumed, step.family not in of_fit, step.name

    for step in sorted(steps, key=order):
        milliseconds = simulated(step, machine)
        limit = "host" if simulated(step, free) < _HOST_LIMIT * milliseconds else "device"
        half = "fitted" if step.family in of_fit else "predicted"
        if step.assumed:
            half = "length assumed"
        memory = footprint(step.training, step.form, hardware).first_step / 2**20
        layout = step.training.layout
        experts = step.training.shape.experts
        sizes = layout.tp, layout.pp, layout.cp, experts.parallel if experts else 1
        cells = [
            *(step.name, " ".join(map(str, sizes)), step.form.name, limit),
            *compared(half, limit, step.milliseconds, milliseconds),
            *compared(half, "memory", step.mebibytes, memory),
        ]
        lines.append(table_row([*cells, half]))
    lines += ["", table_head(("half", "what", "launches", "off, median", "off, worst"), False)]
    for (half, kind), values in sorted(errors.items()):
        row = half, kind, str(len(values)), f"{median(values):.1%}", f"{max(values):.1%}"
        lines.append(table_row(row))
    names: dict[str, list[str]] = {}
    for name, _, why in (text.partition(": ") for text in left_out):
        names.setdefault(why, []).append(name)
    lines += ["", table_head(("left out because", "launches"), False)]
    lines += [table_row((why, ", ".join(launches))) for why, launches in sorted(names.items())]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Simulate and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUT")
    parser.add_argument("--fit", action="store_true", help="search the figures of the host")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="put the tables into their section of FILE"
    )
    options = parser.parse_args(argv)
    hardware = Hardware.find(_HARDWARE)
    results = list(measured(options.checkouts))
    steps = [result for result in results if isinstance(result, Measured)]
    left_out = [result for result in results if isinstance(result, str)]
    if not steps:
        parser.error(f"no launch with figures in {', '.join(map(str, options.checkouts))}")
    if options.fit:
        families = fitted(steps)
        known = (step for step in steps if not step.assumed)
        host = fit([step for step in known if step.family in families], hardware)
        print(f"{1e6 * host.launch_overhead:.0f} us a launch, {host.expert_launches:.0f} launches")
    publish(report(steps, left_out, hardware), "steps", options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
