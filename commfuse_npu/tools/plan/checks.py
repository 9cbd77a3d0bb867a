"""Problems that stop a launch, or keep CommFuse out of it; used by plan and by the doctor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from commfuse_npu.config_file import ConfigError
from commfuse_npu.plan import PlanError
from commfuse_npu.tools.finding import Finding
from commfuse_npu.tools.plan.judgement import Refused
from commfuse_npu.tools.plan.launch import AskedLaunch

__all__ = ["check_launch"]

_finding = partial(Finding, "launch")


def check_launch(launch: AskedLaunch) -> list[Finding]:
    """All problems and possible improvements of a launch; without errors it starts.

    For forms without CommFuse only the layout is checked.
    """
    findings = list(_check_layout(launch))
    if launch.fuse.use_commfuse:
        findings += _check_options(launch)
    elif launch.config.tensor_model_parallel_size > 1:
        findings += _check_sequence_parallel(launch)
    return findings


def _check_layout(launch: AskedLaunch) -> Iterator[Finding]:
    try:
        launch.config.validate()
    except ConfigError as error:
        # With --kv-channels the hidden size need not be divisible by the heads.
        kv_channels = "--kv-channels" in launch.options
        lines = str(error).splitlines()
        problems = [line for line in lines if not (kv_channels and line.startswith("hidden size"))]
        for problem in problems:
            yield _finding("layout", "error", problem, "", "the training would fail at its start")
        if problems:
            return
    try:
        # hops() raises if the schedule does not fit the group.
        launch.schedule.hops(0, launch.config.tensor_model_parallel_size, "first")
    except PlanError as error:
        yield _finding("--commfuse-taper", "error", str(error), "", "choose another")


def _check_options(launch: AskedLaunch) -> Iterator[Finding]:
    fuse, judged = launch.fuse, launch.judged
    if not launch.registers:
        yield _finding(
            "--use-commfuse",
            "warning",
            "given to the script itself",
            "the launcher before it: MindSpeed-LLM does not know the flag by itself",
            "start -m mindspeed_patches.launch SCRIPT, or call mindspeed_patches.install() after "
            "import torch in the script",
        )
    elsewhere = (fuse.commfuse_ulysses or fuse.commfuse_dp) and not fuse.commfuse_attention
    if judged.layout.tensor == 1 and not elsewhere:
        yield _finding(
            "--tensor-model-parallel-size",
            "error",
            "1",
            "at least 2: a group of one transfers nothing, and --use-commfuse is refused",
            "choose TP of at least 2, add --commfuse-dp, which needs none, or leave "
            "--use-commfuse out",
        )
    yield from map(_refused, judged.excluded)
    flags = fuse.commfuse_attention, fuse.commfuse_ulysses, fuse.commfuse_dp
    for (name, reason), flag in zip(judged.lacks.items(), flags, strict=True):
        if flag:
            yield from map(_refused, judged.excluding[name])
            if reason:
                yield _lacking(name, reason)
    if "--commfuse-fb-overlap" in launch.options:
        yield from map(_refused, judged.excluding["--commfuse-fb-overlap"])
    if judged.layout.tensor > 1:
        yield from _check_sequence_parallel(launch)


def _refused(refused: Refused) -> Finding:
    refusal, value = refused
    expected = f"not together with {refusal.ours}, which is refused then: {refusal.why}"
    return _finding(refusal.option.split()[0], "error", value, expected, refusal.way_out)


def _lacking(option: str, lacks: str) -> Finding:
    """Split a problem of an option, which ends with its remedy, into the fields of a finding."""
    if lacks.startswith(option):
        needs, _, remedy = lacks.removeprefix(option).lstrip(": ").partition("; ")
        return _finding(option, "error", "given", needs.removeprefix("needs "), remedy)
    ends = lacks.startswith("proj ")
    remedy = "add proj to --commfuse-layers" if ends else f"leave {option} out, or change that"
    return _finding(option, "error" if ends else "warning", f"given, but {lacks}", "", remedy)


def _check_sequence_parallel(launch: AskedLaunch) -> Iterator[Finding]:
    if not launch.judged.layout.sequence_parallel:
        expected = "the flag: without, column-parallel layers keep Megatron's forward"
        action = "add --sequence-parallel"
        yield _finding("--sequence-parallel", "warning", "not given", expected, action)
