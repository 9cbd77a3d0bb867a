"""What an emulated HCCL raises.  The real one hangs, or computes wrong numbers."""

from __future__ import annotations

from tests.emulator.messages import Why


class EmulatedError(RuntimeError):
    """As torch's own errors of a backend: a RuntimeError."""


class DeadlockError(EmulatedError):
    """Nothing that could still happen lets this rank go on."""


class RuleError(EmulatedError):
    """The call breaks a rule of HCCL's, or the ranks do not call the same."""


class LostError(EmulatedError):
    """The rank that has the data, or the referee, is gone."""


class OverdueError(EmulatedError):
    """A wait took longer than its time limit, and nobody can tell why."""


BY_KIND: dict[Why, type[EmulatedError]] = {
    "deadlock": DeadlockError,
    "mismatch": RuleError,
    "lost": LostError,
    "timeout": OverdueError,
}
