"""Names of NPUs, as npu-smi and as torch_npu have them."""

from __future__ import annotations

import pytest

from commfuse_npu.config_file import find_config
from commfuse_npu.hardware.description import described


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("910B3", "Ascend910B3", "910B"), "ascend_910b_server"),
        (("Ascend910", "Ascend910_9391"), "ascend_910c_supernode"),
    ],
)
def test_two_names_of_one_npu(names: tuple[str, ...], expected: str) -> None:
    assert {described(name) for name in names} == {expected}
    assert find_config(expected, "hardware").is_file()


@pytest.mark.parametrize("name", ["310P3", "Ascend310P3", "910A", "Ascend910ProB", "None", "cpu"])
def test_others_are_not_described(name: str) -> None:
    assert described(name) is None
