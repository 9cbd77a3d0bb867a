"""All time limits of the tests.

A limit that is exceeded means that something hangs; no limit requires a fast machine.
"""

from datetime import timedelta

LIMIT = 240.0
"""Seconds for a test that has to end by itself, on a machine many times slower than an idle one."""

PATIENT = timedelta(seconds=200)
"""Timeout of transports and process groups in which all ranks take part."""

BRIEF = timedelta(seconds=1)
"""Timeout of an operation that a rank skips on purpose; set right before the operation."""
