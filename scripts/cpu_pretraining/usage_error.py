"""Errors that the person who typed the command can fix, reported once and without a traceback."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import NoReturn

__all__ = ["UsageError", "exit_with_usage_error", "is_first_process", "say_error"]

# Time the other processes leave to the first one. torchrun stops everybody as soon as one process
# fails; if another rank were faster than rank 0, rank 0 would be stopped before it had printed.
GRACE_SECONDS = 8.0
USAGE_EXIT_CODE = 2


class UsageError(ValueError):
    """The request cannot be carried out; the message names the value, the limit and the way out."""


def is_first_process() -> bool:
    """Whether this process is rank 0, judged by the launcher's variable: before process groups."""
    return os.environ.get("RANK", "0") == "0"


def say_error(error: Exception) -> None:
    """Print `error`, and leave it where torchrun looks: the launcher repeats it as its last line.

    torchrun itself says much after it. The file is of the form that its own `record` writes.
    """
    print(f"cpu_pretraining: error: {error}", file=sys.stderr, flush=True)
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        where = {"py_callstack": str(error), "timestamp": str(int(time.time()))}
        try:
            with open(file, "w", encoding="utf-8") as made:
                json.dump({"message": {"message": str(error), "extraInfo": where}}, made)
        except OSError as problem:
            print(f"cpu_pretraining: {file}: {problem.strerror}", file=sys.stderr, flush=True)


def exit_with_usage_error(error: UsageError) -> NoReturn:
    """Print `error` on rank 0 and leave with exit code 2, on every rank, without a traceback."""
    if is_first_process():
        say_error(error)
    else:
        time.sleep(GRACE_SECONDS)
    sys.exit(USAGE_EXIT_CODE)
