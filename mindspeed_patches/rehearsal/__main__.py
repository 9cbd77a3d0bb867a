"""Rehearse a launch of MindSpeed-LLM on this machine's CPU, with and without CommFuse.

::

    python -m mindspeed_patches.rehearsal [OPTIONS] -- my_pretrain.sh
    python -m mindspeed_patches.rehearsal [OPTIONS] -- torchrun ... pretrain_gpt.py ARGS
    python -m mindspeed_patches.rehearsal [OPTIONS] -- pretrain_gpt.py ARGS

The real MindSpeed-LLM, MindSpeed, Megatron-LM and torch_npu run, over stand-ins for the device, for
CANN and for HCCL (gloo).  What is shown is what does not depend on the device: which features
apply, which layers are fused, how many collectives each group runs, and whether losses and weights
keep every bit.  **Nothing here runs on an NPU, and no time means anything.**

Attention that CommFuse computes block by block is rounded otherwise than the launch's own; with
``--commfuse-attention`` or ``--commfuse-ulysses`` the losses are compared within a tolerance.

``bash scripts/rehearse_on_cpu.sh`` prepares an environment first.  Exit code: 0 identical, 1 not
(or a run failed, or proves nothing), 2 the request makes no sense.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.launch_script.launch import Launch, read_launch
from mindspeed_patches.rehearsal import report
from mindspeed_patches.rehearsal.cann_stubs import CannStubsError, write_cann_stubs
from mindspeed_patches.rehearsal.compare import (
    degeneracies,
    differences,
    fused_paths,
    largest_loss_difference,
)
from mindspeed_patches.rehearsal.instruction_files import replace_missing_instructions
from mindspeed_patches.rehearsal.records import Record
from mindspeed_patches.rehearsal.rewrite import commfuse_run, prepare, reference_run
from mindspeed_patches.rehearsal.run import Run, RunFailedError, run_script, worker_environment
from mindspeed_patches.rehearsal.scale import Layout, layout_of, scale_down
from mindspeed_patches.rehearsal.stack import Stack, find_stack

__all__ = ["main"]

WAYS = ("reference", "commfuse")
_SET_ANEW = (
    *("PYTHONPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS"),
    *("GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),
)
"""Variables that a launch sets for its machine, and a rehearsal for this one."""
_OTHER_ROUNDING = ("--commfuse-attention", "--commfuse-ulysses")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_patches.rehearsal",
        usage="%(prog)s [OPTIONS] -- LAUNCH...",
        description="Rehearse a launch of MindSpeed-LLM on CPU, with and without CommFuse.",
        epilog="LAUNCH: pretrain_gpt.py ARGS, torchrun ... pretrain_gpt.py ARGS, or a .sh script",
        allow_abbrev=False,
    )
    parser.add_argument("--mindspeed", metavar="DIR", help="or MINDSPEED_HOME")
    parser.add_argument("--mindspeed-llm", metavar="DIR", help="or MINDSPEED_LLM_HOME")
    parser.add_argument("--megatron", metavar="DIR", help="or MEGATRON_HOME")
    parser.add_argument(
        "--rehearse-scale",
        action="store_true",
        help="a small model and few processes, of the launch's kind; every change is printed",
    )
    parser.add_argument("--iterations", type=_positive, default=4)
    parser.add_argument("--processes", type=_positive, default=8, help="at most so many")
    parser.add_argument("--timeout", type=_positive, default=900, help="seconds per run")
    parser.add_argument(
        "--loss-tolerance",
        type=float,
        metavar="T",
        help="compare losses only, relative; 0: every bit of everything, the default without "
        "--commfuse-attention and --commfuse-ulysses (with them 1e-6, in 16 bits 2^-9)",
    )
    parser.add_argument("--only", choices=WAYS, help="one run, no comparison")
    parser.add_argument("--output", metavar="DIR", type=Path, help="keep records and logs there")
    parser.add_argument("launch", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Rehearse; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    own, launch = arguments, []
    if "--" in arguments:
        at = arguments.index("--")
        own, launch = arguments[:at], arguments[at + 1 :]
    parser = _parser()
    given = parser.parse_args(own)
    given.launch = launch or given.launch
    if not given.launch:
        parser.error("no launch given; put it after --")
    # So that a run is ended before this process is.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        return _rehearse(given)
    except (UsageError, CannStubsError) as error:
        print(f"rehearse: {error}", file=sys.stderr)
        return 2
    except RunFailedError as error:
        print(f"rehearse: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _rehearse(given: argparse.Namespace) -> int:
    stack = find_stack(given.mindspeed, given.mindspeed_llm, given.megatron)
    launch = read_launch(given.launch, stack.llm)
    for name in _SET_ANEW:
        launch.environment.pop(name, None)
    script = launch.script_path(stack.llm)
    # Relative paths in a launch begin where it is started: in MindSpeed-LLM's folder.
    folder = launch.folder if (launch.folder / launch.script).is_file() else stack.llm
    prepare(launch.options, given.iterations, folder)
    layout = _layout(launch, given)
    stubs = _cann()
    with tempfile.TemporaryDirectory(prefix="commfuse_rehearsal_") as temporary:
        replace_missing_instructions(launch.options, folder, Path(temporary))
        _print_preparations(stack, launch, layout)
        tools = Path(temporary) / "tools"
        run = Run(
            script=script,
            processes=layout.processes,
            folder=folder,
            environment=worker_environment(stack, stubs, launch.environment, tools),
            timeout=given.timeout,
        )
        records = Path(temporary) if given.output is None else _new_folder(given.output)
        return _train_and_compare(given, launch, run, records)


def _layout(launch: Launch, given: argparse.Namespace) -> Layout:
    layout = layout_of(launch.options, launch.processes)
    if given.rehearse_scale:
        small = scale_down(launch.options, layout, given.processes)
        if small != layout:
            launch.notes.append(f"layout: {layout} -> {small}")
        return small
    if layout.processes > given.processes:
        raise UsageError(
            f"the launch wants {layout.processes} processes, the limit is {given.processes}; scale "
            "it down with --rehearse-scale, or raise the limit with --processes"
        )
    return layout


def _cann() -> Path | None:
    """Stand-ins for CANN's libraries, unless the dynamic loader finds the real ones."""
    if importlib.util.find_spec("torch_npu") is None:
        raise UsageError(
            f"{sys.executable} has no torch_npu; start with bash scripts/rehearse_on_cpu.sh, which "
            "prepares an environment, or install torch_npu for its torch"
        )
    try:
        ctypes.CDLL("libascendcl.so")
    except OSError:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache / "commfuse-npu" / "cann_stubs"
        write_cann_stubs(folder)
        return folder
    return None


def _new_folder(folder: Path) -> Path:
    folder = folder.resolve()
    for way in WAYS:
        if (folder / way).exists():
            raise UsageError(f"--output {folder} holds an earlier rehearsal; name a new folder")
    return folder


def _print_preparations(stack: Stack, launch: Launch, layout: Layout) -> None:
    print("A rehearsal on CPU and gloo: nothing runs on an NPU, and times mean nothing.")
    for title, version in stack.versions().items():
        print(f"{title}: {version}")
    print(f"script: {launch.script}; {layout}")
    for note in launch.notes:
        print(f"note: {note}")
    if launch.environment:
        settings = (f"{name}={value}" for name, value in sorted(launch.environment.items()))
        print("environment of the launch:", *settings)
    print("changes to the launch:")
    for change in launch.options.changes:
        print(f"  {change}")
    sys.stdout.flush()


def _train_and_compare(given: argparse.Namespace, launch: Launch, run: Run, folder: Path) -> int:
    words = dict(
        zip(WAYS, (reference_run(launch.options), commfuse_run(launch.options)), strict=True)
    )
    runs: dict[str, list[Record]] = {}
    for way in WAYS if given.only is None else (given.only,):
        print(f"--- the {way} run, {run.processes} processes", flush=True)
        runs[way] = run_script(run, way, words[way], folder / way)
    _print_report(runs)
    problems = [
        f"{way} run: {problem}"
        for way, records in runs.items()
        for problem in degeneracies(records)
    ]
    fused = runs.get("commfuse", [])
    if fused and not fused_paths(fused) and not all(record.pairs for record in fused):
        problems.append("commfuse run: nothing was fused")
    for problem in problems:
        print(f"this rehearsal proves nothing: {problem}")
    if given.only is not None:
        return 1 if problems else 0
    equal = _equal(runs["reference"], runs["commfuse"], _tolerance(given, launch))
    return 1 if problems or not equal else 0


def _tolerance(given: argparse.Namespace, launch: Launch) -> float:
    """How far losses may lie apart, relative; 0 for the same bits of everything."""
    if given.loss_tolerance is not None:
        return float(given.loss_tolerance)
    if any(name in launch.options for name in _OTHER_ROUNDING):
        sixteen_bits = any(name in launch.options for name in ("--bf16", "--fp16"))
        return 2**-9 if sixteen_bits else 1e-6
    return 0.0


def _equal(reference: list[Record], commfuse: list[Record], tolerance: float) -> bool:
    found = differences(reference, commfuse)
    if tolerance and len(reference) == len(commfuse):
        largest = largest_loss_difference(reference, commfuse)
        equal = largest <= tolerance
        print(f"same bits everywhere: {not found}")
        print(f"losses equal within {tolerance:g} relative: {equal} ({largest:.3g})", flush=True)
        return equal
    for line in found:
        print(line)
    print(f"identical: {not found}", flush=True)
    return not found


def _print_report(runs: dict[str, list[Record]]) -> None:
    first = next(iter(runs.values()))[0]
    parts = [
        [", ".join(f"{name} {version}" for name, version in first.versions.items())],
        report.feature_lines(runs),
    ]
    if "commfuse" in runs:
        parts.append(report.layer_lines(runs["commfuse"]))
    parts += [report.collective_lines(runs), report.loss_lines(runs), report.hash_lines(runs)]
    for lines in parts:
        print("\n".join(lines), end="\n\n")


if __name__ == "__main__":
    sys.exit(main())
