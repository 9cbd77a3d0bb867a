"""The command line that ``scripts/launch_pretraining.sh`` starts; the script lists the variables.

::

    python -m commfuse_npu.tools.launch_command llama3_8b --mock-data

checks the configuration, the variables and the arguments.  It prints the name of the log, then a
command that can be pasted into a shell: environment, torchrun, MindSpeed-LLM's entry, options.
It needs PyYAML, but neither torch nor NPUs.
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
_COMMFUSE = ("LAYERS", "LANES", "CHUNKS", "REDUCE_DTYPE")
_ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    "HCCL_CONNECT_TIMEOUT": "3600",
    "HCCL_EXEC_TIMEOUT": "3600",
    "TASK_QUEUE_ENABLE": "2",
    "CPU_AFFINITY_CONF": "1",
}
"""Defaults of environment variables for the processes."""
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
    """Variables of the environment; an empty one counts as unset."""

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
        """The value of a variable; in a dry run a missing one is replaced by <NAME>."""
        if value := self.get(name):
            return value
        if not self.dry_run:
            raise ConfigError(f"{name} is not set; set it to {meaning}")
        _print(f"{name} is not set; <{name}> stands for it")
        return f"<{name}>"

    def existing(self, name: str, meaning: str) -> str:
        """The prefix of an existing path; a dry run does not check that it exists."""
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
            ``pretrain_gpt.py``, which override the configuration.

    Raises:
        ConfigError: a variable is missing or invalid, there is nothing to fuse, or (in lines that
            start with the configuration's name) the layout does not fit.
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
        # Overrides by variables or arguments are validated together with the file.
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
        # Otherwise each node would wait for itself, or all would be the first, forever.
        address = variables.required("MASTER_ADDR", "the address of node 0")
        numbering = f"0 on that node, up to {config.nnodes - 1} on the others"
        node = variables.required("NODE_RANK", numbering)
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
        # Find the package in this checkout even if it is not installed.
        paths = [path for path in variables.get("PYTHONPATH").split(":") if path]
        exported["PYTHONPATH"] = ":".join(paths if str(_ROOT) in paths else [str(_ROOT), *paths])
    if node != "0":
        log += f"_node{node}"  # on a shared file system every node needs its own log
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
    """Options to load and save; warns if loaded weights are trained with the initial --lr."""
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
        # Converted weights have no optimizer state.
        words += ["--load", load, *(["--no-load-optim", "--no-load-rng"] if load != save else [])]
    return words


if __name__ == "__main__":
    # PYTHONPATH's first entry is only for this module; the launch must not see it.
    _, _, paths = os.environ.get("PYTHONPATH", "").partition(":")
    try:
        print(*launch_command(sys.argv[1:], {**os.environ, "PYTHONPATH": paths}), sep="\n")
    except ConfigError as error:
        for line in str(error).splitlines():
            _print(f"error: {line}")
        sys.exit(2)
