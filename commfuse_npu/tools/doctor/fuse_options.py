"""The options of CommFuse that say what is fused, and how.

The launch declares them (``mindspeed_patches``); tests hold the two against each other.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from commfuse_npu.plan import Schedule, Shape, least_rows, usual_chunks
from commfuse_npu.tools.config_file import ConfigError
from commfuse_npu.tools.linear_layers import LAYERS
from commfuse_npu.tools.model_config import ModelConfig, OptionParser

__all__ = ["FuseOptions", "chunks_of", "min_rows_of", "schedule_of"]

_Chosen = Literal["auto", "shifted", "two_level"]


@dataclass(frozen=True)
class FuseOptions:
    """The options ``--use-commfuse`` and ``--commfuse-...`` that say what is fused, and how."""

    use_commfuse: bool = False
    layers: tuple[str, ...] = LAYERS
    schedule: _Chosen = "auto"
    lanes: int | None = None
    chunks: int | None = None
    taper: float = 1.0
    tuning: Literal["off", "on"] = "off"
    min_rows: int | Literal["auto"] = "auto"
    wgrad: Literal["whole", "blocks"] = "whole"
    attention: bool = False
    flow: int | None = None
    ulysses: bool = False
    dp: bool = False

    @classmethod
    def from_options(cls, options: Sequence[str]) -> FuseOptions:
        """Read them from a command line; other options are passed over.

        Raises:
            ConfigError: a value is unknown or out of range.
        """
        parser, flag = OptionParser(), argparse.BooleanOptionalAction
        parser.add_argument("--use-commfuse", action=flag)
        parser.add_argument("--commfuse-layers", dest="layers", type=_layer_names)
        parser.add_argument("--commfuse-schedule", dest="schedule", choices=get_args(_Chosen))
        parser.add_argument("--commfuse-lanes", dest="lanes", type=int)
        parser.add_argument("--commfuse-chunks", dest="chunks", type=int)
        parser.add_argument("--commfuse-taper", dest="taper", type=float)
        parser.add_argument("--commfuse-tuning", dest="tuning", choices=("off", "on"))
        parser.add_argument("--commfuse-min-rows", dest="min_rows", type=_rows)
        parser.add_argument("--commfuse-wgrad", dest="wgrad", choices=("whole", "blocks"))
        parser.add_argument("--commfuse-attention", dest="attention", action=flag)
        parser.add_argument("--commfuse-flow", dest="flow", type=int)
        parser.add_argument("--commfuse-ulysses", dest="ulysses", action=flag)
        parser.add_argument("--commfuse-dp", dest="dp", action=flag)
        found = cls(**parser.given(options))
        for name, least in (("lanes", 1), ("chunks", 1), ("min_rows", 0), ("flow", 2)):
            value = getattr(found, name)
            if isinstance(value, int) and value < least:
                option = f"--commfuse-{name.replace('_', '-')}"
                raise ConfigError(f"{option} is {value}; give a whole number from {least}")
        return found


def _layer_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in LAYERS:
            raise argparse.ArgumentTypeError(
                f"unknown layer {name!r}; choose from {','.join(LAYERS)}"
            )
    return names


def _rows(text: str) -> int | str:
    return text if text == "auto" else int(text)


def chunks_of(config: ModelConfig, options: FuseOptions) -> int:
    """The chunks of a tensor-parallel block: those asked for, or those of the feature."""
    usual = usual_chunks(config.tensor_model_parallel_size, config.block_rows, config.hidden_size)
    return options.chunks or (1 if options.tuning == "on" else usual)


def min_rows_of(size: int, hidden: int | None, options: FuseOptions) -> int:
    """With fewer rows per block layers stay Megatron's, on an NPU that is described.

    Args:
        size: of the tensor-parallel group.
        hidden: features of a row, if they are known.
    """
    if options.min_rows != "auto":
        return options.min_rows
    return 0 if options.chunks or options.tuning == "on" else least_rows(size, hidden)


def schedule_of(config: ModelConfig, options: FuseOptions) -> Schedule:
    """The schedule of a tensor-parallel group; ``auto`` is two_level if it spans nodes.

    Raises:
        PlanError: the options make no schedule.
    """
    size, local = config.tensor_model_parallel_size, config.npus_per_node
    shape: Shape
    if options.schedule == "auto":
        shape = "two_level" if local < size and size % local == 0 else "shifted"
    else:
        shape = options.schedule
    schedule = Schedule(
        shape=shape,
        lanes=options.lanes,
        chunks=chunks_of(config, options),
        taper=options.taper,
        node_size=min(local, size) if shape == "two_level" else None,
    )
    return dataclasses.replace(schedule, lanes=min(schedule.lanes_for(size), max(1, size - 1)))
