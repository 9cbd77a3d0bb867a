"""The launch in question, given as a configuration, a command line or a launch script."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from commfuse_npu.options import schedule_for
from commfuse_npu.plan import Schedule, default_chunks
from commfuse_npu.tools.launch_script.launch import (
    Launch,
    checkout_of,
    launch_of,
    read_launch,
    shell_script,
    typed_command,
)
from commfuse_npu.tools.launch_script.options import Options
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.plan.judgement import Judgement, fuse_options, judge_launch

__all__ = ["AskedLaunch", "ask_about"]

# Defaults of scripts/launch_pretraining.sh.
_LAUNCHER_VARIABLES = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    "HCCL_CONNECT_TIMEOUT": "3600",
    "HCCL_EXEC_TIMEOUT": "3600",
    "TASK_QUEUE_ENABLE": "2",
}
# The options of that script that matter here.
_LAUNCHER_OPTIONS = ("--use-distributed-optimizer", "--no-gradient-accumulation-fusion")
_ASSUMED_VOCABULARY = ("--vocab-size", "32000")
"""Tokenizers are not read here, and no answer about a launch depends on the vocabulary."""


@dataclass(frozen=True)
class AskedLaunch:
    """A launch in question.

    Attributes:
        name: of the configuration, or the size of the model.
        options: of the command line, including those of the launcher and of a configuration.
        config, fuse: the model configuration, and CommFuse's options.
        variables, registers, notes: of :class:`~.launch_script.launch.Launch`.
    """

    name: str
    options: Options
    config: ModelConfig
    fuse: argparse.Namespace
    variables: Mapping[str, str]
    registers: bool
    notes: Sequence[str] = ()

    @cached_property
    def judged(self) -> Judgement:
        """What CommFuse would do, according to the options."""
        return judge_launch(self.options, self.config.world_size, self.fuse)

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
    config: Path | None,
    words: Sequence[str],
    variables: Mapping[str, str],
    timeout: float = 60.0,
) -> AskedLaunch:
    """The launch that a configuration, a command line or both describe.

    A configuration represents its launcher in ``scripts``.  A command line can be complete,
    options only, or a launch script with its arguments.  A script is run with stand-ins for
    torchrun and Python, for at most ``timeout`` seconds.

    Raises:
        ConfigError: they cannot be read.
        UsageError: the script starts no training, or an option looks like CommFuse's but does not
            exist.
    """
    launch = _read(words, variables, timeout)
    sizes = {"--nnodes": launch.nodes, "--nproc_per_node": launch.per_node}
    torchrun = [word for name, size in sizes.items() if size for word in (name, str(size))]
    words = [*torchrun, *launch.options.words]
    fuse, registers, assigned = fuse_options(words), launch.registers, launch.environment
    if config is not None:
        model = ModelConfig.load(config, words)
        words = [*model.arguments(), *_LAUNCHER_OPTIONS, *model.commfuse_options, *words]
        fuse, registers, name = fuse_options(words), True, config.stem
        unset = {k: v for k, v in _LAUNCHER_VARIABLES.items() if k not in variables}
        assigned = {**unset, **assigned}
    else:
        # The last value counts, so given options come after assumed ones.
        model = ModelConfig.from_options([*_ASSUMED_VOCABULARY, *words])
        name = f"a model of {model.num_layers} layers of {model.hidden_size}"
    return AskedLaunch(name, Options(words), model, fuse, assigned, registers, launch.notes)


def _read(words: Sequence[str], variables: Mapping[str, str], timeout: float) -> Launch:
    command = typed_command(words)
    if script := shell_script(command.words):
        folder = Path(script[0]).expanduser().resolve().parent
        return read_launch(words, checkout_of(folder), variables, timeout)
    if (launch := launch_of(command)) is not None:
        return launch
    # Options only: words before the first option are an unknown program.
    arguments = list(command.words)
    first = next((i for i, word in enumerate(arguments) if word.startswith("--")), len(arguments))
    environment = dict(command.environment)
    options = Options(arguments[first:])
    return Launch("", options, None, None, Path(), environment, registers=not arguments[:first])
