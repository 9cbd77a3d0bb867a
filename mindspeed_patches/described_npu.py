"""Finds the hardware description of the NPU that this process runs on."""

from __future__ import annotations

import torch

from commfuse_npu.config_file import find_config
from commfuse_npu.hardware.description import Hardware, described
from commfuse_npu.hardware.machine import Machine

__all__ = ["described_machine"]


def described_machine(device_type: str) -> Machine | None:
    """The machine model of this NPU at its typical figures; ``None`` without a description.

    Reads the name of the current device, so call it after this process has selected its device.
    """
    name = str(torch.get_device_module(device_type).get_device_name())
    description = described(name)
    if description is None:
        return None
    return Hardware.load(find_config(description, "hardware")).machine()
