"""What the machine's description says for the NPU that a launch runs on."""

from __future__ import annotations

import torch

from commfuse_npu.runtime.transport import Transport
from commfuse_npu.tools.config_file import find_config
from commfuse_npu.tools.simulate.hardware import Hardware
from commfuse_npu.tools.simulate.machine import Machine

__all__ = ["described_machine"]

_DESCRIBED = {"Ascend910_93": "ascend_910c_supernode", "Ascend910B": "ascend_910b_server"}
"""Descriptions by how torch_npu's name of the device begins."""


def described_machine(transport: Transport) -> Machine | None:
    """The machine of a group's NPUs at typical figures; ``None`` if it is not described.

    A CPU is not.  It asks the device for its name: only when this process has chosen its own.
    """
    if transport.device_type == "cpu":
        return None
    name = str(torch.get_device_module(transport.device_type).get_device_name())
    for beginning, description in _DESCRIBED.items():
        if name.startswith(beginning):
            return Hardware.load(find_config(description, "hardware")).machine()
    return None
