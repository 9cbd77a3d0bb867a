"""Reads and checks the descriptions of machines, ``configs/hardware/<machine>.yaml``.

Every figure is a range (low, typical, high) in SI units, with its public source.  A simulation
needs one value, which :meth:`Hardware.machine` picks: the ``favorable`` end, the ``unfavorable``
end or the typical value.  The choice is separate for computation and communication, because what a
schedule hides depends on their ratio.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from commfuse_npu.launch.did_you_mean import did_you_mean
from commfuse_npu.tools.config_file import ConfigError, find_config, read_config
from commfuse_npu.tools.hardware.machine import Level, LinkTopology, Machine

Choice = Literal["favorable", "typical", "unfavorable"]


class _FigureRule(NamedTuple):
    """The unit and the allowed values of a figure; ``least`` itself only if ``inclusive``."""

    unit: str
    least: float = 0
    most: float = math.inf
    inclusive: bool = False
    more_is_better: bool = True

    def allows(self, value: float) -> bool:
        above = value >= self.least if self.inclusive else value > self.least
        # Not isfinite(), which raises for an int too large for a float.
        return above and value <= min(self.most, sys.float_info.max)

    def __str__(self) -> str:
        bound = f"{self.least:g} or more" if self.inclusive else f"above {self.least:g}"
        return bound + (f" and at most {self.most:g}" if math.isfinite(self.most) else "")


_SHARE = _FigureRule("share", most=1)
_RATE = _FigureRule("bytes/s")
_HIDDEN = _FigureRule("share", most=1, inclusive=True)
_COST = _HIDDEN._replace(more_is_better=False)
_SECONDS = _COST._replace(unit="seconds")

_LEVEL = {
    "rate": _RATE,
    "efficiency": _SHARE,
    "latency": _SECONDS,
    "beside_work": _COST._replace(unit="times", least=1, most=10),
}
_RULES: dict[str, dict[str, _FigureRule]] = {
    "npu": {
        "cube_flops": _FigureRule("FLOP/s"),
        "gemm_efficiency": _SHARE,
        "cores": _FigureRule("cores", inclusive=True),
        "gemm_start": _SECONDS,
        "half_rows": _FigureRule("rows", inclusive=True, more_is_better=False),
        "attention_efficiency": _SHARE,
        "hbm_bandwidth": _RATE,
        "hbm_efficiency": _SHARE,
        "hbm_bytes": _FigureRule("bytes"),
        "transfer_slowdown": _COST._replace(most=0.9),
    },
    "host": {
        "launch_overhead": _SECONDS,
        "post_overhead": _SECONDS,
        "event_overhead": _SECONDS,
        "expert_launches": _COST._replace(unit="launches", most=1000),
        "communicator_bytes": _FigureRule("bytes", inclusive=True, more_is_better=False),
        "message_copies": _COST._replace(unit="copies", most=4),
    },
    "rivals": {
        "coc_fused_hidden": _HIDDEN,
        "coc_fused_hidden_gemm": _HIDDEN,
        "coc_fused_efficiency": _SHARE,
        "ordered_sums": _COST,
    },
    "inside": _LEVEL,
    "between": _LEVEL,
}
_TOPOLOGIES: dict[str, tuple[LinkTopology, ...]] = {
    "inside": ("full_mesh", "switched"),
    "between": ("nic_per_npu",),
}
_WHOLE = ("npus_per_host", "npus_per_node", "nodes")
_PARTS = ("low", "typical", "high")


@dataclass(frozen=True)
class Figure:
    """A figure as a range, in the unit of its rule, with its source."""

    low: float
    typical: float
    high: float
    source: str

    @property
    def assumed(self) -> bool:
        """Whether no public source was found for it."""
        return self.source.startswith("assumed")


@dataclass(frozen=True)
class Hardware:
    """A described machine.

    Attributes:
        npus_per_host: NPUs of a server, which torchrun calls a node.
        npus_per_node: NPUs that share the links ``inside``; on a supernode those of several hosts.
        nodes: the most nodes of the machine.
        topologies: of the levels ``inside`` and, if there is more than one node, ``between``.
        figures: by dotted name: ``npu.cube_flops``, ``inside.rate``, ...
        deterministic: whether HCCL sums in a fixed order (``HCCL_DETERMINISTIC``, which MindSpeed's
            ``--npu-deterministic`` sets), at the cost of ``rivals.ordered_sums``.
    """

    path: Path
    name: str
    npus_per_host: int
    npus_per_node: int
    nodes: int
    topologies: Mapping[str, LinkTopology]
    figures: Mapping[str, Figure] = field(repr=False)
    deterministic: bool = False

    @classmethod
    def find(cls, name: str) -> Hardware:
        """:meth:`load` by a path, or by a name in ``configs/hardware``."""
        return cls.load(find_config(name, "hardware"))

    @classmethod
    def load(cls, path: Path) -> Hardware:
        """Read a description.

        Raises:
            ConfigError: the file cannot be read, is incomplete or has invalid values; one line per
                problem, with file, field, value and limit.
        """
        content = read_config(path)
        problems = list(_problems(content))
        if problems:
            raise ConfigError("\n".join(f"{path}: {line}" for line in problems))
        figures = {
            f"{section}.{name}": Figure(
                float(row["low"]), float(row["typical"]), float(row["high"]), row["source"].strip()
            )
            for section, rules in _RULES.items()
            for name in rules
            if section in content
            for row in [content[section][name]]
        }
        whole = {name: content[name] for name in _WHOLE}
        topologies = {
            level: content[level]["topology"] for level in _TOPOLOGIES if level in content
        }
        return cls(path, content["name"], **whole, topologies=topologies, figures=figures)

    def posting(self, seconds: float) -> Hardware:
        """A copy whose host takes ``seconds`` to post a batch and to wait for it."""
        figure = Figure(seconds, seconds, seconds, "given")
        return replace(self, figures={**self.figures, "host.post_overhead": figure})

    def launching(self, seconds: float) -> Hardware:
        """A copy whose host takes ``seconds`` per launch; a post includes one launch."""
        launch, post = (self.figures[f"host.{name}_overhead"] for name in ("launch", "post"))
        low, typical, high = (
            max(seconds, getattr(post, end) + seconds - getattr(launch, end)) for end in _PARTS
        )
        slower = {
            "host.launch_overhead": Figure(seconds, seconds, seconds, "given"),
            "host.post_overhead": Figure(low, typical, high, post.source),
        }
        return replace(self, figures={**self.figures, **slower})

    def machine(self, compute: Choice = "typical", links: Choice = "typical") -> Machine:
        """The machine with one value of every range.

        Args:
            compute: which value of the figures of computation, those of ``npu`` but its slowdown by
                transfers.
            links: which value of the figures of communication, all others: the time of transfers,
                and what they cost the host, the memory and the computation beside them.
        """

        def value(name: str) -> float:
            figure = self.figures[name]
            section, part = name.split(".")
            rule = _RULES[section][part]
            computes = section == "npu" and part != "transfer_slowdown"
            choice = compute if computes else links
            if choice == "typical":
                return figure.typical
            return figure.high if (choice == "favorable") == rule.more_is_better else figure.low

        levels = {
            section: Level(
                topology,
                rate=value(f"{section}.rate") * value(f"{section}.efficiency"),
                latency=value(f"{section}.latency"),
                beside_work=value(f"{section}.beside_work"),
            )
            for section, topology in self.topologies.items()
        }
        values: dict[str, Any] = {
            name: value(f"{section}.{name}")
            for section, rules in _RULES.items()
            for name in rules.keys() & {entry.name for entry in fields(Machine)}
        }
        # Of the rate of a link, as ``inside.efficiency`` is: the machine has the ratio.
        values["coc_fused_efficiency"] /= value("inside.efficiency")
        values["cores"] = round(values["cores"])
        values["hbm_bandwidth"] *= value("npu.hbm_efficiency")
        values["ordered_sums"] *= self.deterministic
        return Machine(
            **values,
            npus_per_node=self.npus_per_node,
            inside=levels["inside"],
            between=levels.get("between"),
        )

    @property
    def npus(self) -> int:
        """Number of NPUs of the whole machine."""
        return self.npus_per_node * self.nodes

    def check(self, npus: int) -> None:
        """Raise a ValueError if the machine has fewer NPUs."""
        if npus > self.npus:
            raise ValueError(
                f"{npus} NPUs are more than the {self.npus} of {self.nodes} nodes of "
                f"{self.npus_per_node} in {self.path}; choose fewer, or another --hardware"
            )

    @property
    def assumed(self) -> str:
        """How many figures have no public source, as ``3 of 14 figures``."""
        count = sum(figure.assumed for figure in self.figures.values())
        return f"{count} of {len(self.figures)} figures"

    def typical(self, name: str) -> float:
        """The typical value of a figure, such as ``npu.hbm_bytes``."""
        return self.figures[name].typical


def _problems(content: Mapping[str, Any]) -> Iterator[str]:
    names = ("name", *_WHOLE, *_RULES)
    yield from _unknown(content, names, "")
    if not isinstance(content.get("name"), str) or not content["name"]:
        yield f"name: {content.get('name')!r} is not a name"
    wrong = [n for n in _WHOLE if type(content.get(n)) is not int or content[n] < 1]
    for name in wrong:
        yield f"{name}: {content.get(name)!r} is not a whole number from 1"
    if not wrong and content["npus_per_node"] % content["npus_per_host"]:
        yield (
            f"npus_per_host: {content['npus_per_host']} does not divide npus_per_node "
            f"{content['npus_per_node']}"
        )
    for section, rules in _RULES.items():
        if section == "between" not in content and content.get("nodes") == 1:
            continue
        part = content.get(section)
        if not isinstance(part, dict):
            yield f"{section}: {part!r} is not a mapping of figures"
            continue
        topologies = _TOPOLOGIES.get(section, ())
        yield from _unknown(part, (*rules, *["topology"] * bool(topologies)), f"{section}.")
        if topologies and part.get("topology") not in topologies:
            known = ", ".join(topologies)
            yield f"{section}.topology: {part.get('topology')!r} is unknown; choose one of {known}"
        for name, rule in rules.items():
            if not _is_figure(part.get(name), rule):
                yield (
                    f"{section}.{name}: {part.get(name)!r} is not a mapping of low, typical and "
                    f"high, rising numbers in {rule.unit} {rule}, and their source, or: assumed "
                    "(yaml reads 1e9 as text; write 1.0e+9)"
                )


def _is_figure(content: Any, rule: _FigureRule) -> bool:
    if not isinstance(content, dict) or content.keys() != {*_PARTS, "source"}:
        return False
    values = [content[part] for part in _PARTS]
    numbers = all(type(value) in (int, float) and rule.allows(value) for value in values)
    source = content["source"]
    return numbers and values == sorted(values) and isinstance(source, str) and bool(source.strip())


def _unknown(content: Mapping[str, Any], known: tuple[str, ...], where: str) -> Iterator[str]:
    for key in content:
        if key not in known:
            yield f"{where}{key}: unknown field{did_you_mean(str(key), known, 0.0)}"
