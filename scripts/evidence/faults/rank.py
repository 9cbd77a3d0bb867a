"""What one rank does in a scenario: run the operation, meet the fault, say what it saw.

It writes lines of JSON to a file of its own, which outlives it however it ends.  An error is
written down and then raised on: the process has to end by itself, with its traceback.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.ops import LinearOptions
from commfuse_npu.plan import Schedule
from commfuse_npu.runtime.transport import Transport
from scripts.evidence.faults.mismatches import MISMATCHES
from scripts.evidence.faults.operations import OPERATIONS, Operation
from scripts.evidence.faults.plant import Plant, connections
from scripts.evidence.faults.scenario import Phase, Scenario

__all__ = ["Diary", "run"]

_RUNS = 3  # after the first; who got all it needed meets the fault in the next


class Diary:
    """Where a rank writes, in a folder; others read it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"rank-{rank}.jsonl"
        self._descriptor: int | None = None

    def open(self) -> Diary:
        """Needed to write.  Not later: a fault may be that nothing can be opened any more."""
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return self

    def write(self, **entry: Any) -> None:
        assert self._descriptor is not None
        os.write(self._descriptor, json.dumps(entry).encode() + b"\n")

    def read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]


def run(scenario: Scenario, rank: int, folder: Path) -> None:
    """Be ``rank`` of the scenario; raises what the operation raises."""
    diary = Diary(folder, rank).open()
    try:
        _play(scenario, rank, folder, diary)
    except BaseException as error:
        diary.write(
            what="error",
            at=time.monotonic(),
            kinds=[kind.__name__ for kind in type(error).__mro__],
            message=str(error),
        )
        if scenario.stay:
            _wait_for_the_others(scenario, folder)
        raise


def _play(scenario: Scenario, rank: int, folder: Path, diary: Diary) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=scenario.ranks,
        timeout=timedelta(seconds=30),
    )
    plant = None
    if rank == scenario.faulty and scenario.fault != "mismatch":
        plant = Plant(scenario, diary.write, folder)
        plant.enter("making lanes", armed=True)
    timeout = timedelta(seconds=scenario.timeout)
    transport = Transport.create(lanes=scenario.lanes, timeout=timeout)
    if scenario.fault == "mismatch":
        diary.write(what="calls", at=time.monotonic())
        MISMATCHES[scenario.operation](rank == scenario.faulty, transport)
        return
    schedule = Schedule(lanes=scenario.lanes, chunks=scenario.chunks)
    options = LinearOptions(schedule)
    operation = OPERATIONS[scenario.operation](transport, options)
    plain = operation.plain()
    ends = json.dumps(connections())
    (folder / f"connections-{rank}.json").write_text(ends, encoding="utf-8")
    dist.barrier()  # the other ranks' connections are there, and the fault comes after the rest
    if plant:
        plant.enter("first use", armed=True)
    right = True
    for number in range(1 + _RUNS):
        _run_once(operation, plant, armed=number == 1, transport=transport)
        made = operation.results()
        right = right and len(made) == len(plain) and all(map(torch.equal, made, plain))
    diary.write(what="finished", at=time.monotonic(), right=right)
    # Only on the way out without an error: nobody waits for a rank that failed.
    dist.barrier()
    dist.destroy_process_group()


def _run_once(
    operation: Operation, plant: Plant | None, *, armed: bool, transport: Transport
) -> None:
    def enter(phase: Phase) -> None:
        if plant is not None:
            plant.enter(phase, armed=armed, transport=transport)

    enter("forward")
    operation.forward()
    enter("between")
    enter("backward")
    operation.backward()


def _wait_for_the_others(scenario: Scenario, folder: Path) -> None:
    """Stay until every rank that can has said something; a rank that was killed cannot."""
    others = [Diary(folder, rank) for rank in range(scenario.ranks)]
    if scenario.fault == "killed":
        del others[scenario.faulty]
    end = time.monotonic() + 3 * scenario.timeout
    while time.monotonic() < end:
        if all(any(e["what"] in ("error", "finished") for e in d.read()) for d in others):
            return
        time.sleep(0.02)
