"""Rehearse a launch of MindSpeed on this machine's CPU, with and without CommFuse.

::

    bash scripts/rehearse_on_cpu.sh [OPTIONS] -- my_pretrain.sh
    bash scripts/rehearse_on_cpu.sh [OPTIONS] -- torchrun ... pretrain_gpt.py ARGS
    bash scripts/rehearse_on_cpu.sh [OPTIONS] -- pretrain_gpt.py ARGS

The real MindSpeed-LLM, MindSpeed, Megatron-LM and torch_npu run, on stand-ins for the device, for
CANN and for HCCL (gloo).  The report has what does not depend on the device: which layers are
fused, how many collectives each group runs, and whether losses and weights are equal bit for bit.
**Nothing here runs on an NPU, and no time is meaningful.**

CommFuse computes attention block by block, which rounds differently from the launch's own; with
``--commfuse-attention`` or ``--commfuse-ulysses`` the losses are compared within a relative
tolerance, 1e-6, in 16 bits 2^-9.

The script prepares an environment with torch_npu and the stand-ins, in which it starts this module;
``MINDSPEED_HOME``, ``MINDSPEED_LLM_HOME`` and ``MEGATRON_HOME`` name the checkouts.  Without
MindSpeed-LLM, Megatron-LM's own ``pretrain_gpt.py`` runs, after an import of MindSpeed's adaptor.
Exit code: 0 identical, 1 not (or a run failed, or is inconclusive), 2 invalid request.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from commfuse_npu.launch.options import whole
from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.launch_script.command_line import Launch
from commfuse_npu.tools.launch_script.option_words import Options
from commfuse_npu.tools.launch_script.read_launch import read_launch
from commfuse_npu.tools.launch_script.short_run import (
    PEERS,
    commfuse_names,
    replace_missing_data,
    shorten,
)
from commfuse_npu.tools.option_types import Parser
from mindspeed_patches.rehearsal.instruction_files import (
    INSTRUCTIONS,
    PAIRS,
    replace_missing_instructions,
)
from mindspeed_patches.rehearsal.records import (
    Record,
    degeneracies,
    differences,
    largest_loss_difference,
    report_lines,
)
from mindspeed_patches.rehearsal.run import (
    RunFailedError,
    find_stack,
    train,
    worker_environment,
)
from mindspeed_patches.rehearsal.scale import RehearsedLayout, layout_of, scale_down

WAYS = "reference", "commfuse"

OVERLAP = "--commfuse-overlap"
"""It does not require ``--use-commfuse``, and works with options that exclude that."""
_SWAP = ("--swap-attention", "--swap-modules")
_MEMORY = ("--swap-optimizer", "--swap-optimizer-times", "--reuse-fp32-param")
_PERMUTE = ("--moe-permute-fusion", "--use-fused-moe-token-permute-and-unpermute")
_SET_ANEW = (
    *("PYTHONPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS"),
    *("GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),
)
"""Variables that a launch sets for its machine, and that a rehearsal sets for this one."""
_OTHER_ROUNDING = ("--commfuse-attention", "--commfuse-ulysses")


def prepare(options: Options, iterations: int, folder: Path) -> None:
    """Change ``options`` for a rehearsal; ``folder`` is the base of the launch's paths."""
    shorten(options, iterations)
    # In forward-backward overlap, keep options that change what a forward saves for its backward.
    memory = _MEMORY if OVERLAP in options else (*_MEMORY, *_SWAP)
    options.drop(*memory, why="there is no device memory to save")
    options.drop(*_PERMUTE, why="its kernels are not emulated; Megatron's own code takes its place")
    if "--use-commfuse" not in options and OVERLAP not in options:
        # If a launch asks for both, the rehearsal shows how CommFuse refuses them.
        options.drop(*PEERS, why="CommFuse takes its place")
    # Megatron's own default is 0.1.
    if options.text("--attention-dropout") not in ("0", "0.0"):
        options.set("--attention-dropout", "0.0", why="attention on CPU has no dropout")
    # CPython 3.11 may hang in the child of a fork while a thread of gloo enters the interpreter.
    options.set("--num-workers", 0, why="a forked loader may hang beside gloo's threads")
    if INSTRUCTIONS not in options and PAIRS not in options:
        replace_missing_data(options, folder)


def arguments_of(way: str, options: Options) -> list[str]:
    """The script's arguments in the run without CommFuse, ``reference``, or with it."""
    result = options.copy()
    result.drop("--no-use-commfuse")
    if way == "reference":
        result.drop("--use-commfuse", *commfuse_names(options))
    elif OVERLAP not in result:
        result.set("--use-commfuse")
    return result.words


def _parser() -> Parser:
    parser = Parser(
        prog="rehearse_on_cpu.sh",
        usage="%(prog)s [OPTIONS] -- LAUNCH...",
        description="Rehearse a launch of MindSpeed-LLM on CPU, with and without CommFuse.",
        epilog="LAUNCH: pretrain_gpt.py ARGS, torchrun ... pretrain_gpt.py ARGS, or a .sh script",
    )
    parser.add_argument(
        "--rehearse-scale",
        action="store_true",
        help="a small model and few processes, of the launch's kind; every change is printed",
    )
    parser.add_argument("--iterations", type=whole(), default=4)
    parser.add_argument("--processes", type=whole(), default=8, help="at most so many")
    parser.add_argument("--timeout", type=whole(), default=900, help="seconds per run")
    parser.add_argument("--output", metavar="DIR", type=Path, help="keep records and logs there")
    parser.add_argument("launch", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.launch[:1] == ["--"]:  # which argparse keeps
        del options.launch[0]
    if not options.launch:
        parser.error("no launch given; put it after --")
    # Raise SystemExit, so that the training is ended before this process.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        return _rehearse(options)
    except (UsageError, RunFailedError) as error:
        print(f"rehearse: {error}", file=sys.stderr)
        return 1 if isinstance(error, RunFailedError) else 2
    except KeyboardInterrupt:
        return 130


def _rehearse(arguments: argparse.Namespace) -> int:
    stack = find_stack()
    home = next((root for root in stack if (root / "pretrain_gpt.py").is_file()), stack[0])
    launch = read_launch(arguments.launch, home)
    for name in _SET_ANEW:
        launch.environment.pop(name, None)
    folder, script = launch.located(home)
    prepare(launch.options, arguments.iterations, folder)
    layout = _layout(launch, arguments)
    with tempfile.TemporaryDirectory(prefix="commfuse_rehearsal_") as name:
        temporary = Path(name)
        replace_missing_instructions(launch.options, folder, temporary)
        print("A rehearsal on CPU and gloo: nothing runs on an NPU, and times mean nothing.")
        print("checkouts:", *stack)
        print(f"script: {launch.script}; {layout}")
        for note in launch.notes:
            print(f"note: {note}")
        print("changes to the launch:", *launch.options.changes, sep="\n  ", flush=True)
        records = (arguments.output or temporary).resolve()
        if any((records / way).exists() for way in WAYS):
            raise UsageError(f"--output {records} holds an earlier rehearsal; name a new folder")
        environment = worker_environment(stack, launch.environment, temporary / "tools")
        runs: dict[str, list[Record]] = {}
        for way in WAYS:
            print(f"--- the {way} run", flush=True)
            runs[way] = train(
                way,
                [str(script), *arguments_of(way, launch.options)],
                records / way,
                processes=layout.processes,
                folder=folder,
                environment=environment,
                timeout=arguments.timeout,
            )
        return report(launch.options, runs)


def _layout(launch: Launch, arguments: argparse.Namespace) -> RehearsedLayout:
    layout = layout_of(launch.options, launch.processes)
    if arguments.rehearse_scale:
        small = scale_down(launch.options, layout, arguments.processes)
        launch.notes += [f"layout: {layout} -> {small}"] if small != layout else []
        return small
    if layout.processes > arguments.processes:
        raise UsageError(
            f"the launch wants {layout.processes} processes, the limit is {arguments.processes}; "
            "scale it down with --rehearse-scale, or raise the limit with --processes"
        )
    return layout


def report(options: Options, runs: Mapping[str, Sequence[Record]]) -> int:
    """Print the report and the verdict on both runs; returns the exit code."""
    print(*report_lines(runs), sep="\n")
    reference = runs["reference"]
    fused = runs["commfuse"]
    problems = degeneracies(fused)
    if not any(r.fused for r in fused) and not all(r.overlapped for r in fused):
        problems.append("nothing was fused")
    for problem in problems:
        print(f"inconclusive: commfuse run: {problem}")
    lines = differences(reference, fused)
    equal = not lines
    if any(name in options for name in _OTHER_ROUNDING):
        print(f"same bits everywhere: {equal}")
        tolerance = 2**-9 if "--bf16" in options or "--fp16" in options else 1e-6
        largest = largest_loss_difference(reference, fused)
        equal = largest <= tolerance
        print(f"losses equal within {tolerance:g} relative: {equal} ({largest:.3g})", flush=True)
    else:
        print(*lines, f"identical: {equal}", sep="\n", flush=True)
    return 0 if equal and not problems else 1


if __name__ == "__main__":
    sys.exit(main())
