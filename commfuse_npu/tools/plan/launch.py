"""The launch in question, given as a configuration, a command line or a launch script."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from commfuse_npu.options import DEFAULTS, add_arguments, schedule_for, unknown_option
from commfuse_npu.plan import Schedule, default_chunks
from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.launch_script.launch import Launch, read_launch
from commfuse_npu.tools.launch_script.options import Options
from commfuse_npu.tools.model_config import ModelConfig, known_options

__all__ = ["AskedLaunch", "ask_about"]

_ASSUMED_VOCABULARY = 32000
"""Tokenizers are not read here."""


@dataclass(frozen=True)
class AskedLaunch:
    """A launch in question.

    Attributes:
        name: of the configuration, or the size of the model.
        command: with the options of torchrun and of a configuration among its own, and the
            variables of the shell that it is started in.
        config, fuse: the model configuration, and CommFuse's options.
    """

    name: str
    command: Launch
    config: ModelConfig
    fuse: argparse.Namespace

    @property
    def options(self) -> Options:
        return self.command.options

    @property
    def schedule(self) -> Schedule:
        """The schedule of the tensor-parallel group.

        Raises:
            PlanError: the options form no valid schedule.
        """
        config, size = self.config, self.config.tensor_model_parallel_size
        usual = default_chunks(size, config.block_rows, config.hidden_size)
        chunks = 1 if self.fuse.commfuse_tuning == "on" else usual
        return schedule_for(self.fuse, size, config.npus_per_node, chunks=chunks, linear=True)


def ask_about(
    config: Path | None, words: Sequence[str], variables: Mapping[str, str]
) -> AskedLaunch:
    """The launch that a configuration, a command line or both describe.

    A configuration represents its launcher in ``scripts``.  A command line can be complete,
    options only, or a launch script with its arguments.  A script is run with stand-ins for
    torchrun and Python, for at most a minute.

    Raises:
        ConfigError: they cannot be read.
        UsageError: the script starts no training, or an option looks like CommFuse's but does not
            exist.
    """
    if words and not words[0].startswith("--"):
        launch = read_launch(words, environ=variables)
    else:
        launch = Launch("", Options(words), None, None, Path(), registers=True)
    launch = replace(launch, environment={**variables, **launch.environment})
    sizes = {"--nnodes": launch.nodes, "--nproc_per_node": launch.per_node}
    torchrun = [word for name, size in sizes.items() if size for word in (name, str(size))]
    words = [*torchrun, *launch.options.words]
    if config is not None:
        model = ModelConfig.load(config, words)
        # Of the options that the launcher adds, this one matters here.
        launchers = "--use-distributed-optimizer"
        words = [*model.arguments(), launchers, *model.commfuse_options, *words]
        name, launch = config.stem, replace(launch, registers=True)
    else:
        # The last value counts, so given options come after assumed ones.
        model = ModelConfig.from_options(["--vocab-size", str(_ASSUMED_VOCABULARY), *words])
        if {"--vocab-size", "--padded-vocab-size"}.isdisjoint(launch.options.names):
            note = f"no --vocab-size: simulated with {_ASSUMED_VOCABULARY} tokens"
            launch = replace(launch, notes=[*launch.notes, note])
        name = f"a model of {model.num_layers} layers of {model.hidden_size}"
    return AskedLaunch(name, replace(launch, options=Options(words)), model, _fuse_options(words))


def _fuse_options(words: Sequence[str]) -> argparse.Namespace:
    """The CommFuse options of a command line; the launch refuses unknown ones, too."""
    if why := unknown_option(words):
        raise UsageError(f"the launch is refused: {why}")
    return argparse.Namespace(**DEFAULTS | known_options(words, add_arguments)[0])
