"""Reads what a launch script starts: its bash runs it, sealed, among stand-ins for programs."""

import os
import signal
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fcntl import F_DUPFD_CLOEXEC, fcntl
from io import FileIO
from pathlib import Path
from select import select

from commfuse_npu.tools.launch_script.command_line import starts_training
from commfuse_npu.tools.launch_script.sealed import filter_here, start_sealed
from commfuse_npu.tools.launch_script.stand_ins import (
    RUNAWAY,
    Answer,
    StartedCommand,
    read_record,
    write_stand_ins,
)

_SECONDS = 30.0
"""The longest reading."""
_QUIET_SECONDS = 2.0
"""Seconds without a record after a training, in which another one may begin."""
_REPEATS = 40
_RECORDS = 500
"""Numbers of the same and of all commands after which a script is taken to wait for something."""
_REPORT = 731
"""The least number of the descriptor for records: scripts use small ones, and 200 for locks."""
_KEPT = 1 << 16
"""Bytes of the script's output that are kept, the last ones."""
_LARGEST_RECORD = 1 << 20


@dataclass
class Reading:
    """What a script started.

    Attributes:
        records: the commands that were recorded, in order.
        printed: the end of what the script printed.
        code: its exit code; negative if it was ended.
        ended: why it was ended before it was through; empty if it was not.
    """

    records: list[StartedCommand] = field(default_factory=list)
    printed: bytes = b""
    code: int = 0
    ended: str = ""

    @property
    def trainings(self) -> list[StartedCommand]:
        return [record for record in self.records if starts_training(record.words)]


def read_script(
    script: Sequence[str],
    folder: Path,
    environ: Mapping[str, str],
    answer: Answer,
    first_only: bool = False,
) -> Reading:
    """Run a shell script, sealed, in a folder, and record what it starts.

    It is ended if it waits for something, or starts the same training again.

    Args:
        script: path and arguments.
        environ: its environment, except for the search path.
        answer: that of commands that are not run.
        first_only: end it after the first training.

    Raises:
        UsageError: there is no bash, or no filter of system calls.
    """
    steps = filter_here()
    reading = Reading()
    output_end, script_end = os.pipe()
    reports, low = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with (
        open(output_end, "rb", buffering=0) as output,
        reports,
        tempfile.TemporaryDirectory(prefix="commfuse_reading_") as name,
    ):
        with (
            open(script_end, "wb"),
            low,
            socket.socket(fileno=fcntl(low, F_DUPFD_CLOEXEC, _REPORT)) as high,
        ):
            own = os.fstat(script_end).st_ino
            variables = write_stand_ins(Path(name), answer, own, high.fileno())
            process = start_sealed(
                ["bash", *script],
                steps,
                folder=folder,
                environment={**environ, **variables},
                output=script_end,
                keep=high.fileno(),
            )
        try:
            reading.ended = _follow(reading, output, reports, Path(name) / "bin", first_only)
        finally:
            # Its exit code, if it has one, is set before its end of the reports is closed.
            os.killpg(process.pid, signal.SIGKILL)
            reading.code = process.wait()
            reading.printed += output.read()  # until all of the group have gone
    return reading


def _follow(
    reading: Reading,
    output: FileIO,
    reports: socket.socket,
    programs: Path,
    first_only: bool,
) -> str:
    """Collect what arrives until the script ends; returns why it has to be ended, if so."""
    sources: list[FileIO | socket.socket] = [output, reports]
    last = end = time.monotonic() + _SECONDS
    while (seconds := end - time.monotonic()) > 0:
        ready, *_ = select(sources, [], [], seconds)
        if output in ready:
            piece = os.read(output.fileno(), _KEPT)
            reading.printed = (reading.printed + piece)[-_KEPT:]
            if not piece:
                sources.remove(output)
        if reports in ready:
            message = reports.recv(_LARGEST_RECORD)
            if not message:
                return ""
            try:
                record = read_record(message, programs)
            except ValueError:  # the script itself wrote to this descriptor
                continue
            repeats = sum(record.words == known.words for known in reading.records)
            reading.records.append(record)
            count = len(reading.records)
            if record.words[0] == RUNAWAY or repeats > _REPEATS or count > _RECORDS:
                return f"waits in {record.line} (`{record}`)"
            if starts_training(record.words) and (first_only or repeats):
                return ""
            if reading.trainings:
                end = min(last, time.monotonic() + _QUIET_SECONDS)
    return f"did not end within {_SECONDS:g} s"
