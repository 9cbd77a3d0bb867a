"""What a rule is: a function that compiles the program of a rank, once per arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from inspect import signature
from typing import Any, Protocol

from commfuse_npu.plan.builder import Builder
from commfuse_npu.plan.program import Program
from commfuse_npu.plan.schedule import Place

__all__ = ["IN_FLIGHT", "RULES", "Rule", "rule"]


class Rule(Protocol):
    """What compiles the program of a place, once per arguments."""

    def __call__(self, place: Place, *arguments: Any) -> Program: ...

    def cache_clear(self) -> None: ...


RULES: dict[str, Rule] = {}
"""By name, for who has the name and the arguments of a rule (a recorded run)."""

_MOST_COMPILED = 4096
IN_FLIGHT = 2
"""Chunks, or stacks of pieces, that have memory on their way to other ranks."""


def rule(make: Callable[..., Builder]) -> Rule:
    """Compile once per arguments."""
    names = tuple(signature(make).parameters)[1:]

    @lru_cache(maxsize=_MOST_COMPILED)
    @wraps(make)
    def compiled(place: Place, *args: object) -> Program:
        about = make.__name__, place.schedule, *args
        return make(place, *args).build(about, names)

    RULES[make.__name__] = compiled
    return compiled
