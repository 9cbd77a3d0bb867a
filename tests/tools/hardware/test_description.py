"""Machine descriptions: shipped files can be read, invalid fields are refused by name."""

import re
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import yaml

from commfuse_npu.plan.machines import described, outputs_to_hide
from commfuse_npu.tools.config_file import ConfigError, find_config
from commfuse_npu.tools.hardware.description import Hardware
from commfuse_npu.tools.hardware.machine import min_outputs_to_hide

CONFIGS = Path(__file__).parents[3] / "configs" / "hardware"
SHIPPED = sorted(CONFIGS.glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_descriptions_can_be_read(path: Path) -> None:
    hardware = Hardware.load(path)
    assert find_config(path.stem, "hardware") == path
    worst = hardware.machine("unfavorable", "unfavorable")
    best = hardware.machine("favorable", "favorable")
    assert worst.inside.latency >= best.inside.latency
    assert worst.inside.rate <= best.inside.rate
    assert worst.gemm(1024, 4096, 4096) > best.gemm(1024, 4096, 4096)
    assert worst.post_overhead >= best.post_overhead >= best.launch_overhead
    assert hardware.posting(4e-5).machine("unfavorable", "favorable").post_overhead == 4e-5
    slow = hardware.launching(9e-5).machine("favorable", "favorable")
    assert slow.launch_overhead == 9e-5
    # The cost of a post beyond a launch stays.
    assert slow.post_overhead - 9e-5 == pytest.approx(best.post_overhead - best.launch_overhead)
    # Links do not change the time of work.
    other = hardware.machine("favorable", "unfavorable")
    assert other.gemm(1024, 4096, 4096) == best.gemm(1024, 4096, 4096)
    assert other.inside == worst.inside


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("npu.cube_flops.low", 0, "npu.cube_flops: {"),
        ("npu.gemm_efficiency.high", 1.5, "rising numbers in share above 0 and at most 1, and the"),
        ("inside.latency.low", -1e-6, "rising numbers in seconds 0 or more and at most 1, and"),
        ("inside.rate.high", float("nan"), "inside.rate: {"),
        ("inside.rate.high", float("inf"), "inside.rate: {"),
        ("inside.topology", "torus", "inside.topology: 'torus' is unknown; choose one of full_me"),
        ("between.topology", "switched", "between.topology: 'switched' is unknown; choose one of"),
        ("inside.rate.low", 9e10, "is not a mapping of low, typical and high, rising numbers in b"),
        ("npu.hbm_bandwidth.low", "1e12", "yaml reads 1e9 as text; write 1.0e+9"),
        ("npu.hbm_bandwidth.low", True, "npu.hbm_bandwidth: {"),
        ("npu.hbm_bandwidth", 1.0, "npu.hbm_bandwidth: 1.0 is not a mapping of low, typical and"),
        ("npu.hbm_bandwidth.high", ..., "npu.hbm_bandwidth: {"),
        ("npu.hbm_bandwidth.source", " ", "and their source, or: assumed"),
        ("npu", 3, "npu: 3 is not a mapping of figures"),
        ("between", ..., "between: None is not a mapping of figures"),
        ("npus_per_node", 0, "npus_per_node: 0 is not a whole number from 1"),
        ("npus_per_host", 3, "npus_per_host: 3 does not divide npus_per_node 8"),
        ("nodes", 2.5, "nodes: 2.5 is not a whole number from 1"),
        ("name", "", "name: '' is not a name"),
        ("npu.cube_flop", 3, "npu.cube_flop: unknown field; did you mean cube_flops?"),
        ("insides", {}, "insides: unknown field; did you mean inside?"),
    ],
)
def test_nonsense_is_refused_with_file_field_value_and_limit(
    tmp_path: Path, field: str, value: Any, message: str
) -> None:
    """The file has a second problem: both are named at once."""
    content = yaml.safe_load((CONFIGS / "ascend_910b_server.yaml").read_text(encoding="utf-8"))
    content["rack"] = 4
    *parts, last = field.split(".")
    inside = reduce(getitem, parts, content)
    inside[last] = value
    if value is ...:
        del inside[last]
    path = tmp_path / "machine.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    for problem in (message, "rack: unknown field"):
        with pytest.raises(ConfigError, match=f"(?m)^{path}: .*{re.escape(problem)}"):
            Hardware.load(path)


def test_names_of_npus_as_npu_smi_and_as_torch_npu_have_them() -> None:
    for names, expected in (
        ("910B3 Ascend910B3 910B", "ascend_910b_server"),
        ("Ascend910 Ascend910_9391", "ascend_910c_supernode"),
        ("310P3 Ascend310P3 910A Ascend910ProB None cpu", None),
    ):
        assert {described(name) for name in names.split()} == {expected}
        assert expected is None or find_config(expected, "hardware") in SHIPPED


def test_a_launch_takes_from_a_machine_what_its_file_gives() -> None:
    for name in ("ascend_910b_server", "ascend_910c_supernode"):
        machine = Hardware.load(find_config(name, "hardware")).machine()
        for size in (1, 2, 4, 8, 16):
            assert outputs_to_hide(name, size) == min_outputs_to_hide(machine, size)
