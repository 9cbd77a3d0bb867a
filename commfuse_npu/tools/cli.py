"""``commfuse-npu``: what can be asked without writing code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

__all__ = ["main"]


class _Command(NamedTuple):
    module: str
    question: str


_COMMANDS = {
    "prepare": {
        "doctor": _Command("doctor.command", "is this machine, and this launch, ready?"),
        "plan": _Command("plan_command", "a layout and a schedule for a model and a cluster"),
        "simulate": _Command("simulate.command", "what would it bring on a described cluster?"),
    },
    "run": {
        "bench": _Command("bench.command", "how much communication is hidden here, against whom?"),
    },
    "explain": {
        "verify": _Command("verify_command", "prove all plans, or a recorded run (--log)"),
    },
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit code: 0 yes, 1 no, 2 a question that makes no sense.

    Each is a module with ``main(words)``, imported when it is asked for: what asks whether torch
    works must not import it.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    known = {name: command for group in _COMMANDS.values() for name, command in group.items()}
    if words and words[0] in known:
        module = import_module(f"commfuse_npu.tools.{known[words[0]].module}")
        return int(module.main(words[1:]))
    parser = argparse.ArgumentParser(
        prog="commfuse-npu",
        usage="commfuse-npu COMMAND [options]",
        description="Tensor-parallel collectives hidden behind the work they feed.",
        epilog=_listed(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=known, metavar="COMMAND", help="one of those below")
    parser.parse_args(words[:1])
    raise AssertionError("no command, and the parser took it")


def _listed() -> str:
    lines = []
    for group, commands in _COMMANDS.items():
        lines.append(f"{group}:")
        lines += [f"  {name:<10}{command.question}" for name, command in commands.items()]
    return "\n".join([*lines, "", "commfuse-npu COMMAND --help lists the options of each."])


if __name__ == "__main__":
    sys.exit(main())
