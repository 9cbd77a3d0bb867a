"""NPUs and their links, as npu-smi lists them."""

from __future__ import annotations

import json
import os

import pytest

from commfuse_npu.tools import cli
from commfuse_npu.tools.doctor import CommandResult, Package
from commfuse_npu.tools.doctor.devices import check_devices, check_links
from commfuse_npu.tools.finding import Finding
from tests.tools.doctor.machines import (
    INFO_A3,
    NPU_ANSWERS,
    machine,
    only,
    summary,
    topology,
)


def test_without_npus_the_cpu_form_is_named() -> None:
    (found,) = check_devices(machine())
    assert summary(found) == ("note", "no NPU found (there is no npu-smi)")
    assert found.action


def test_devices_and_their_health_are_listed() -> None:
    found = list(check_devices(machine({}, {"torch_npu": Package("2.7.1")}, NPU_ANSWERS)))
    assert summary(only(found, "NPUs")) == ("ok", "2 x 910B3")
    assert summary(only(found, "health")) == ("warning", "NPU 1 (Warning)")
    assert summary(only(found, "links")) == ("ok", "1 pairs HCCS")
    assert "full mesh" in only(found, "links").action
    answers = {"npu-smi info": CommandResult(0, INFO_A3)}
    found = list(check_devices(machine({}, {}, answers)))
    assert summary(only(found, "NPUs")) == ("ok", "2 x Ascend910")
    assert summary(only(found, "torch_npu")) == ("error", "not found")


@pytest.mark.parametrize(
    "result", [CommandResult(255, "dcmi failed\n"), CommandResult(0, "+--+\n")]
)
def test_an_npu_smi_that_lists_nothing_is_an_error(result: CommandResult) -> None:
    (found,) = check_devices(machine({}, {}, {"npu-smi info": result}))
    assert found.level == "error"
    assert found.value == f"npu-smi info lists none: {result.last_line}"


def test_links_tell_the_schedule() -> None:
    def links(*rows: str) -> Finding:
        table = topology([row.split() for row in rows])
        answers = {"npu-smi info -t topo": CommandResult(0, table)}
        return check_links(machine({}, {}, answers))

    switched = links("X SIO HCCS_SW", "SIO X HCCS_SW", "HCCS_SW HCCS_SW X")
    assert summary(switched) == ("ok", "2 pairs HCCS_SW, 1 pairs SIO")
    assert "1 or 2 lanes" in switched.action
    slow = links("X PHB HCCS", "PHB X HCCS", "HCCS HCCS X")
    assert summary(slow) == ("warning", "2 pairs HCCS, 1 pairs PHB")
    unknown = {"npu-smi info -t topo": CommandResult(1, "not supported\n")}
    found = check_links(machine({}, {}, unknown))
    assert summary(found) == ("note", "unknown: npu-smi info -t topo said not supported")


def test_the_npu_smi_on_the_path_is_asked(tmp_path, monkeypatch, capsys) -> None:
    script = tmp_path / "npu-smi"
    for name in ("npu-smi info", "npu-smi info -t topo"):
        (tmp_path / name.split()[-1]).write_text(NPU_ANSWERS[name].output, "utf-8")
    script.write_text(
        f'#!/bin/sh\nif [ "$2" = -t ]; then cat "{tmp_path}/$3"; else cat "{tmp_path}/info"; fi\n',
        "utf-8",
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert cli.main(["doctor", "--json"]) == 1
    findings = {f["what"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["NPUs"]["value"] == "2 x 910B3"
    assert findings["links"]["value"] == "1 pairs HCCS"
    # NPUs, and nothing to use them with.
    assert findings["torch_npu"]["level"] == "error"
