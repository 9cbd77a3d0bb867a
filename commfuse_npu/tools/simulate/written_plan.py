"""A recommendation as a configuration that the launchers read (``CONFIG=FILE``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from commfuse_npu.hardware.description import Hardware
from commfuse_npu.runtime.whole_file import whole_file
from commfuse_npu.tools.model_config import ModelConfig, given_options
from commfuse_npu.tools.simulate.recommend import Candidate, Recommendation
from commfuse_npu.tools.simulate.recommendation_report import launching, options

__all__ = ["check_target", "planned", "write_plan"]

_FIRST_LINE = "# Written by commfuse-npu plan"
_BY_LAUNCHERS = "--use-distributed-optimizer"
_DECIDED = ("--num-layers-per-virtual-pipeline-stage", "--recompute-", "--overlap-")
"""What a plan says itself: how these options begin."""


def planned(model: ModelConfig, hardware: Hardware, chosen: Candidate) -> ModelConfig:
    """The model in the layout that was simulated, with the options that no key has."""
    words = options(model, chosen)
    ours = list(launching(chosen.variant, chosen.training)) if chosen.variant.ours else []
    at = len(words) - len(ours)
    npus = chosen.layout.npus
    per_node = min(npus, hardware.npus_per_host)
    size = {"npus_per_node": per_node, "nnodes": npus // per_node, "num_layer_list": None}
    found = replace(
        model,
        **{**size, **given_options(words[:at])},
        pretrain_options=(*_kept(model.pretrain_options), *_of_no_key(words[:at])),
        commfuse_options=tuple(words[at:]),
    )
    found.validate()
    return found


def check_target(path: Path) -> None:
    """Refuse to write over anything but an earlier plan.

    Raises:
        ValueError: there is another file.
        OSError: it cannot be read.
    """
    if path.exists() and not path.read_text("utf-8", "replace").startswith(_FIRST_LINE):
        raise ValueError(f"--write {path}: there is such a file, and not of a plan; name another")


def write_plan(path: Path, found: Recommendation, model: ModelConfig, hardware: Hardware) -> None:
    """Write what is recommended, in place of an earlier plan.

    Raises:
        OSError: it cannot be written.
    """
    best, layout = found.best, found.best.layout
    lines = [
        f"{_FIRST_LINE} for {layout.npus} NPUs of {hardware.name}:",
        f"# TP {layout.tp} x PP {layout.pp} x CP {layout.cp} x DP {layout.dp}, "
        f"{best.variant.name}, {best.seconds:.3g} s a step. Simulated, not measured.",
    ]
    with whole_file(path) as part:
        text = planned(model, hardware, best).as_yaml()
        part.write_text("\n".join([*lines, text]), "utf-8")


def _split(words: Sequence[str]) -> Iterator[list[str]]:
    """A command line, option by option with its value."""
    for at in (i for i, word in enumerate(words) if word.startswith("--")):
        follows = words[at + 1 : at + 2]
        yield [words[at], *(word for word in follows if not word.startswith("--"))]


def _of_no_key(words: Sequence[str]) -> Iterator[str]:
    """Options that :class:`ModelConfig` has no key for, with their values."""
    for option in _split(words):
        if not given_options(option) and option != [_BY_LAUNCHERS]:
            yield from option


def _kept(words: Sequence[str]) -> Iterator[str]:
    """Options of the model that no plan decides about, with their values."""
    for option in _split(words):
        if not option[0].startswith(_DECIDED):
            yield from option
