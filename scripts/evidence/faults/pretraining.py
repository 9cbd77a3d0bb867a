"""The CPU pretraining with an accident in one of its ranks.

Its options are those of :mod:`scripts.cpu_pretraining.launch`, whose ranks are started through this
module: the one that :class:`Accident` names wraps methods of its own before it trains.  The
accident is handed on in the environment.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from commfuse_npu.runtime.executor import Running
from scripts.evidence.faults.plant import user_code

__all__ = ["VARIABLE", "Accident", "main"]

VARIABLE = "COMMFUSE_FAULTS_ACCIDENT"


@dataclass(frozen=True)
class Accident:
    """What happens to which rank.

    Attributes:
        fault: ``killed`` or ``user error``.
        sends: before the last post of the first program of this name in the iteration; ``None``
            for the middle of writing a checkpoint.
        file: gets the time of the fault, on the monotonic clock.
    """

    fault: str
    rank: int
    iteration: int
    sends: str | None
    file: str

    def strike(self) -> None:
        Path(self.file).write_text(str(time.monotonic()), encoding="utf-8")
        if self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        user_code()


def main(argv: Sequence[str]) -> int:
    """Launch the ranks, or be one of them; returns the exit code."""
    if "LOCAL_RANK" in os.environ:
        from scripts.cpu_pretraining import __main__ as pretraining

        if VARIABLE in os.environ:
            _prepare(Accident(**json.loads(os.environ[VARIABLE])))
        return pretraining.main(argv)
    from torch.distributed.run import main as torchrun

    from scripts.cpu_pretraining import launch

    def through_this_module(arguments: list[str]) -> None:
        named = {"scripts.cpu_pretraining": "scripts.evidence.faults.pretraining"}
        torchrun([named.get(argument, argument) for argument in arguments])

    with mock.patch.object(launch, "torchrun", through_this_module):
        return launch.main(argv)


def environment(accident: Accident | None) -> dict[str, str]:
    """What the launcher's environment needs for it."""
    return {} if accident is None else {VARIABLE: json.dumps(asdict(accident))}


def _prepare(accident: Accident) -> None:
    if int(os.environ["RANK"]) != accident.rank:
        return
    import torch

    from scripts.cpu_pretraining import training

    begin, go_on, save = training._Loop._iteration, Running._go_on, torch.save
    at = 0

    def iteration(loop: Any, stop: Any) -> Any:
        nonlocal at
        at = loop.iteration + 1
        return begin(loop, stop)

    def running(program: Running, works: Any, end: int) -> None:
        if accident.sends == program.name and at == accident.iteration:
            # Its first transfers are posted, the last one never.
            go_on(program, works, min(end, program.program.last_post))
            accident.strike()
        go_on(program, works, end)

    def writing(state: Any, file: Any) -> None:
        if at == accident.iteration and accident.sends is None:
            file.write(b"half of a state")
            file.flush()
            accident.strike()
        save(state, file)

    # For the rest of the process.
    mock.patch.object(training._Loop, "_iteration", iteration).start()
    mock.patch.object(Running, "_go_on", running).start()
    mock.patch.object(torch, "save", writing).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
