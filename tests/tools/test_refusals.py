"""The table of refusals says the same of a command line as of argparse's namespace of it."""

from __future__ import annotations

import argparse

import pytest

from commfuse_npu.tools import refusals
from commfuse_npu.tools.refusals import Refusal

EVERY_REFUSAL = (
    *refusals.REFUSALS,
    *refusals.ATTENTION_REFUSALS,
    *refusals.ULYSSES_REFUSALS,
    *refusals.DATA_PARALLEL_REFUSALS,
    *refusals.FLOW_REFUSALS,
)
VALUES = (
    *(True, 0, 1, 2, 4, 8, 0.0, 0.1, 4096, 65536, 1048576, "False"),
    *("dualpipev", "1f1b", "alibi", "rope", "TND", "SBH", "general", "causal", "hybrid"),
    *("adam", "muon", "dist_muon", "local", "transformer_engine", "linear_qkv"),
)


@pytest.mark.parametrize("refusal", EVERY_REFUSAL, ids=lambda one: f"{one.ours} {one.option}")
def test_words_are_refused_as_namespaces_are(refusal: Refusal) -> None:
    option = refusal.option.split()[0]
    for value in VALUES:
        given = argparse.Namespace(**{refusal.names[0]: value})
        said = refusal.value_in(["--bf16", option] if value is True else [option, str(value)])
        assert (said is not None) == refusal.given(given), value
        if said is not None:
            assert said == ("given" if value is True else str(value))
    # What was not typed is there, in real arguments, with Megatron's default.
    default = argparse.Namespace(**{refusal.names[0]: refusal.default})
    assert (refusal.value_in(["--bf16"]) is not None) == refusal.given(default)


def test_what_is_no_number_is_not_known_to_be_harmless() -> None:
    (dropout,) = [one for one in refusals.FLOW_REFUSALS if one.option == "--hidden-dropout"]
    assert dropout.value_in(["--hidden-dropout", "${DROPOUT}"]) == "${DROPOUT}"
    assert dropout.given(argparse.Namespace(hidden_dropout="some"))


def test_what_nobody_typed_is_named_as_megatrons() -> None:
    found = [one.value_in([]) for one in refusals.FLOW_REFUSALS]
    assert list(filter(None, found)) == [
        "0.1, Megatron's default",
        "0.1, Megatron's default",
        "transformer_engine, Megatron's default",
    ]
