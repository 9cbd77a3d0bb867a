"""The machines that ``configs/hardware`` describes: which one an NPU belongs to, and what a launch
takes from it without reading the description."""

from __future__ import annotations

__all__ = ["described", "outputs_to_hide"]

_SERVER = "ascend_910b_server"
_SUPERNODE = "ascend_910c_supernode"
_OUTPUTS_TO_HIDE = {
    _SERVER: {2: 6934, 4: 3467, 8: 1734},
    _SUPERNODE: {2: 1124, 4: 1686, 8: 1967, 16: 2107},
}
"""What :func:`commfuse_npu.tools.hardware.machine.min_outputs_to_hide` computes at typical figures,
by size of the tensor-parallel group."""


def described(name: str) -> str | None:
    """The description in ``configs/hardware`` for the name of an NPU; ``None`` if there is none.

    ``910B2`` (npu-smi) or ``Ascend910B2`` (torch_npu) is that of a server.  A chip of an A3 is
    ``Ascend910`` in npu-smi, and ``Ascend910_9391`` and the like in torch_npu [read].
    """
    kind = name.removeprefix("Ascend")
    if kind.startswith("910B"):
        return _SERVER
    if name == "Ascend910" or kind.startswith("910_93"):
        return _SUPERNODE
    return None


def outputs_to_hide(machine: str, size: int) -> int | None:
    """The least outputs per rank with which a column-parallel backward's GEMMs hide its transfers.

    Args:
        machine: the name of a description.
        size: of the tensor-parallel group.

    Returns:
        ``None`` if nothing is known of such a group, as of one that spans nodes.
    """
    return _OUTPUTS_TO_HIDE[machine].get(size)
