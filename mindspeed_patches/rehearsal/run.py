"""One run of a rehearsal under torchrun on the checkouts, and the records of its ranks."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from commfuse_npu.launch.packages import TOGETHER, WITHOUT_LLM
from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.launch_script.short_run import last_lines, run_bounded, torchrun_here
from mindspeed_patches.rehearsal.records import Record, read_records

_PROJECT = Path(__file__).resolve().parents[2]
_MISSING_KERNEL = re.compile(r"Could not run '(npu::\w+)")


class RunFailedError(RuntimeError):
    """A run did not complete; the message has its last output."""


_CHECKOUTS = {
    "MINDSPEED_LLM_HOME": "mindspeed_llm/tasks/megatron_adaptor_v2.py",
    "MINDSPEED_HOME": "mindspeed/patch_utils.py",
    "MEGATRON_HOME": "megatron/training/training.py",
}
"""Variables, and a file by which a checkout is recognized; MindSpeed-LLM 2.1.0 lacks its."""


def find_stack(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """The checkouts of MindSpeed-LLM, MindSpeed and Megatron-LM that the environment names.

    Without ``MINDSPEED_LLM_HOME`` those of MindSpeed and Megatron-LM.

    Raises:
        UsageError: one is missing, is something else, or is too old.
    """
    names = [name for name in _CHECKOUTS if environ.get(name) or name != "MINDSPEED_LLM_HOME"]
    roots = {name: Path(environ.get(name) or os.devnull).expanduser() for name in names}
    problems = [
        f"{name} is {environ.get(name) or 'not set'}; give a checkout with {_CHECKOUTS[name]}: "
        f"{name}=DIR"
        for name in names
        if not (roots[name] / _CHECKOUTS[name]).is_file()
    ]
    if problems:
        raise UsageError(
            "\n".join([*problems, f"These belong together: {TOGETHER}; or {WITHOUT_LLM}"])
        )
    return [root.resolve() for root in roots.values()]


def worker_environment(
    stack: Sequence[Path], launch: Mapping[str, str], tools: Path
) -> dict[str, str]:
    """The environment of the ranks: that of the launch, adapted to a CPU.

    Args:
        stack: the checkouts, which are put on ``PYTHONPATH`` in this order.
        launch: variables that a launch script sets.
        tools: a folder for a program that the ranks need.
    """
    environment = {**os.environ, **launch}
    # Megatron compiles its data set helpers for what python3-config says: virtual environments
    # have none, and the system's may belong to another version than the python3 of this one.
    tools.mkdir(parents=True, exist_ok=True)
    suffix = tools / "python3-config"
    suffix.write_text(f"#!/bin/sh\necho {sysconfig.get_config_var('EXT_SUFFIX')}\n", "utf-8")
    suffix.chmod(0o755)
    for name, folders in (
        ("PYTHONPATH", [*stack, _PROJECT]),
        ("PATH", [tools, Path(sys.executable).parent]),
    ):
        words = [*map(str, folders), environment.get(name)]
        environment[name] = os.pathsep.join(filter(None, words))
    environment.update(
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        TOKENIZERS_PARALLELISM="false",
    )
    # Megatron refuses tensor parallelism without this variable.
    environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return environment


def train(
    way: str,
    command: Sequence[str],
    records: Path,
    *,
    processes: int,
    folder: Path,
    environment: Mapping[str, str],
    timeout: float,
) -> list[Record]:
    """Run the pretraining script once and return the records of its ranks.

    Args:
        way: ``reference`` or ``commfuse``.
        command: the script and its arguments.
        records: a new folder for the records and the log.

    Raises:
        RunFailedError: a rank failed, or the time limit was exceeded.
    """
    records.mkdir(parents=True)
    log = records / "log.txt"
    worker = "-m", "mindspeed_patches.rehearsal.rehearsed_rank", str(records), way
    words = [*torchrun_here(processes), *worker, *command]
    try:
        code = run_bounded(words, folder=folder, environment=environment, log=log, seconds=timeout)
    except TimeoutError as error:
        raise RunFailedError(f"the {way} run {error} (--timeout):\n{_tail(log)}") from error
    results = read_records(records)
    if code or len(results) != processes:
        raise RunFailedError(
            f"the {way} run failed with exit code {code}, and {len(results)} of {processes} ranks "
            f"reached its end (--output DIR keeps the whole log):\n{_tail(log)}"
        )
    return results


def _tail(log: Path) -> str:
    text = last_lines(log)
    operator = next(filter(None, map(_MISSING_KERNEL.search, text)), None)
    if operator is not None:
        text.append(
            f"{operator[1]} has no CPU kernel: the rehearsal has those of dense models; leave out "
            "the option that uses it"
        )
    return "\n".join(f"    {line}" for line in text)
