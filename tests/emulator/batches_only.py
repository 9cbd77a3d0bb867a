"""Transports of the product post batches, whatever they are asked for, as they have to on HCCL.

So tests that were written for gloo, where single operations are the default, can run unchanged.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from commfuse_npu.runtime.transport import Transport


def install() -> None:
    """For the rest of this process.  Transports that were made before stay as they are."""
    create = Transport.create.__func__  # type: ignore[attr-defined]

    @wraps(create)
    def batched(cls: type[Transport], *args: Any, **options: Any) -> Transport:
        return create(cls, *args, **{**options, "batched": True})

    Transport.create = classmethod(batched)  # type: ignore[assignment, method-assign]
