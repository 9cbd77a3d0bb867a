"""What the machine's description says for the NPU that a launch runs on."""

from __future__ import annotations

import torch

from commfuse_npu.config_file import find_config
from commfuse_npu.hardware.description import Hardware, described
from commfuse_npu.hardware.machine import Machine
from commfuse_npu.runtime.transport import Transport

__all__ = ["described_machine"]


def described_machine(transport: Transport) -> Machine | None:
    """The machine of a group's NPUs at typical figures; ``None`` if it is not described.

    A CPU is not.  It asks the device for its name: only when this process has chosen its own.
    """
    if transport.device_type == "cpu":
        return None
    name = str(torch.get_device_module(transport.device_type).get_device_name())
    description = described(name)
    if description is None:
        return None
    return Hardware.load(find_config(description, "hardware")).machine()
