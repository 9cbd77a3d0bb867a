"""Which description of a machine is that of an NPU, by its name."""

from __future__ import annotations

__all__ = ["described"]


def described(name: str) -> str | None:
    """In ``configs/hardware``: for ``910B2`` (npu-smi) or ``Ascend910B2`` (torch_npu) a server.

    ``Ascend910`` is what npu-smi calls a chip of an A3, ``Ascend910_9391`` and the like what
    torch_npu does [read].  ``None``: nobody has described it.
    """
    kind = name.removeprefix("Ascend")
    if kind.startswith("910B"):
        return "ascend_910b_server"
    if name == "Ascend910" or kind.startswith("910_93"):
        return "ascend_910c_supernode"
    return None
