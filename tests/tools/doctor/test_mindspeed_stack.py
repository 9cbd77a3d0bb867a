"""MindSpeed-LLM, MindSpeed and Megatron-LM on made-up machines."""

from __future__ import annotations

import dataclasses

import pytest

from commfuse_npu.tools.doctor import Package
from commfuse_npu.tools.doctor.mindspeed_stack import check_stack
from tests.tools.doctor.machines import machine, only, stack, summary


@pytest.mark.parametrize("version", ["2.2.0", "2.3.0", "26.0.0dev0", "26.0.0", "26.1.0"])
def test_tried_versions_are_supported(tmp_path, version: str) -> None:
    found = check_stack(machine(packages=stack(tmp_path, llm=version)))
    assert {finding.level for finding in found} == {"ok"}


def test_nothing_of_the_stack_is_fine_on_a_cpu() -> None:
    found = list(check_stack(machine()))
    assert {finding.level for finding in found} == {"note"}
    assert len(found) == 3


def without(packages: dict[str, Package], *names: str) -> dict[str, Package]:
    return {name: package for name, package in packages.items() if name not in names}


def test_a_mindspeed_llm_without_features_is_refused(tmp_path) -> None:
    packages = stack(tmp_path, llm="2.1.0")
    (tmp_path / "mindspeed_llm/tasks/megatron_adaptor_v2.py").unlink()
    found = only(check_stack(machine(packages=packages)), "MindSpeed-LLM")
    assert summary(found) == ("error", "2.1.0")
    assert "2.1.0 and older pin Megatron core_r0.8.0 and have no feature manager" in found.expected
    assert found.action.startswith("use MindSpeed-LLM 2.2.0, 2.3.0, 26.0.0, 26.1.0 or master")


def test_a_mindspeed_llm_that_nobody_tried_is_remarked(tmp_path) -> None:
    found = check_stack(machine(packages=stack(tmp_path, llm="27.0.0")))
    assert summary(only(found, "MindSpeed-LLM")) == ("warning", "27.0.0")


@pytest.mark.parametrize(
    ("missing", "what", "level"),
    [
        ("mindspeed", "MindSpeed", "error"),
        ("megatron", "Megatron-LM", "error"),
        ("mindspeed_llm", "MindSpeed-LLM", "warning"),
    ],
)
def test_parts_of_the_stack_are_missing(tmp_path, missing, what, level) -> None:
    found = list(check_stack(machine(packages=without(stack(tmp_path), missing))))
    assert summary(only(found, what)) == (level, "not found")
    assert not [finding for finding in found if finding.what == "together"]


def test_mindspeeds_of_other_versions_are_refused(tmp_path) -> None:
    packages = stack(tmp_path, mindspeed="0.8.0")
    found = check_stack(machine(packages=packages))
    assert summary(only(found, "MindSpeed")) == ("error", "0.8.0")
    (tmp_path / "mindspeed/features_manager/features_manager.py").unlink()
    found = check_stack(machine(packages=packages))
    assert only(found, "MindSpeed").value == "0.8.0, without a feature manager"


def test_megatrons_that_do_not_go_together(tmp_path) -> None:
    packages = stack(tmp_path)
    llm, mindspeed = packages["mindspeed_llm"], packages["mindspeed"]

    def megatron(package: Package, **others: Package) -> tuple[str, str]:
        found = check_stack(machine(packages={"megatron": package, **others}))
        return summary(only(found, "Megatron-LM"))

    both = {"mindspeed_llm": llm, "mindspeed": mindspeed}
    old = dataclasses.replace(packages["megatron"], version="0.8.0")
    assert megatron(old, **both) == ("error", "0.8.0")
    new = dataclasses.replace(packages["megatron"], version="0.17.0")
    found = only(check_stack(machine(packages={"megatron": new, **both})), "Megatron-LM")
    assert summary(found) == ("error", "0.17.0")
    assert "MegatronAdaptor and TransformerEngineNPU" in found.expected
    wheel = tmp_path / "wheel"
    (wheel / "core").mkdir(parents=True)
    of_pypi = Package("0.12.1", (wheel,))
    assert megatron(of_pypi, **both) == ("error", "0.12.1, megatron.core only")
    assert megatron(of_pypi) == ("ok", "0.12.1, megatron.core only")
    mixed = Package("0.12.1", (wheel, tmp_path / "megatron"))
    level, value = megatron(mixed, **both)
    assert level == "warning"
    assert f"megatron.core in {wheel}, megatron.training in {tmp_path / 'megatron'}" in value
