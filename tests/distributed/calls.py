"""Watching the order of calls while something runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

__all__ = ["watch_calls"]


def watch_calls(
    patch: pytest.MonkeyPatch,
    calls: Iterable[tuple[Any, str, str]],
    note: Callable[[str, Any], None],
) -> None:
    """Before each call of ``owner.name`` call ``note(word, first argument)``.

    Args:
        calls: ``(owner, name, word)``.
    """
    for owner, name, word in calls:
        original = getattr(owner, name)

        def watched(*args: Any, original: Any = original, word: str = word) -> Any:
            note(word, args[0])
            return original(*args)

        patch.setattr(owner, name, watched)
