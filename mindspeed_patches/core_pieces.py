"""Compares functions of the installed Megatron core with what is used of them.

A version whose functions have other arguments is left alone, with the name of the first difference,
and trains as it would by itself.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from commfuse_npu.launch.packages import MEGATRON, NEWEST_CORE


@dataclass(frozen=True)
class Piece:
    """A function or method of Megatron core.

    Attributes:
        path: its module, class and name.
        passed: the parameters that it is always called with, or wrapped with, separated by spaces.
        offered: those that it is called with in versions that have them.
        read: attributes that its code has to use, as they are changed around it.
    """

    path: str
    passed: str = ""
    offered: str = ""
    read: str = ""

    def difference(self) -> str | None:
        """What is missing, or is new and required; ``None`` if there is nothing.

        A function that somebody replaced is taken to have the arguments of the original.
        """
        try:
            function = pkgutil.resolve_name(self.path)
        except (ImportError, AttributeError):
            return f"{self.path} is missing"
        own = inspect.unwrap(function)
        if not self.path.startswith(f"{own.__module__}."):
            return None
        parameters = inspect.signature(function).parameters
        passed = self.passed.split()
        offered = self.offered.split()
        missing = [name for name in passed if name not in parameters]
        if missing:
            return f"{self.path} takes no {missing[0]}"
        variable = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
        new = [
            name
            for name, one in parameters.items()
            if one.default is Parameter.empty
            and one.kind not in variable
            and name not in (*passed, *offered)
        ]
        if new:
            return f"{self.path} requires {new[0]}, which is not known"
        for name in self.read.split():
            if name not in own.__code__.co_names:
                return f"{self.path} does not read {name}"
        return None


def first_difference(pieces: Iterable[Piece]) -> str | None:
    """The first difference of these pieces in the installed version, and a way out."""
    for piece in pieces:
        found = piece.difference()
        if found is not None:
            newest = ".".join(map(str, NEWEST_CORE))
            return f"{found} in this version of Megatron core; use {MEGATRON} to {newest}"
    return None


@functools.cache
def _names(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def supported_keywords(function: Callable[..., Any], **offered: Any) -> dict[str, Any]:
    """The subset of ``offered`` that the installed version of ``function`` accepts."""
    return {name: value for name, value in offered.items() if name in _names(function)}
