"""What was found out, on disk: a JSON file per question.

A file is used only if it says of itself that it answers this question - on this machine, with these
versions - with one of the alternatives that there are.  Anything else is reported once and passed
over, and the next answer is written over it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from commfuse_npu.plan import Schedule
from commfuse_npu.runtime.whole_file import write_json

__all__ = ["default_folder", "read", "write"]

_logger = logging.getLogger(__name__)
_FORMAT = 1


def default_folder() -> Path:
    """``commfuse_npu`` in the user's cache folder (``XDG_CACHE_HOME``, by default ``~/.cache``)."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "commfuse_npu"


def read(
    folder: Path, question: Mapping[str, Any], alternatives: Sequence[Schedule | None]
) -> int | None:
    """Which of the alternatives is remembered as the answer; ``None`` if none is."""
    path = _path(folder, question)
    try:
        return _answer(json.loads(path.read_text(encoding="utf-8")), question, alternatives)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:  # broken UTF-8 or JSON: ValueErrors
        _logger.warning("%s is passed over: %s. It is measured again", path, error)
        return None


def _answer(
    found: Any, question: Mapping[str, Any], alternatives: Sequence[Schedule | None]
) -> int:
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise ValueError(f"it is not of format {_FORMAT}")
    if found.get("question") != _as_json(question):
        raise ValueError("it is about another machine, other versions or another shape")
    for number, alternative in enumerate(alternatives):
        if "answer" in found and _as_json(_described(alternative)) == found["answer"]:
            return number
    raise ValueError(f"its answer {found.get('answer')} is none of the {len(alternatives)} choices")


def write(
    folder: Path, question: Mapping[str, Any], answer: Schedule | None, seconds: Mapping[str, float]
) -> None:
    """Remember an answer; a folder that cannot be written to is reported, not an error.

    Args:
        seconds: median times of what was compared, for people who look.
    """
    path = _path(folder, question)
    content = {
        "format": _FORMAT,
        "question": dict(question),
        "answer": _described(answer),
        "seconds": dict(seconds),
    }
    try:
        write_json(path, content, indent=1)
    except OSError as error:
        _logger.warning("the chosen schedule is not remembered in %s: %s", path, error)


def _path(folder: Path, question: Mapping[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:24]
    return folder / f"schedule-{name}.json"


def _described(schedule: Schedule | None) -> dict[str, Any] | None:
    return None if schedule is None else asdict(schedule)


def _as_json(value: Any) -> Any:
    """What a value is after writing and reading it."""
    return json.loads(json.dumps(value))
