"""Options that exclude CommFuse or one of its options: refused early and late, with a remedy."""

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

from commfuse_npu.launch.options import option_name
from commfuse_npu.launch.refusals import REFUSALS_OF, IncompatibleOptionsError, check_compatible
from mindspeed_patches.feature import CommFuseFeature
from mindspeed_patches.patching import PatchManager
from tests.patches.launches import DATA_PARALLEL, ULYSSES, early, real_arguments

VALUES = {
    "attention_dropout": 0.1,
    "context_parallel_size": 2,
    "position_embedding_type": "alibi",
    "schedules_method": "dualpipev",
    "lora_target_modules": ["linear_qkv"],
    "output_layer_slice_num": 2,
    "num_distributed_optimizer_instances": 2,
    "optimizer": "muon",
    "optimization_level": 1,
}
"""Values that are refused; of all other options any value is."""

FOR_ATTENTION = {
    "pre_tockens": 65536,
    "next_tockens": 0,
    "sparse_mode": 2,
    "attention_dropout": 0.0,
    "position_embedding_type": "rope",
    "reset_attention_mask": True,
    "shape_order": "TND",
    "attention_mask_type": "general",
}


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "use_commfuse": (
        {"schedules_method": "1f1b", "lora_target_modules": [], "output_layer_slice_num": 1,
         "tp_2d": False},
        {},
    ),
    "commfuse_attention": (
        FOR_ATTENTION | {"context_parallel_size": 1}, {"attention_dropout": 0.0}
    ),
    "commfuse_ulysses": (FOR_ATTENTION, ULYSSES),
    "commfuse_dp": (
        {"num_distributed_optimizer_instances": 1, "optimizer": "adam", "quant_grads": False},
        DATA_PARALLEL,
    ),
}  # fmt: skip
"""Per option: harmless values of options it is refused with, and options that it needs."""


def refused(ours: str) -> dict[str, Any]:
    """Each attribute that an option is refused with, and a refused value."""
    names = [refusal.attribute for refusal in REFUSALS_OF[option_name(ours)]]
    return {name: VALUES.get(name, True) for name in names}


@pytest.mark.parametrize(
    ("ours", "name", "value"),
    [
        *((ours, *item) for ours in OPTIONS for item in refused(ours).items()),
        ("commfuse_dp", "optimizer", "dist_muon"),  # its old name
    ],
)
def test_refused_with_both_flags_and_a_way_out(ours: str, name: str, value: Any) -> None:
    _, needs = OPTIONS[ours]
    refusal = next(r for r in REFUSALS_OF[option_name(ours)] if name == r.attribute)
    expected = f"^{option_name(ours)} and {refusal.option} exclude each other: .+; .+"
    feature = CommFuseFeature()
    with pytest.raises(IncompatibleOptionsError, match=expected) as caught:
        feature.validate_args(real_arguments(**{ours: True} | needs | {name: value}))
    assert "{" not in str(caught.value)
    with pytest.raises(IncompatibleOptionsError, match=expected):
        feature.register_patches(PatchManager(), early(**{ours: True, name: value}))
    # Without CommFuse's option it is accepted.
    if ours != "use_commfuse":
        feature.validate_args(real_arguments(**(needs | {name: value})))


def test_no_number_and_two_at_once() -> None:
    for given, ours, message in (
        ({"attention_dropout": "some"}, "--commfuse-attention", "--attention-dropout exclude each"),
        ({"tp_2d": 1, "use_nanopipe": 1}, "--use-commfuse", r"--tp-2d(.|\n)*--use-nanopipe"),
    ):
        with pytest.raises(IncompatibleOptionsError, match=message):
            check_compatible(argparse.Namespace(**given), ours)


@pytest.mark.parametrize("ours", OPTIONS)
def test_the_same_options_switched_off_are_not_refused(ours: str) -> None:
    harmless, needs = OPTIONS[ours]
    for args in (early(**harmless), argparse.Namespace(**dict.fromkeys(refused(ours)))):
        check_compatible(args, option_name(ours))
    CommFuseFeature().validate_args(real_arguments(**{ours: True} | harmless | needs))
    # MindSpeed core validates a TransformerConfig as well, which has none of the options.
    without = {"use_commfuse": False} | dict.fromkeys(OPTIONS, False)
    for args in (real_arguments(**refused(ours) | without), argparse.Namespace()):
        CommFuseFeature().validate_args(args)


@pytest.mark.parametrize(
    ("page", "heading"), [("limits", "What is refused"), ("fb_overlap", "What it refuses")]
)
def test_what_the_pages_name_is_refused(page: str, heading: str) -> None:
    file = Path(__file__).parents[2] / "docs" / f"{page}.md"
    text = file.read_text("utf-8").partition(f"## {heading}\n")[2]
    known = {option_name(r.attribute) for group in REFUSALS_OF.values() for r in group}
    named = set(re.findall(r"`(--[\w-]+)", text.partition("\n## ")[0]))
    assert len(named & known) >= 10
    assert named - known <= {*map(option_name, REFUSALS_OF), *REFUSALS_OF}
