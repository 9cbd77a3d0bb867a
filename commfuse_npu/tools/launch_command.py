"""The command line that ``scripts/launch_pretraining.sh`` starts; its head lists the variables.

::

    python -m commfuse_npu.tools.launch_command llama3_8b --mock-data

checks the configuration, the variables and the arguments, and prints the name of the log and below
it a command that can be pasted into a shell: environment, torchrun, MindSpeed-LLM's entry, options.
Needs PyYAML, and neither torch nor NPUs.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from glob import escape as glob_escape
from glob import glob
from pathlib import Path

from commfuse_npu.config_file import ConfigError
from commfuse_npu.tools.model_config import VARIABLES, ModelConfig

__all__ = ["launch_command"]

_ROOT = Path(__file__).resolve().parents[2]
_COMMFUSE = ("LAYERS", "SCHEDULE", "LANES", "CHUNKS", "REDUCE_DTYPE")
_ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    "HCCL_CONNECT_TIMEOUT": "3600",
    "HCCL_EXEC_TIMEOUT": "3600",
    "TASK_QUEUE_ENABLE": "2",
    "CPU_AFFINITY_CONF": "1",
}
"""What the processes get unless it is set."""
_OUTPUT = (
    "--log-interval 1 --log-throughput --save-interval 2000 --eval-interval 2000 --eval-iters 0 "
    "--ckpt-format torch"
)
_OPTIMIZE = (
    "--transformer-impl local --use-flash-attn --use-fused-rmsnorm --use-fused-swiglu "
    "--use-fused-rotary-pos-emb --no-masked-softmax-fusion --attention-softmax-in-fp32 "
    "--no-gradient-accumulation-fusion --use-distributed-optimizer"
)


class _Variables:
    """What is set in the environment; set to nothing is not set."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._set = environ
        self.dry_run = self.switch("DRY_RUN", False)

    def get(self, name: str, default: str = "") -> str:
        return self._set.get(name) or default

    def switch(self, name: str, default: bool) -> bool:
        value = self.get(name, str(int(default)))
        if value not in ("0", "1"):
            raise ConfigError(f"{name} is '{value}'; set it to 0 or 1")
        return value == "1"

    def required(self, name: str, meaning: str) -> str:
        """Its value; in a dry run <NAME> may stand for it."""
        if value := self.get(name):
            return value
        if not self.dry_run:
            raise ConfigError(f"{name} is not set; set it to {meaning}")
        _print(f"{name} is not set; <{name}> stands for it")
        return f"<{name}>"

    def existing(self, name: str, meaning: str) -> str:
        """The beginning of a path; a dry run does not look."""
        value = self.required(name, meaning)
        if not self.dry_run and not glob(glob_escape(value) + "*"):
            raise ConfigError(f"{name} is '{value}', but there is nothing of that name")
        return value


def _print(line: str) -> None:
    print(f"pretrain: {line}", file=sys.stderr)


def launch_command(words: Sequence[str], environ: Mapping[str, str]) -> tuple[str, str]:
    """The name of the log, and the command.

    Args:
        words: a model of ``configs/``, unless ``CONFIG`` names a file, and arguments for
            ``pretrain_gpt.py``, which take the place of what the configuration says.

    Raises:
        ConfigError: a variable is missing or wrong, there is nothing to fuse, or, where a line
            begins with the configuration's name, the layout does not fit.
    """
    variables, arguments = _Variables(environ), list(words)
    model = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    if model is None and not variables.get("CONFIG"):
        raise ConfigError(
            "CONFIG is not set; set it to what commfuse-npu plan --write FILE has written, or "
            "start pretrain_<model>_ptd.sh"
        )
    file = Path(variables.get("CONFIG") or _ROOT / "configs" / f"{model}.yaml")
    layout = [f"--{option.replace('_', '-')}={value}" for option, name in VARIABLES.items()
              if (value := variables.get(name))]  # fmt: skip
    try:
        # The layout, where variables or arguments change it, is checked like that of the file.
        config = ModelConfig.load(file, [*layout, *arguments])
        config.validate()
    except ConfigError as error:
        lines = str(error).splitlines()
        raise ConfigError("\n".join(f"{file.name}: {line}" for line in lines)) from error
    fused = list(config.commfuse_options)
    use_commfuse = variables.switch("USE_COMMFUSE", bool(fused))
    home = variables.get("MINDSPEED_LLM_HOME")
    if not variables.dry_run:
        folder = Path(home or ".").resolve()
        if not (folder / "pretrain_gpt.py").is_file():
            raise ConfigError(
                f"there is no pretrain_gpt.py in {folder}; start in the root of MindSpeed-LLM, or "
                "set MINDSPEED_LLM_HOME to it"
            )

    torchrun = ["--nproc_per_node", str(config.npus_per_node), "--nnodes", str(config.nnodes)]
    address, node = variables.get("MASTER_ADDR", "localhost"), variables.get("NODE_RANK", "0")
    if config.nnodes > 1:
        # Nodes that all wait for themselves, or that are all the first, would wait for ever.
        address = variables.required("MASTER_ADDR", "the address of node 0")
        others = f"0 on that node, up to {config.nnodes - 1} on the others"
        node = variables.required("NODE_RANK", others)
    torchrun += ["--node_rank", node, "--master_addr", address]
    torchrun += ["--master_port", variables.get("MASTER_PORT", "6001")]

    options = config.arguments()
    tokenizer = config.tokenizer_option
    if tokenizer and not _has(arguments, tokenizer):
        meaning = "the file or folder of the tokenizer"
        options += [tokenizer, variables.existing("TOKENIZER_MODEL", meaning)]
    if not _has(arguments, "--mock-data", "--data-path", "--train-data-path"):
        meaning = "the prefix of the preprocessed data, or pass --mock-data"
        options += ["--data-path", variables.existing("DATA_PATH", meaning)]
    options += ["--split", "100,0,0", *_OUTPUT.split()]
    options += _checkpoints(variables, arguments, config.lr, file) + _OPTIMIZE.split()

    exported = {name: variables.get(name, value) for name, value in _ENVIRONMENT.items()}
    entry, log = ["pretrain_gpt.py"], f"train_{file.stem}"
    if use_commfuse:
        options += fused or ["--use-commfuse"]
        alone = _has([*arguments, *options], "--commfuse-ulysses", "--commfuse-dp")
        if config.tensor_model_parallel_size == 1 and not alone:
            raise ConfigError(
                "USE_COMMFUSE=1 with TP 1: a group of one has nothing to transfer; choose TP of at "
                "least 2, --commfuse-ulysses, --commfuse-dp, or USE_COMMFUSE=0"
            )
        for name in _COMMFUSE:
            if value := variables.get(f"COMMFUSE_{name}"):
                options += [f"--commfuse-{name.lower().replace('_', '-')}", value]
        entry, log = ["-m", "mindspeed_patches.launch", *entry], f"{log}_commfuse"
        # The package is found in this checkout, whether it is installed or not.
        paths = [path for path in variables.get("PYTHONPATH").split(":") if path]
        exported["PYTHONPATH"] = ":".join(paths if str(_ROOT) in paths else [str(_ROOT), *paths])
    if node != "0":
        log += f"_node{node}"  # on a shared file system every node writes a log of its own
    if not variables.dry_run and shutil.which("torchrun", path=variables.get("PATH")) is None:
        raise ConfigError("torchrun is not on PATH; activate the environment that torch_npu is in")
    command = ["torchrun", *torchrun, *entry, *options, "--distributed-backend", "nccl", *arguments]
    return f"logs/{log}.log", " ".join(
        [
            *((f"cd {shlex.quote(home)} &&",) if home else ()),
            *(f"{name}={shlex.quote(value)}" for name, value in exported.items()),
            shlex.join(command),
        ]
    )


def _has(arguments: Sequence[str], *options: str) -> bool:
    return any(word.partition("=")[0] in options for word in arguments)


def _checkpoints(
    variables: _Variables, arguments: Sequence[str], rate: float, file: Path
) -> list[str]:
    """Options to load and save; says when weights would be trained on as if from scratch."""
    load, save = variables.get("CKPT_LOAD_DIR"), variables.get("CKPT_SAVE_DIR")
    fresh = load != save if load else all(_has(arguments, o) for o in ("--load", "--finetune"))
    if fresh and not _has(arguments, "--lr"):
        _print(
            f"warning: weights are loaded, and --lr {rate} of {file} is a peak for training from "
            "scratch; MindSpeed-LLM's launches go on with 1.25e-6 (7B, 8B) and 1e-6 (13B, 70B): "
            "pass --lr and --min-lr"
        )
    words = ["--save", save] if save else []
    if load:
        # Converted weights come without the state of an optimizer.
        words += ["--load", load, *(["--no-load-optim", "--no-load-rng"] if load != save else [])]
    return words


if __name__ == "__main__":
    # This module was found by the first entry, which the launch is not to see.
    _, _, paths = os.environ.get("PYTHONPATH", "").partition(":")
    try:
        print(*launch_command(sys.argv[1:], {**os.environ, "PYTHONPATH": paths}), sep="\n")
    except ConfigError as error:
        for line in str(error).splitlines():
            _print(f"error: {line}")
        sys.exit(2)
