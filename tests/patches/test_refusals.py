"""What excludes CommFuse or one of its options: refused early and late, with a way out."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

import pytest

from commfuse_npu.options import option_name
from commfuse_npu.refusals import ATTENTION_REFUSALS, REFUSALS_OF
from mindspeed_patches.feature import CommFuseFeature
from mindspeed_patches.patching import PatchManager
from mindspeed_patches.refusals import IncompatibleOptionsError, check_compatible
from tests.patches.launches import DATA_PARALLEL, ULYSSES, real_arguments


@dataclass(frozen=True)
class Asked:
    """An option of CommFuse.

    Attributes:
        refused: each attribute that is refused, with a value that a user would give.
        harmless: some of them, with values that are not.
        others: what the option needs besides.
    """

    refused: dict[str, Any]
    harmless: dict[str, Any]
    others: dict[str, Any] = field(default_factory=dict)


FOR_ATTENTION = {
    "attention_dropout": 0.1,
    "multi_latent_attention": True,
    "context_parallel_size": 2,
    "position_embedding_type": "alibi",
    "sliding_window": 4096,
    "interleave_sliding_window": 4096,
    "pre_tockens": 4096,
    "next_tockens": 1,
    "sparse_mode": 4,
    "query_pre_attn_scalar": 144,
    "attn_logit_softcapping": 50.0,
}
HARMLESS_FOR_ATTENTION = {
    "pre_tockens": 65536,
    "next_tockens": 0,
    "sparse_mode": 2,
    "attention_dropout": 0.0,
    "position_embedding_type": "rope",
}
PACKED = {"reset_attention_mask": True, "shape_order": "TND", "attention_mask_type": "general"}

OPTIONS = {
    "use_commfuse": Asked(
        {
            "use_ascend_mc2": True,
            "use_ascend_coc": True,
            "unaligned_linear": True,
            "tp_2d": True,
            "moe_fb_overlap": True,
            "use_nanopipe": True,
            "schedules_method": "dualpipev",
            "qat_scheme": "w4a16-mxfp4",
            "fp8": "hybrid",
            "fp8_format": "e4m3",
            "lora_target_modules": ["linear_qkv"],
            "tp_comm_overlap": True,
            "output_layer_slice_num": 2,
            "enable_high_availability": True,
            "ttp_enabled": True,
            "use_legacy_models": True,
        },
        {
            "schedules_method": "1f1b",
            "lora_target_modules": [],
            "output_layer_slice_num": 1,
            "tp_2d": False,
        },
    ),
    "commfuse_attention": Asked(
        FOR_ATTENTION,
        HARMLESS_FOR_ATTENTION | {"context_parallel_size": 1} | PACKED,
        {"attention_dropout": 0.0},
    ),
    "commfuse_ulysses": Asked(
        {name: value for name, value in FOR_ATTENTION.items() if name != "context_parallel_size"}
        | {"context_parallel_kv_cache_policy": "full", "use_ulysses_allgather_kv": True},
        HARMLESS_FOR_ATTENTION | PACKED,
        ULYSSES,
    ),
    "commfuse_dp": Asked(
        {
            "num_distributed_optimizer_instances": 2,
            "use_custom_fsdp": True,
            "use_torch_fsdp2": True,
            "layerzero": True,
            "quant_grads": True,
            "optimizer": "muon",
            "layerwise_disaggregated_training": True,
        },
        {"num_distributed_optimizer_instances": 1, "optimizer": "adam", "quant_grads": False},
        DATA_PARALLEL,
    ),
}


def early(value: Any) -> Any:
    """As MindSpeed's first parser has it."""
    return value if isinstance(value, bool | list) else str(value)


@pytest.mark.parametrize("ours", OPTIONS)
def test_every_refusal_is_tested(ours: str) -> None:
    names = {name for refusal in REFUSALS_OF[option_name(ours)] for name in refusal.names}
    assert names == set(OPTIONS[ours].refused)


@pytest.mark.parametrize(
    ("ours", "name"), [(ours, name) for ours in OPTIONS for name in OPTIONS[ours].refused]
)
def test_refused_with_both_flags_and_a_way_out(ours: str, name: str) -> None:
    asked = OPTIONS[ours]
    value = asked.refused[name]
    refusal = next(r for r in REFUSALS_OF[option_name(ours)] if name in r.names)
    expected = f"^{option_name(ours)} and {refusal.option} exclude each other: .+; .+"
    feature = CommFuseFeature()
    with pytest.raises(IncompatibleOptionsError, match=expected) as caught:
        feature.validate_args(real_arguments(**{ours: True} | asked.others | {name: value}))
    assert "{" not in str(caught.value)
    given = argparse.Namespace(**{"use_commfuse": True, ours: True, name: early(value)})
    with pytest.raises(IncompatibleOptionsError, match=expected):
        feature.register_patches(PatchManager(), given)
    # Without our option it is nobody's concern.
    if ours != "use_commfuse":
        feature.validate_args(real_arguments(**(asked.others | {name: value})))


@pytest.mark.parametrize("ours", OPTIONS)
def test_words_of_a_command_line_are_refused_as_namespaces_are(ours: str) -> None:
    asked = OPTIONS[ours]
    for values, refused in ((asked.refused, True), (asked.harmless, False)):
        for name, value in values.items():
            refusal = next((r for r in REFUSALS_OF[option_name(ours)] if name in r.names), None)
            if refusal is None or (isinstance(value, bool | list) and not value):
                continue  # It is harmless for this option, or not typed.
            option = refusal.option.split()[0]
            words = ["--bf16", option] if value is True else [option, str(value)]
            said = "given" if value is True else str(value)
            assert refusal.value_in(words) == (said if refused else None)


def test_megatrons_default_excludes_where_nobody_typed_the_option() -> None:
    found = [one.value_in([]) for one in ATTENTION_REFUSALS]
    assert list(filter(None, found)) == ["0.1, Megatron's default"]


def test_what_is_no_number_is_not_known_to_be_harmless() -> None:
    (dropout,) = [one for one in ATTENTION_REFUSALS if one.option == "--attention-dropout"]
    assert dropout.value_in(["--attention-dropout", "${DROPOUT}"]) == "${DROPOUT}"
    assert dropout.given(argparse.Namespace(attention_dropout="some"))


@pytest.mark.parametrize("ours", OPTIONS)
def test_the_same_options_switched_off_are_not_refused(ours: str) -> None:
    asked = OPTIONS[ours]
    for given in (
        asked.harmless,
        {name: early(value) for name, value in asked.harmless.items()},
        dict.fromkeys(asked.refused),
    ):
        check_compatible(argparse.Namespace(**given), REFUSALS_OF[option_name(ours)])
    CommFuseFeature().validate_args(real_arguments(**{ours: True} | asked.harmless | asked.others))


def test_the_old_name_of_muon_is_refused_too() -> None:
    given = real_arguments(commfuse_dp=True, optimizer="dist_muon", **DATA_PARALLEL)
    with pytest.raises(IncompatibleOptionsError, match="--optimizer muon exclude"):
        CommFuseFeature().validate_args(given)


def test_all_at_once() -> None:
    with pytest.raises(IncompatibleOptionsError) as caught:
        check_compatible(argparse.Namespace(tp_2d=True, use_nanopipe=True))
    assert "--tp-2d" in str(caught.value)
    assert "--use-nanopipe" in str(caught.value)


def test_nothing_is_checked_without_the_flag() -> None:
    args = real_arguments(**OPTIONS["use_commfuse"].refused)
    args.use_commfuse = False
    CommFuseFeature().validate_args(args)
    # MindSpeed core validates a TransformerConfig as well, which has none of the options.
    CommFuseFeature().validate_args(argparse.Namespace())
