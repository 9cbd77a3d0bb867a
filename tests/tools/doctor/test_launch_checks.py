"""What is said about the options of a launch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from commfuse_npu.tools.doctor.launch_checks import check_launch
from tests.tools.doctor.launches import FUSED, SIZES, launch
from tests.tools.doctor.machines import only, summary


def check(words: str) -> Callable[[str], tuple[str, str]]:
    found = check_launch(launch(*words.split()))
    return lambda what: summary(only(found, what))


def test_the_flag_and_what_has_to_be_with_it() -> None:
    assert check(SIZES)("--use-commfuse") == ("warning", "not given")
    assert check(f"{SIZES} --use-commfuse")("--sequence-parallel") == ("warning", "not given")
    alone = FUSED.replace("parallel-size 2", "parallel-size 1")
    assert check(alone)("--tensor-model-parallel-size") == ("error", "1")
    assert check(f"pretrain_gpt.py {FUSED}")("--use-commfuse") == (
        "warning",
        "given to pretrain_gpt.py itself",
    )
    registered = f"A=b torchrun -m mindspeed_patches.launch /llm/pretrain_gpt.py {FUSED}"
    found = check_launch(launch(*registered.split()))
    assert {finding.level for finding in found if finding.what != "rows of a block"} == {"ok"}
    assert check(f"{FUSED} --commfuse-attention")("--commfuse-attention")[0] == "note"
    unknown = FUSED.replace("--vocab-size 512", "")
    level, value = check(unknown)("--vocab-size")
    assert level == "note"
    assert value.startswith("not given; 32000 is assumed")


@pytest.mark.parametrize(
    ("changes", "expected", "action"),
    [
        ("", "512 at least: with fewer Megatron's own order is faster", "--commfuse-min-rows 512"),
        ("--commfuse-min-rows auto", "512 at least: with fewer layers stay Megatron's, whose own "
         "order is faster then", "--commfuse-min-rows 0, which fuses them anyway"),
        ("--commfuse-min-rows auto --commfuse-chunks 1", "512 at least: with fewer Megatron's own",
         "--commfuse-min-rows 512"),
        ("--commfuse-min-rows auto --seq-length 2048", None, None),
        ("--commfuse-min-rows 769 --seq-length 1024", "769 at least: with fewer layers stay "
         "Megatron's", "--commfuse-min-rows 0"),
    ],
)  # fmt: skip
def test_short_blocks_are_warned_about(
    changes: str, expected: str | None, action: str | None
) -> None:
    sizes = "--hidden-size 4096 --tensor-model-parallel-size 4"
    found = [one for one in check_launch(launch(*f"{FUSED} {sizes} {changes}".split()))
             if one.what == "rows of a block"]  # fmt: skip
    assert [one.level for one in found] == ["warning"] * (expected is not None)
    for one in found:
        assert one.expected.startswith(str(expected))
        assert str(action) in one.action


@pytest.mark.parametrize(
    "option", ["--use-ascend-mc2", "--schedules-method dualpipev", "--output-layer-slice-num=2"]
)
def test_what_is_refused_is_an_error(option: str) -> None:
    name = option.replace("=", " ").split()[0]
    assert check(f"{FUSED} {option}")(name)[0] == "error"
    without_it = check_launch(launch(*SIZES.split(), *option.split()))
    assert name not in [finding.what for finding in without_it]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--use-distributed-optimizer --nproc_per_node 4", "--commfuse-dp would be taken"),
        ("", "not --commfuse-dp: needs --use-distributed-optimizer"),
        ("--commfuse-attention", "--commfuse-fb-overlap: one micro-batch has no partner"),
        ("--global-batch-size 24", "--commfuse-fb-overlap would be taken"),
        ("--moe-fb-overlap", "not --commfuse-dp: --moe-fb-overlap excludes --use-commfuse"),
        ("--moe-fb-overlap", "not --commfuse-fb-overlap: --moe-fb-overlap: it overlaps the same"),
    ],
)
def test_options_that_are_not_given_are_judged(words: str, said: str) -> None:
    found = only(check_launch(launch(*f"{FUSED} {words}".split())), "other options")
    assert said in found.value
    assert ("not --commfuse-attention:" in found.value) is ("attention" not in words)


ATTENTION = f"{FUSED} --commfuse-attention"


@pytest.mark.parametrize("option", ["--multi-latent-attention", "--pre-tockens 4096"])
def test_what_is_refused_with_attention_is_an_error(option: str) -> None:
    name, _, value = option.partition(" ")
    words = f"{ATTENTION} --attention-dropout 0.0 {option}"
    found = only(check_launch(launch(*words.split())), name)
    assert summary(found) == ("error", value or "given")
    assert "--commfuse-attention" in found.expected
    for flag in ("--commfuse-attention", "--use-commfuse"):
        without_it = check_launch(launch(*words.replace(flag, "").split()))
        assert name not in [finding.what for finding in without_it]


def test_megatron_drops_out_unless_told_otherwise() -> None:
    found = only(check_launch(launch(*ATTENTION.split())), "--attention-dropout")
    assert summary(found) == ("error", "0.1, Megatron's default")
    assert found.action == "pass --attention-dropout 0.0 or leave --commfuse-attention out"
    # The launchers tell it so.
    by_launcher = check_launch(launch("--config", "--commfuse-attention"))
    assert {finding.what: finding.level for finding in by_launcher} == {
        "layout": "ok",
        "--commfuse-attention": "note",
        "other options": "ok",
    }


@pytest.mark.parametrize(
    ("change", "level", "value"),
    [
        ("", "note", "given"),
        ("--recompute-granularity full", "note", "given"),
        (
            "--recompute-activations",
            "warning",
            "given, but selective recomputation runs the core attention by itself",
        ),
        ("--commfuse-layers qkv,fc1", "error", "given, with --commfuse-layers qkv,fc1"),
    ],
)
def test_whether_attention_can_be_fused(change: str, level: str, value: str) -> None:
    words = f"{ATTENTION} --attention-dropout 0.0 {change}"
    assert check(words)("--commfuse-attention") == (level, value)
    unsplit = words.replace("--sequence-parallel", "")
    if not change:
        said = "given, but without sequence parallelism nothing is split"
        assert check(unsplit)("--commfuse-attention") == ("warning", said)
    off = check_launch(launch(*words.split(), "--no-commfuse-attention"))
    assert "--commfuse-attention" not in [finding.what for finding in off]


@pytest.mark.parametrize("harmless", ["--schedules-method other", "--output-layer-slice-num 1"])
def test_values_that_are_not_meant_are_not_refused(harmless: str) -> None:
    found = check_launch(launch(*f"{FUSED} {harmless}".split()))
    assert {finding.level for finding in found if finding.what != "rows of a block"} == {"ok"}


OF_ONE = f"{FUSED} --tensor-model-parallel-size 1 --attention-dropout 0.0"
ULYSSES = "--context-parallel-size 2 --context-parallel-algo ulysses_cp_algo --commfuse-ulysses"


@pytest.mark.parametrize(
    ("words", "option", "level"),
    [
        ("--commfuse-dp --use-distributed-optimizer --nproc_per_node 2", "dp", "note"),
        ("--commfuse-dp --use-distributed-optimizer --nproc_per_node 1", "dp", "warning"),
        ("--commfuse-dp --nproc_per_node 2", "dp", "error"),
        ("--commfuse-ulysses --context-parallel-algo ulysses_cp_algo", "ulysses", "error"),
        ("--commfuse-ulysses --context-parallel-size 2", "ulysses", "error"),
        (ULYSSES, "ulysses", "note"),
    ],
)
def test_what_an_option_lacks_is_an_error(words: str, option: str, level: str) -> None:
    found = check(f"{OF_ONE} {words}")
    assert found(f"--commfuse-{option}")[0] == level
    # A tensor-parallel group of one is fine with these.
    with pytest.raises(ValueError, match="not enough values"):
        found("--tensor-model-parallel-size")


@pytest.mark.parametrize(
    ("words", "level"),
    [
        ("", "error"),
        ("--commfuse-allow-nothing", "warning"),
        ("--commfuse-allow-nothing --commfuse-attention", "error"),
    ],
)
def test_a_group_of_one_is_refused_unless_nothing_is_allowed(words: str, level: str) -> None:
    alone = f"{OF_ONE} {words}"
    found = only(check_launch(launch(*alone.split())), "--tensor-model-parallel-size")
    assert found.level == level
    assert "add --commfuse-dp" in found.action


@pytest.mark.parametrize(
    ("words", "hides"),
    [
        ("", "all-to-alls hide behind attention and its projections;"),
        (
            "--group-query-attention --num-query-groups 1",
            "that of q, k and v does not: 1 query groups are not divisible by CP 2;",
        ),
        (
            "--tensor-model-parallel-size 2",
            "that of q, k and v does not: at TP 2 the weights of the projections are not whole;",
        ),
    ],
)
def test_what_hides_under_ulysses_depends_on_the_layout(words: str, hides: str) -> None:
    found = check_launch(launch(*f"{OF_ONE} {ULYSSES} {words}".split()))
    assert hides in only(found, "--commfuse-ulysses").action


def test_layers_that_a_llama_does_not_have_are_judged() -> None:
    words = f"{FUSED} --num-experts 8 --moe-grouped-gemm --n-shared-experts 1"
    found = only(check_launch(launch(*words.split())), "other layers")
    assert found.value.startswith("shared_fc1 fused, shared_fc2 fused, experts silent (grouped")
