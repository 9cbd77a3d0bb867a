"""What is to be started, as a configuration, a command line or both describe it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from commfuse_npu.tools.doctor.fuse_options import FuseOptions
from commfuse_npu.tools.launch_script.options import value_of
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
        options: words of the command line, the launcher's and those of a configuration among them.
        config: what they amount to.
        fuse: the options of CommFuse.
        variables: what the launch itself sets.
        registers: whether the command registers CommFuse before the script runs.
        knows_vocabulary: whether its size was given, and not left to a tokenizer.
    """

    name: str
    options: tuple[str, ...]
    config: ModelConfig
    fuse: FuseOptions
    variables: Mapping[str, str]
    registers: bool
    knows_vocabulary: bool


def read_launch(
    config: Path | None, words: Sequence[str], variables: Mapping[str, str]
) -> Launch | None:
    """The launch that a configuration, a command line or both describe; ``None`` without either.

    A configuration stands for its launcher in ``scripts``.  A command line may be a whole one, as
    a dry run prints it: ``cd``, assignments, torchrun, script and all.

    Raises:
        ConfigError: they cannot be read.
    """
    if config is None and not words:
        return None
    assigned = {}
    options = list(words[words.index("&&") + 1 :] if "&&" in words else words)
    while options and (found := _ASSIGNMENT.fullmatch(options[0])):
        assigned[found[1]] = found[2]
        del options[0]
    if config is None:
        given = (value_of(options, name) for name in ("--vocab-size", "--padded-vocab-size"))
        knows_vocabulary = any(value is not None for value in given)
        assumed = [] if knows_vocabulary else ["--vocab-size", str(ASSUMED_VOCABULARY)]
        made = ModelConfig.from_options([*options, *assumed])
        return Launch(
            f"a model of {made.num_layers} layers of {made.hidden_size}",
            tuple(options),
            made,
            FuseOptions.from_options(options),
            assigned,
            registers="mindspeed_patches.launch" in options
            or not any(word.endswith("pretrain_gpt.py") for word in options),
            knows_vocabulary=knows_vocabulary,
        )
    made = ModelConfig.load(config, options)
    options = [*made.arguments(), *_LAUNCHER_OPTIONS, *made.commfuse_options, *options]
    unset = {k: v for k, v in _LAUNCHER_VARIABLES.items() if k not in variables}
    return Launch(
        config.stem,
        tuple(options),
        made,
        FuseOptions.from_options(options),
        {**unset, **assigned},
        registers=True,
        knows_vocabulary=True,
    )
