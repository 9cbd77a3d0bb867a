"""How well the simulator predicts what the benchmark measured: fit at one ratio, predict the rest.

The benchmark's links have a rate that is known, so only what computing and transferring cost a host
has to be found: the speed of each work's GEMMs and four figures of the machine (:data:`_FITTED`),
from the times of a few variants of all works at one ratio, by least squares in the logarithms.
Every other time is then predicted from them: other ratios, and variants that the fit has not seen.
A transfer takes computing time per byte, on a CPU, whatever its rate: the share of the speed that
it takes falls with the rate.

What the simulator has no form for is left out: torch's own collectives (gloo's algorithms), the
benchmark's ``ring``, attention, which a CPU computes with another loss from splitting, and fewer
lanes than peers, which gloo has not: there the host keeps lanes in order, whenever it comes to a
wait, and a lane is free when the kernel has taken the data.  The simulator's lanes are those of
HCCL.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from commfuse_npu.tools.bench.results import Result, Setting
from commfuse_npu.tools.bench.shapes import ITEM_BYTES
from commfuse_npu.tools.bench.variants import of_group
from commfuse_npu.tools.config_file import find_config, read_config
from commfuse_npu.tools.markdown import table_row
from commfuse_npu.tools.simulate.group import Group
from commfuse_npu.tools.simulate.linear import column, column_gradients, row, row_gradients
from commfuse_npu.tools.simulate.machine import Level, LinkTopology, Machine
from commfuse_npu.tools.simulate.rank import Rank, rest
from commfuse_npu.tools.simulate.variants import COMPUTE_ONLY, REFERENCE, Variant

__all__ = ["Prediction", "described", "predictions", "report"]

FITTED_ON = ("p2p", "ours-c1", "ours-c8", "slices-4")
"""Variants whose times at the one ratio are known to the fit, besides the computation alone."""

_UNPACED_RATE = 1e9
"""Bytes per second over loopback without a rate; transfers cost the CPU then, not the link."""

_GEMM_SPEED = "cube_flops", (1e8, 1e13)
_FITTED = {
    "half_rows": (0.01, 2000.0),
    "hbm_bandwidth": (1e8, 1e12),
    "launch_overhead": (1e-7, 5e-3),
    "transfer_slowdown": (1e-4, 10.0),
}
"""With the range in which each is looked for; ``transfer_slowdown`` at the rate of loopback.

The works share them.  Of one work alone they could not be told apart: what an MLP's activation
takes is also what its GEMMs do not, and only the latter hide a transfer.
"""

_MOST_SLOWDOWN = 0.9


@dataclass(frozen=True)
class Prediction:
    """A time that was measured, and what the simulator says; in ms.

    Attributes:
        fitted: whether the fit knew this time.
    """

    setting: Setting
    variant: str
    measured: float
    predicted: float
    fitted: bool

    @property
    def error(self) -> float:
        """Of the prediction, in shares of what was measured."""
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        text = f"{self.measured:.1f} / {self.predicted:.1f} ({100 * self.error:+.0f} %)"
        return text + ("*" if self.fitted else "")


def predictions(results: Sequence[Result], ratio: float) -> Iterator[Prediction]:
    """Fit the works of each machine at ``ratio`` and predict all of them.

    A machine is what has the same ranks, links, dtype and way of running GEMMs.

    Raises:
        ValueError: nothing was measured, or not at this ratio, that the simulator has a form for.
    """
    known = [result for result in results if _has_form(result)]
    if not known:
        works = ", ".join(sorted({result.setting.work for result in results}))
        raise ValueError(
            f"the simulator has no form for what was measured ({works}); it has for variants of "
            f"{', '.join(_WORKS)}"
        )
    fits: dict[tuple[object, ...], dict[str, Machine]] = {}
    for result in known:
        setting = result.setting
        key = _machine_of(setting)
        if key not in fits:
            fits[key] = _fitted(_measured_on(key, known, ratio))
        machine = fits[key].get(setting.work)
        if machine is not None:
            predicted = 1e3 * _seconds(machine, result)
            fitted = setting.ratio == ratio and result.variant in FITTED_ON
            yield Prediction(setting, result.variant, result.median_ms, predicted, fitted)
    if not any(fits.values()):
        choices = ", ".join(f"{one:g}" for one in sorted({r.setting.ratio for r in known}))
        raise ValueError(f"nothing at ratio {ratio:g} to fit; choose one of {choices}")


def described(results: Sequence[Result], ratio: float, source: str) -> str:
    """The machine of two ranks in fp32 over a mesh as a description for ``configs/hardware``.

    What is not fitted is taken from ``cpu_paced.yaml``.

    Args:
        source: what the results are called, for the description.

    Raises:
        ValueError: nothing of the kind was measured at this ratio.
    """
    import yaml

    wanted = ("real GEMMs", 2, "mesh", "fp32")
    rows = _measured_on(wanted, results, ratio)
    machines = list(_fitted(rows).values())
    if not machines:
        raise ValueError(f"no {', '.join(map(str, wanted))} at ratio {ratio:g} to describe")
    one = machines[0]  # they differ in their GEMMs' speed only
    rates = sorted(row.setting.bytes_per_second or _UNPACED_RATE for row in rows)
    figures = {
        ("npu", "cube_flops"): [machine.cube_flops for machine in machines],
        ("npu", "half_rows"): [one.half_rows],
        ("npu", "hbm_bandwidth"): [one.hbm_bandwidth],
        ("npu", "transfer_slowdown"): [_slowdown(one, rate) for rate in rates],
        ("host", "launch_overhead"): [one.launch_overhead],
        ("inside", "rate"): rates,
        ("inside", "latency"): [_START.inside.latency],
        ("npu", "hbm_efficiency"): [1.0],
        ("inside", "efficiency"): [1.0],
    }
    content = read_config(find_config("cpu_paced", "hardware"))
    content["name"] = f"one CPU host, paced loopback (gloo), fitted to {source}"
    for (section, name), values in figures.items():
        content[section][name] = {
            "low": float(min(values)),
            "typical": float(statistics.median(values)),
            "high": float(max(values)),
            "source": "in the fitted"
            if name.endswith("efficiency")
            else f"fitted to {source} at ratio {ratio:g}",
        }
    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100))


def _machine_of(setting: Setting) -> tuple[object, ...]:
    return setting.mode, setting.ranks, setting.link, setting.dtype


def _has_form(result: Result) -> bool:
    return result.setting.work in _WORKS and _variant(result) is not None


def _measured_on(
    machine: tuple[object, ...], results: Sequence[Result], ratio: float
) -> list[Result]:
    """What was measured on a machine at a ratio, and the simulator has a form for."""
    of_machine = (r for r in results if _machine_of(r.setting) == machine and _has_form(r))
    return [result for result in of_machine if result.setting.ratio == ratio]


def _fitted(at_ratio: Sequence[Result]) -> dict[str, Machine]:
    """For each work the machine whose simulated times are nearest to the measured ones."""
    rows = [result for result in at_ratio if result.variant in FITTED_ON]
    firsts = {row.setting.work: row for row in reversed(rows)}
    if not firsts:
        return {}
    measured = np.log([row.compute_ms for row in firsts.values()] + [r.median_ms for r in rows])
    names = [_GEMM_SPEED[0]] * len(firsts) + list(_FITTED)
    ranges = [_GEMM_SPEED[1]] * len(firsts) + list(_FITTED.values())
    low, high = (np.log([one[end] for one in ranges]) for end in (0, 1))

    def machines(point: np.ndarray[Any, Any]) -> dict[str, Machine]:
        values = [float(value) for value in np.exp(point)]
        shared: dict[str, Any] = dict(zip(_FITTED, values[len(firsts) :], strict=True))
        speeds = zip(firsts, values[: len(firsts)], strict=True)
        return {work: replace(_START, cube_flops=speed, **shared) for work, speed in speeds}

    def residuals(point: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        found = machines(point)
        alone = [_seconds(found[work], row, COMPUTE_ONLY) for work, row in firsts.items()]
        whole = [_seconds(found[row.setting.work], row) for row in rows]
        return np.log(1e3 * np.array(alone + whole)) - measured

    # Levenberg and Marquardt's steps, with differences for derivatives.
    point = np.log([getattr(_START, name) for name in names])
    # The computation alone says most about the speed of GEMMs: begin there.
    point[: len(firsts)] += residuals(point)[: len(firsts)]
    error, damping = residuals(point), 1e-2
    for _ in range(_STEPS):
        slopes = np.stack(
            [(residuals(point + _DELTA * unit) - error) / _DELTA for unit in np.eye(len(names))], 1
        )
        normal = slopes.T @ slopes
        step = np.linalg.solve(normal + damping * np.eye(len(names)), -slopes.T @ error)
        tried = np.clip(point + np.clip(step, -1, 1), low, high)
        after = residuals(tried)
        if after @ after < error @ error:
            point, error, damping = tried, after, damping / 3
        else:
            damping *= 4
    return machines(point)


_STEPS, _DELTA = 25, 0.02
_START = Machine(
    npus_per_node=8,
    cube_flops=6e10,
    gemm_efficiency=1.0,
    half_rows=10.0,
    cores=0,
    gemm_start=0.0,
    attention_efficiency=1.0,
    hbm_bandwidth=5e9,
    transfer_slowdown=0.5,
    launch_overhead=1e-4,
    inside=Level("full_mesh", _UNPACED_RATE, 5e-5),
    between=None,
    batched=False,
)


def _slowdown(machine: Machine, rate: float) -> float:
    """A transfer takes computing time per byte: at a lower rate a smaller share of the speed."""
    return min(_MOST_SLOWDOWN, machine.transfer_slowdown * rate / _UNPACED_RATE)


def _seconds(machine: Machine, result: Result, variant: Variant | None = None) -> float:
    setting = result.setting
    rate = setting.bytes_per_second or _UNPACED_RATE
    topology: LinkTopology = "switched" if setting.link == "shared-nic" else "full_mesh"
    inside = replace(machine.inside, rate=rate, topology=topology)
    machine = replace(machine, inside=inside, transfer_slowdown=_slowdown(machine, rate))
    chosen = variant or _variant(result)
    assert chosen is not None
    work = _WORKS[setting.work]
    return Group(machine, setting.ranks).play(chosen, lambda rank: work(rank, setting)).seconds


def _variant(result: Result) -> Variant | None:
    """The simulator's form of a benchmark's variant, if it has one."""
    name = result.variant
    if name == "p2p":
        return REFERENCE
    if name == "megatron-p2p":
        return Variant("megatron", "megatron")
    found = next((v for v in of_group(result.setting.ranks) if v.name == name), None)
    if found is None or not found.direct or found.tuned:
        return None
    schedule, ranks = found.schedule, result.setting.ranks
    if schedule and schedule.lanes_for(ranks) < ranks - 1:
        return None
    if found.kind == "sliced":
        return Variant(name, "sliced", slices=found.slices)
    if found.kind != "fused":
        return None
    return Variant(name, "fused", schedule=found.schedule, wgrad=found.wgrad)


# ------------------------------------------------------------------------ the works


def _sizes(setting: Setting) -> tuple[int, int, int, int]:
    """Rows of a block, hidden, this rank's part of the MLP, bytes of a number."""
    found = re.search(r"S (\d+), H (\d+), FFN (\d+)", setting.shape)
    if found is None:
        raise ValueError(f"a shape {setting.shape!r}; S, H and FFN are needed")
    sequence, hidden, ffn = map(int, found.groups())
    return sequence // setting.ranks, hidden, ffn // setting.ranks, ITEM_BYTES[setting.dtype]


def _all_gather(rank: Rank, setting: Setting) -> None:
    rows, hidden, ffn, item = _sizes(setting)
    column(rank, "fc1", rows, hidden, 2 * ffn, item=item)


def _reduce_scatter(rank: Rank, setting: Setting) -> None:
    rows, hidden, ffn, item = _sizes(setting)
    row(rank, "fc2", rows, ffn, hidden, item=item)


def _mlp(rank: Rank, setting: Setting) -> None:
    rows, hidden, ffn, item = _sizes(setting)
    machine, everything = rank.machine, rows * setting.ranks
    _all_gather(rank, setting)
    # silu(gate) * up: reads two, writes one, and one in between; the backward twice that.
    rank.compute("swiglu", rank.machine.memory(everything * 4 * ffn * item))
    _reduce_scatter(rank, setting)
    fc1 = column_gradients(rank, "fc1 backward", rows, hidden, 2 * ffn, item=item)
    row_gradients(rank, "fc2 backward", rows, ffn, hidden, item=item, before=fc1)
    rank.compute("swiglu backward", machine.memory(everything * 8 * ffn * item))
    rest(fc1)


_WORKS: Mapping[str, Callable[[Rank, Setting], None]] = {
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "mlp": _mlp,
}


# ------------------------------------------------------------------------ the report


def report(found: Sequence[Prediction], ratio: float) -> str:
    """A table per table of the benchmark, and the errors of what the fit had not seen."""
    lines = [
        f"Fitted at ratio {ratio:g} on the computation alone and {', '.join(FITTED_ON)};",
        "everything else is predicted. Times in ms; * was fitted.",
    ]
    for group, rows in groupby(found, key=lambda one: one.setting.group):
        table = list(rows)
        mode, work, ranks, link, dtype = group
        lines += ["", f"## {work}, {ranks} ranks, {mode}, {dtype}, {link}", ""]
        names = list(dict.fromkeys(one.variant for one in table))
        lines += [table_row(("ratio", *names)), f"|---:{'|---:' * len(names)}|"]
        for wanted, of_ratio in groupby(table, key=lambda one: one.setting.ratio):
            cells = {one.variant: str(one) for one in of_ratio}
            lines.append(table_row((f"{wanted:g}", *(cells.get(name, "-") for name in names))))
        lines += ["", f"measured / predicted; {_errors(table)}"]
    lines += ["", f"All: {_errors(found)}"]
    return "\n".join(lines)


def _errors(found: Sequence[Prediction]) -> str:
    new = [one for one in found if not one.fitted]
    if not new:
        return "nothing was predicted"
    errors = [abs(one.error) for one in new]
    worst = max(new, key=lambda one: abs(one.error))
    return (
        f"error of {len(new)} predicted times: median {100 * statistics.median(errors):.1f} %, "
        f"worst {100 * abs(worst.error):.1f} % ({worst.variant} at ratio {worst.setting.ratio:g}, "
        f"{worst.setting.work}), {sum(error <= 0.1 for error in errors)} within 10 %"
    )
