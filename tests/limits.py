"""How long things may take: here and nowhere else.

A limit that is met means that something hangs; none of them says how fast a machine has to be.
"""

from __future__ import annotations

from datetime import timedelta

LIMIT = 240.0
"""Seconds for what has to end by itself, on a machine many times slower than a quiet one."""

PATIENT = timedelta(seconds=200)
"""Of transports and process groups in whose operations everybody takes part."""

BRIEF = timedelta(seconds=1)
"""Of an operation that cannot end, because a rank stays away on purpose; set just before it."""
