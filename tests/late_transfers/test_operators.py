"""Runs gloo tests with late transfers; single ops are covered by the random cases."""

from __future__ import annotations

from tests.distributed.test_buckets import (  # noqa: F401
    test_a_bucket_is_posted_after_earlier_ones,
    test_a_start_needs_nobody_else,
)
