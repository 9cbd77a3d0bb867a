"""The forms in which a launch is measured, and their commands.

For MindSpeed-LLM, options are read from what its script would start
(:mod:`commfuse_npu.tools.launch_script`), so any launch script works, and each form is the same
command with its own flags.  The CPU pretraining script is started as it is, with appended options.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.launch_script.launch import read_launch
from commfuse_npu.tools.launch_script.options import Options
from commfuse_npu.tools.launch_script.short_run import (
    PEERS,
    commfuse_names,
    replace_missing_data,
    shorten,
)
from commfuse_npu.tools.simulate.launch_options import FORMS as LAUNCHED
from commfuse_npu.tools.simulate.variants import COC, COC_FUSED, FB_OVERLAP, MC2, MEGATRON

__all__ = ["FORMS", "ITERATIONS", "Form", "Launches", "launches"]

ITERATIONS = 10
"""Iterations of each form."""

_PROJECT = Path(__file__).resolve().parents[3]


class Form(NamedTuple):
    """A form of the launch: name, title, flags, and whether it belongs to CommFuse."""

    name: str
    title: str
    flags: str
    ours: bool = False

    @property
    def step(self) -> str:
        """Its name among the results of a measurement, and that of its log."""
        return f"launch_{self.name}"


FORMS = (
    Form("megatron", *LAUNCHED[MEGATRON]),
    Form("fb_overlap", *LAUNCHED[FB_OVERLAP], ours=True),
    Form("commfuse", "CommFuse's fused layers", "--use-commfuse", ours=True),
    Form("mc2", *LAUNCHED[MC2]),
    Form("coc_kernel", *LAUNCHED[COC_FUSED]),
    Form("plain", "plain collectives", ""),
    Form("coc", *LAUNCHED[COC[1]]),
)
"""The most useful forms first."""

_ON_CPU = {
    "megatron": "--no-use-commfuse",
    "fb_overlap": "--no-use-commfuse --commfuse-fb-overlap",
    "commfuse": "--use-commfuse",
    "plain": "--use-commfuse --plain",
}
"""Flags of the CPU pretraining, which has neither CoC nor MC2."""


class Launches(NamedTuple):
    """Commands by form name, the folder in which they run, and their environment.

    ``notes``: what was changed in the launch.
    """

    commands: Mapping[str, Sequence[str]]
    folder: Path
    environment: Mapping[str, str]
    notes: Sequence[str] = ()

    @property
    def forms(self) -> list[Form]:
        return [form for form in FORMS if form.name in self.commands]


def launches(text: str, device: str, ranks: int, scratch: Path) -> Launches:
    """Parse the value of ``--launch``.

    Args:
        text: a launch script with its arguments, or a torchrun command line.
        device: ``cpu`` for the CPU pretraining.
        ranks: number of ranks.
        scratch: folder for files of the trainings that are not kept.

    Raises:
        UsageError: it is not a launch, or not for this number of ranks.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--launch {text!r}: {error}; quote it as for a shell") from error
    if device == "cpu":
        return _of_cpu_pretraining(words, scratch)
    return _of_mindspeed_llm(words, ranks)


def _of_cpu_pretraining(words: Sequence[str], scratch: Path) -> Launches:
    script = Path(words[0]) if words else Path()
    if script.suffix == ".sh":
        if not script.is_file():
            raise UsageError(f"there is no launch script {script}; give its path")
        words = ["bash", str(script.resolve()), *words[1:]]
    elif not words or shutil.which(words[0]) is None:
        raise UsageError(f"--launch {' '.join(words)!r} starts no program; give a launch script")
    short = ["--train-iters", str(ITERATIONS), "--output", str(scratch)]
    commands = {name: [*words, *short, *flags.split()] for name, flags in _ON_CPU.items()}
    return Launches(commands, Path.cwd(), os.environ)


def _of_mindspeed_llm(words: Sequence[str], ranks: int) -> Launches:
    """The commands for a MindSpeed-LLM launch.  Rehearsed on CPU, not run on NPUs."""
    checkout = Path(os.environ.get("MINDSPEED_LLM_HOME") or Path.cwd())
    launch = read_launch(words, checkout)
    if launch.processes != ranks:
        text = f"asks for {launch.processes} processes" if launch.processes else "names no number"
        raise UsageError(
            f"--launch {words[0]} {text}, and here are {ranks} (--ranks); a measurement is of "
            "one server: change the launch or --ranks"
        )
    script = launch.script_path(checkout)
    folder = launch.folder if (launch.folder / launch.script).is_file() else checkout
    options = launch.options
    shorten(options, ITERATIONS)
    options.set("--log-throughput")
    replace_missing_data(options, folder)
    started = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "1", "--nproc_per_node", str(ranks)),
        *("--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0"),
        *("--local_addr", "127.0.0.1", "-m", "mindspeed_patches.measured"),
    ]
    commands = {}
    for form in FORMS:
        blocking = ["--blocking"] if form.name == "plain" else []
        commands[form.name] = [*started, *blocking, str(script), *_in_form(options, form)]
    environment = {**os.environ, **launch.environment}
    paths = [str(_PROJECT), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return Launches(commands, folder, environment, (*launch.notes, *options.changes))


def _in_form(options: Options, form: Form) -> list[str]:
    result = options.copy()
    result.drop(*PEERS, "--use-commfuse", "--no-use-commfuse")
    if form.name != "commfuse":
        result.drop(*commfuse_names(result))
    if form.name == "fb_overlap":
        result.set("--commfuse-fb-overlap-memory")  # required in a plain pipeline
    for name in (flags := Options(form.flags.split())).names:
        result.set(name, *flags.values(name))
    return result.words
