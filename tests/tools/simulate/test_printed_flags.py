"""The flags that plan and simulate print are flags that the doctor and the feature take."""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import pairwise

import pytest

from commfuse_npu.config_file import find_config
from commfuse_npu.hardware.description import Hardware
from commfuse_npu.options import DEFAULTS
from commfuse_npu.refusals import FB_OVERLAP_REFUSALS
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.plan.checks import check_launch
from commfuse_npu.tools.plan.launch import ask_about
from commfuse_npu.tools.simulate.footprint import footprint
from commfuse_npu.tools.simulate.launch_options import options
from commfuse_npu.tools.simulate.recommend import Candidate
from commfuse_npu.tools.simulate.step import Layout
from commfuse_npu.tools.simulate.sweep import Options, of_hardware, training
from commfuse_npu.tools.simulate.variants import Variant
from mindspeed_patches.arguments import commfuse_options, complete_options
from mindspeed_patches.refusals import check_compatible

MODEL = ModelConfig.load(find_config("llama3_8b"))
HARDWARE = Hardware.load(find_config("ascend_910b_server", "hardware"))
ALONE = Layout(8, 1, 1, 1)


def candidate(variant: Variant, layout: Layout, **changes: object) -> Candidate:
    what = replace(training(MODEL, layout, MODEL.seq_length, Options()), **changes)
    return Candidate(what, variant, 1.0, footprint(what, variant, HARDWARE))


FORMS = {
    variant.name: variant
    for variant in of_hardware(HARDWARE, ALONE, Options())
    if variant.role not in ("plain", "bound")
}


def check(words: list[str]) -> argparse.Namespace:
    """The doctor and the launch find nothing wrong with a model's options and these."""
    line = [*MODEL.arguments(), *words]
    launch = ask_about(None, line, {})
    assert not [str(one) for one in check_launch(launch) if one.level == "error"]
    # As Megatron's parser leaves them, with the options that nobody gave.
    given: dict[str, object] = dict(DEFAULTS)
    for word, value in pairwise([*line, "--"]):
        if word.startswith("--"):
            said = True if value.startswith("--") else value
            given[word[2:].replace("-", "_")] = int(value) if value.isdecimal() else said
    found = argparse.Namespace(**given)
    if launch.fuse.use_commfuse:
        complete_options(found)
    else:
        check_compatible(found, FB_OVERLAP_REFUSALS)
    return found


@pytest.mark.parametrize("name", FORMS)
def test_what_is_printed_is_taken(name: str) -> None:
    form = FORMS[name]
    given = check(options(MODEL, candidate(form, ALONE)))
    assert given.use_commfuse == (form.kind == "fused")
    if form.schedule is not None:
        read = commfuse_options(given)
        assert (read.attention, read.linear.wgrad) == (form.attention, form.wgrad)
        for part in () if form.tuned else ("lanes", "chunks", "taper"):
            assert getattr(read.linear.schedule, part) == getattr(form.schedule, part)


def test_a_layout_and_recomputation_are_taken() -> None:
    for layout in (Layout(4, 1, 1, 2), Layout(2, 1, 2, 2, vpp=2)):
        check(options(MODEL, candidate(FORMS["commfuse-fb"], layout, recompute="full")))
