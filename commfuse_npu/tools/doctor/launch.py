"""What is to be started, as a configuration, a command line, a launch script or two describe it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from commfuse_npu.options import schedule_for
from commfuse_npu.plan import Schedule, usual_chunks
from commfuse_npu.tools.doctor.judgement import Judgement, fuse_options, judge_launch, min_rows
from commfuse_npu.tools.launch_script.options import Options
from commfuse_npu.tools.launch_script.read import checkout_of, is_script, script_folder
from commfuse_npu.tools.launch_script.read import read_launch as read_script
from commfuse_npu.tools.model_config import ModelConfig

__all__ = ["ASSUMED_VOCABULARY", "Launch", "read_launch"]

# What scripts/launch_pretraining.sh sets unless it is set.
_LAUNCHER_VARIABLES = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    "HCCL_CONNECT_TIMEOUT": "3600",
    "HCCL_EXEC_TIMEOUT": "3600",
    "TASK_QUEUE_ENABLE": "2",
}
# Of those that are asked for here.
_LAUNCHER_OPTIONS = ("--use-distributed-optimizer", "--no-gradient-accumulation-fusion")
ASSUMED_VOCABULARY = 32000
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.S)


@dataclass(frozen=True)
class Launch:
    """What is to be started.

    Attributes:
        name: of the configuration, or how large the model is.
        options: of the command line, the launcher's and those of a configuration among them.
        config: what they amount to.
        fuse: the options of CommFuse.
        variables: what the launch itself sets.
        registers: whether the command registers CommFuse before the script runs.
        knows_vocabulary: whether its size was given, and not left to a tokenizer.
    """

    name: str
    options: Options
    config: ModelConfig
    fuse: argparse.Namespace
    variables: Mapping[str, str]
    registers: bool
    knows_vocabulary: bool

    @cached_property
    def judged(self) -> Judgement:
        """What CommFuse would do, read from the options."""
        return judge_launch(self.options, self.config.world_size, self.fuse)

    @property
    def schedule(self) -> Schedule:
        """Of a tensor-parallel group.

        Raises:
            PlanError: the options make no schedule.
        """
        config, size = self.config, self.config.tensor_model_parallel_size
        usual = usual_chunks(size, config.block_rows, config.hidden_size)
        chunks = 1 if self.fuse.commfuse_tuning == "on" else usual
        return schedule_for(self.fuse, size, config.npus_per_node, chunks=chunks)

    @property
    def least_rows(self) -> int:
        """With fewer rows per block layers stay Megatron's, on an NPU that is described."""
        config = self.config
        return min_rows(self.fuse, config.tensor_model_parallel_size, config.hidden_size)


def read_launch(
    config: Path | None, words: Sequence[str], variables: Mapping[str, str]
) -> Launch | None:
    """The launch that a configuration, a command line or both describe; ``None`` without either.

    A configuration stands for its launcher in ``scripts``.  A command line may be a whole one, as
    a dry run prints it: ``cd``, assignments, torchrun, script and all; or a launch script with its
    arguments, which is run with stand-ins for torchrun and Python.

    Raises:
        ConfigError: they cannot be read.
        UsageError: the launch script starts no training, or an option looks like ours and is none.
    """
    if config is None and not words:
        return None
    assigned = {}
    words = list(words[words.index("&&") + 1 :] if "&&" in words else words)
    while words and (found := _ASSIGNMENT.fullmatch(words[0])):
        assigned[found[1]] = found[2]
        del words[0]
    registers = "mindspeed_patches.launch" in words or not any(
        word.endswith("pretrain_gpt.py") for word in words
    )
    if is_script(words):
        read = read_script(words, checkout_of(script_folder(words)), variables)
        assigned, registers = {**assigned, **read.environment}, read.registers
        sizes = {"--nnodes": read.nodes, "--nproc_per_node": read.per_node}
        given = [word for name, size in sizes.items() if size for word in (name, str(size))]
        words = [*given, *read.options.words]
    fuse = fuse_options(words)
    if config is not None:
        made = ModelConfig.load(config, words)
        words = [*made.arguments(), *_LAUNCHER_OPTIONS, *made.commfuse_options, *words]
        fuse = fuse_options(words)
        unset = {k: v for k, v in _LAUNCHER_VARIABLES.items() if k not in variables}
        name, assigned, registers, known = config.stem, {**unset, **assigned}, True, True
    else:
        sizes_given = {"--vocab-size", "--padded-vocab-size"}
        known = any(word.partition("=")[0] in sizes_given for word in words)
        assumed = [] if known else ["--vocab-size", str(ASSUMED_VOCABULARY)]
        made = ModelConfig.from_options([*words, *assumed])
        name = f"a model of {made.num_layers} layers of {made.hidden_size}"
    # What comes before the first option is a program.
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    return Launch(name, Options(words[first:]), made, fuse, assigned, registers, known)
