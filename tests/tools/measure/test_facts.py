"""What is written down of a machine."""

from __future__ import annotations

from commfuse_npu.tools.doctor import Package
from commfuse_npu.tools.measure.facts import machine_facts
from tests.tools.doctor.machines import NPU_ANSWERS, machine

SET = {"HCCL_BUFFSIZE": "64", "HCCL_ALGO": "level0:fullmesh", "NCCL_DEBUG": "INFO", "HOME": "/here"}


def test_facts_of_npus_are_what_the_doctor_sees() -> None:
    packages = {"torch": Package("2.7.1"), "torch_npu": Package("2.7.1.post2")}
    facts = machine_facts("npu", machine(SET, packages, NPU_ANSWERS))
    expected = {
        "torch_npu": "2.7.1.post2",
        "CANN": "not found",
        "driver": "25.2.0",
        "NPUs": "2 x 910B3",
        "health": "NPU 1 (Warning)",
        "links": "1 pairs HCCS",
        "links of NPU0": "X HCCS",
        "links of NPU1": "HCCS X",
        "HCCL_BUFFSIZE": "64",
        "HCCL_ALGO": "level0:fullmesh",
        "P2P_HCCL_BUFFSIZE": "unset (20 MB)",
    }
    assert {what: facts[what] for what in expected} == expected
    assert not {"NCCL_DEBUG", "HOME"} & facts.keys()


def test_elsewhere_variables_are_all() -> None:
    assert machine_facts("cuda", machine(SET, {}, NPU_ANSWERS)) == {"NCCL_DEBUG": "INFO"}
    assert machine_facts("cpu", machine(SET, {}, NPU_ANSWERS)) == {}
