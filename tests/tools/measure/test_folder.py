"""A folder of a measurement: what it stores and refuses; machine facts and sizes."""

import errno
from pathlib import Path
from unittest import mock

import pytest

from commfuse_npu.launch.packages import Package
from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.measure import results_folder as module
from commfuse_npu.tools.measure.measure_command import npu_facts
from commfuse_npu.tools.measure.measuring_steps import slowest
from commfuse_npu.tools.measure.results_folder import Folder
from commfuse_npu.tools.ranks import check_backend
from tests.tools.doctor.machines import NPU_ANSWERS, machine

ABOUT = {"device": "cpu", "ranks": 2}


def test_what_cannot_be_written_or_read_is_named(tmp_path: Path, monkeypatch) -> None:
    folder = Folder(tmp_path, ABOUT)
    for text in ("{", "[]", "{}", '{"facts": 1, "steps": {}}', '{"facts": {}, "steps": {"a": 1}}'):
        (tmp_path / "measured.json").write_text(text)
        with pytest.raises(UsageError, match=r"measured\.json cannot be read: .*; remove it"):
            Folder(tmp_path, ABOUT)
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(module, "write_json", full)
    with pytest.raises(UsageError, match=r"/measured\.json cannot be written: No space left"):
        folder.store("links", {"times": []})


def test_facts_of_npus_are_what_the_doctor_sees(monkeypatch) -> None:
    packages = {"torch": Package("2.7.1"), "torch_npu": Package("2.7.1.post2")}
    variables = {"HCCL_BUFFSIZE": "64", "NCCL_DEBUG": "INFO", "HOME": "/here"}
    facts = npu_facts(machine(variables, packages, NPU_ANSWERS))
    expected = {"torch_npu": "2.7.1.post2", "CANN": "not found", "health": "NPU 1 (Warning)",
                "links of NPU1": "HCCS X", "HCCL_BUFFSIZE": "64",
                "TASK_QUEUE_ENABLE": "unset"}  # fmt: skip
    assert expected.items() <= facts.items()
    assert not {"NCCL_DEBUG", "HOME"} & facts.keys()
    monkeypatch.setattr("commfuse_npu.tools.ranks.find_spec", lambda name: name == "torch" or None)
    with pytest.raises(ModuleNotFoundError, match="torch_npu"):
        check_backend("npu")
    check_backend("cpu")


def test_the_slowest_rank_counts() -> None:
    ranks = [[{"of": 1, "seconds": times}] for times in ([1.0, 4.0], [2.0, 3.0])]
    assert slowest(ranks) == [{"of": 1, "seconds": [2.0, 4.0]}]
    # Rank 2 takes no part in a ping-pong.
    assert slowest([*ranks, [{"of": 1, "seconds": []}]]) == [{"of": 1, "seconds": [2.0, 4.0]}]
    with pytest.raises(ValueError, match="device events returned zero durations"):
        slowest([[{"seconds": [1.0, 0.0]}]])
