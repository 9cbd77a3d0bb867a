"""Runs gloo tests with late transfers; single ops are covered by the random cases."""

from __future__ import annotations

from tests.distributed import test_bucket_order

for _name, _test in vars(test_bucket_order).items():
    if _name.startswith("test_") and callable(_test):
        globals()[_name] = _test
