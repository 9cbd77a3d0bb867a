"""What was measured, as a description that the simulator takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from commfuse_npu.tools.config_file import find_config
from commfuse_npu.tools.measure.description import description
from commfuse_npu.tools.simulate.hardware import Hardware

BASE = "ascend_910b_server"
HOST = {"host": [{"what": "batch", "seconds": [2e-5]}]}


def described(folder: Path, facts: dict[str, Any]) -> Hardware:
    path = folder / "measured.yaml"
    path.write_text(description(BASE, "here", HOST, facts, "Measured here"), "utf-8")
    return Hardware.load(path)


def test_cores_that_the_device_names_make_its_peak(tmp_path: Path) -> None:
    peak = Hardware.load(find_config(BASE, "hardware")).typical("npu.cube_flops")
    # A 910B2, of which the description says 354 TFLOPS.
    found = described(tmp_path, {"cube cores": 24})
    assert found.machine().cores == 24
    assert found.typical("npu.cube_flops") == pytest.approx(peak * 24 / 20)
    assert found.figures["npu.cores"].source == "Measured here"


@pytest.mark.parametrize("facts", [{}, {"cube cores": None, "device bytes": None}])
def test_what_the_device_does_not_say_stays(tmp_path: Path, facts: dict[str, Any]) -> None:
    base = Hardware.load(find_config(BASE, "hardware")).figures
    found = described(tmp_path, facts).figures
    assert {name for name in base if found[name] != base[name]} == {
        *("host.launch_overhead", "host.post_overhead"),
    }
