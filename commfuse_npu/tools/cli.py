"""``commfuse-npu``: the command line of this project."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

from commfuse_npu import __version__
from commfuse_npu.launch.did_you_mean import did_you_mean
from commfuse_npu.removed import removed

_COMMANDS = {
    "doctor": ("doctor.doctor_command", "is this machine ready?"),
    "plan": ("plan.plan_command", "would it help a launch or a model? which flags?"),
    "simulate": ("simulate.simulate_command", "what would it bring on a described cluster?"),
    "measure": (
        "measure.measure_command",
        "what the simulator assumes of a machine, measured on it",
    ),
    "verify": ("verify_command", "prove all programs, or a recorded run (--log)"),
}
"""Subcommands: module, and the question that it answers."""

_PACKAGES = {
    "torch": "install the torch of your torch_npu, or pip install 'commfuse-npu[cpu]'",
    "torch_npu": "commfuse-npu doctor says which one; or measure another machine: --device cpu",
    "yaml": "pip install pyyaml",
}
"""Packages that a command may need, and how to install them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit code: 0 yes, 1 no, 2 an invalid request.

    Ctrl-C ends each with 130.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        # As after Ctrl-C: processes are ended and temporary folders removed.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        if words and words[0] != "measure":
            # As in other programs: `simulate | head` ends silently when the reader has gone.
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        # Imported here, where Ctrl-C is handled.
        from commfuse_npu.tools.terminal import rendered

        with rendered():
            code = _answer(words)
            if sys.stdout is not None:
                sys.stdout.flush()
            return code
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        # An error of standard output; for other files each command reports it itself.
        if not isinstance(error, BrokenPipeError):
            from commfuse_npu.tools.option_types import refuse

            refuse(" ".join(words[:1]), error)
        with suppress(OSError, ValueError):
            # Prevent another error when the interpreter flushes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2


def _answer(words: list[str]) -> int:
    """Run one command: a module with ``main(words)``, imported only when it is needed.

    The doctor checks whether torch works, so nothing may import torch before it.
    """
    from commfuse_npu.tools.option_types import Parser

    lines = [f"  {name:<10}{question}" for name, (_, question) in _COMMANDS.items()]
    parser = Parser(
        prog="commfuse-npu",
        usage="commfuse-npu COMMAND [options]",
        description="Overlaps the communication of a training with its computation. "
        "Begin with: commfuse-npu plan my_pretrain.sh",
        epilog="\n".join([*lines, "", "commfuse-npu COMMAND --help lists the options of each."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"commfuse-npu {__version__}")
    parser.add_argument("command", metavar="COMMAND", help="one of those below")
    called = " ".join([parser.prog, *words[:1]])
    for name in (called, *(f"{called} {word.partition('=')[0]}" for word in words[1:])):
        if why := removed(name):
            parser.error(why)
    first = words[0] if words else "--help"
    if not first.startswith("-") and first not in _COMMANDS:
        near = did_you_mean(first, _COMMANDS)
        near = f"; did you mean {parser.prog} plan {first}?" if os.path.exists(first) else near
        parser.error(f"{first!r} is none of {', '.join(_COMMANDS)}{near}")
    command = parser.parse_args([first]).command
    try:
        return int(import_module(f"commfuse_npu.tools.{_COMMANDS[command][0]}").main(words[1:]))
    except ModuleNotFoundError as error:
        if error.name not in _PACKAGES:
            raise
        said = f"{error.name} is not installed; {_PACKAGES[error.name]}"
        print(f"commfuse-npu {command}: {said}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
