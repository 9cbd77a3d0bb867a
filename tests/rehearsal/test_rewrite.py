"""What a rehearsal changes in a launch, how it scales the launch down, what it keeps."""

from pathlib import Path

import pytest

from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.launch_script.option_words import Options
from commfuse_npu.tools.launch_script.short_run import MOCK_VOCABULARY
from mindspeed_patches.rehearsal.__main__ import arguments_of, prepare
from mindspeed_patches.rehearsal.scale import RehearsedLayout, layout_of, scale_down

HERE = "--data-path 0.5 text --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model"
ELSEWHERE = (
    "--data-path your data path --tokenizer-type PretrainedFromHF --tokenizer-name-or-path x "
    "--padded-vocab-size 32000 --vocab-size 100"
)
LONG = (
    "--train-iters 2000 --train-samples 9 --lr-warmup-iters 500 --lr-decay-iters 2 --eval-iters 10 "
    "--load a b --save c --profile --tensorboard-dir t --log-interval 10 --lr 1e-6"
)
NULL = "--mock-data --tokenizer-type NullTokenizer --vocab-size 32000"
PERMUTE = "--moe-permute-fusion --use-fused-moe-token-permute-and-unpermute"
SWAP = "--swap-attention --reuse-fp32-param"


@pytest.mark.parametrize(
    ("text", "with_values", "without", "noted"),
    [
        # Megatron requires the warm-up to be shorter than the decay.
        (LONG, "--train-iters 4 --lr-warmup-iters 3 --eval-iters 0 --log-interval 1 --lr 1e-6",
         "--train-samples --lr-decay-iters --load --save --profile --tensorboard-dir",
         "--load a b -> (dropped)"),
        (ELSEWHERE, f"--mock-data --tokenizer-type NullTokenizer --vocab-size {MOCK_VOCABULARY}",
         "--data-path --padded-vocab-size", "not on this machine"),
        (HERE, HERE, "--mock-data", ""),
        (NULL, NULL, "", ""),
        ("--is-instruction-dataset --data-path d", "--data-path d", "--mock-data", ""),
        ("--bf16", "--attention-dropout 0.0", "", "no dropout"),
        ("--num-workers 2", "--num-workers 0", "", "a forked loader may hang"),
        ("--use-ascend-coc", "", "--use-ascend-coc", "CommFuse takes its place"),
        # A launch with both keeps them, so that CommFuse's refusal is shown.
        ("--use-ascend-coc --use-commfuse", "--use-ascend-coc", "", ""),
        (SWAP, "", SWAP, "no device memory"),
        (PERMUTE, "", PERMUTE, "Megatron's own code takes its place"),
        (f"{SWAP} --commfuse-overlap", "--swap-attention", "--reuse-fp32-param", ""),
    ],
)  # fmt: skip
def test_what_is_changed(text: str, with_values, without, noted, tmp_path: Path) -> None:
    for name in ("text.bin", "text.idx", "tokenizer.model"):
        (tmp_path / name).touch()
    options = Options(text.split())
    prepare(options, 4, tmp_path)
    expected = Options(with_values.split())
    for name in expected.names:
        assert options.values(name) == expected.values(name)
    assert not set(without.split()) & set(options.names)
    assert not noted or any(noted in line for line in options.changes)


@pytest.mark.parametrize(
    ("words", "reference", "commfuse"),
    [
        ("--a 1 --use-commfuse --commfuse-lanes 2 --no-commfuse-attention --b", "--a 1 --b", ""),
        ("--a 1 --no-use-commfuse", "--a 1", "--a 1 --use-commfuse"),
        ("--commfuse-overlap", "", ""),
    ],
)
def test_the_two_runs_differ_in_commfuse_only(words: str, reference: str, commfuse: str) -> None:
    options = Options(words.split())
    assert arguments_of("reference", options) == reference.split()
    assert arguments_of("commfuse", options) == (commfuse or words).split()
    assert not options.changes


LLAMA3_70B = (
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --num-layers 80 "
    "--hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention "
    "--num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 4 "
    "--global-batch-size 512 --recompute-num-layers 20 --num-layer-list 20,20,20,20 "
    "--tokenizer-type NullTokenizer --make-vocab-size-divisible-by 16032"
)


def scaled(text: str, processes: int | None, limit: int) -> tuple[Options, RehearsedLayout]:
    options = Options(text.split())
    return options, scale_down(options, layout_of(options, processes), limit)


def number(options: Options, name: str) -> int:
    return options.number(name, -1)


def test_layouts() -> None:
    options = Options(LLAMA3_70B.split())
    assert layout_of(options, 64) == RehearsedLayout(8, 4, 1, 2)
    assert layout_of(options, None) == RehearsedLayout(8, 4, 1, 1)
    with pytest.raises(UsageError, match=r"48 processes.*= 32"):
        layout_of(options, 48)


@pytest.mark.parametrize(
    ("layout", "limit", "expected"),
    [
        (RehearsedLayout(8, 4, 1, 2), 8, (4, 2, 1, 1)),
        (RehearsedLayout(8, 8, 8, 1), 8, (2, 2, 2, 1)),
        (RehearsedLayout(6, 1, 1, 1), 4, (3, 1, 1, 1)),
        (RehearsedLayout(2, 16, 1, 8, 8), 8, (2, 2, 1, 2)),
    ],
)
def test_processes_fit(layout: RehearsedLayout, limit: int, expected: tuple[int, ...]) -> None:
    small = scale_down(Options(["--num-layers", "4"]), layout, limit)
    assert (small.tensor, small.pipeline, small.context, small.data) == expected


@pytest.mark.parametrize("limit", [2, 8, 32])
def test_a_large_model_keeps_its_ratios(limit: int) -> None:
    text = f"{LLAMA3_70B} --long-factor {','.join('1' * 64)}"
    options, small = scaled(text, 64, limit)
    sizes = "num-attention-heads num-query-groups hidden-size ffn-hidden-size seq-length"
    heads, groups, hidden, ffn, length = (number(options, f"--{name}") for name in sizes.split())
    assert small.processes <= limit
    assert (heads, hidden) == (8 * groups, 16 * heads)
    assert options.text("--long-factor") == ",".join("1" * 8), "of each pair of a head's features"
    assert groups % small.tensor == ffn % small.tensor == 0
    assert abs(ffn / hidden - 3.5) < 0.5
    # Rows of 64 bytes in bf16, and 32 of them per rank.
    assert hidden // small.tensor % 32 == 0
    assert length == number(options, "--max-position-embeddings") == 32 * small.tensor
    assert number(options, "--num-layers") == 2 * small.pipeline
    assert number(options, "--recompute-num-layers") == 2
    assert number(options, "--global-batch-size") % (2 * small.data) == 0
    assert number(options, "--make-vocab-size-divisible-by") == 1
    assert "--num-layer-list" not in options
    assert any(line.startswith("--hidden-size 8192 -> ") for line in options.changes)


def test_as_many_groups_as_heads_stay_as_many() -> None:
    text = LLAMA3_70B.replace("--num-query-groups 8", "--num-query-groups 64")
    options, _ = scaled(text, 64, 8)
    assert options.text("--num-query-groups") == options.text("--num-attention-heads") == "8"


@pytest.mark.parametrize(("limit", "stage"), [(8, "1"), (2, None)])
def test_virtual_stages_stay_virtual(limit: int, stage: str | None) -> None:
    text = LLAMA3_70B + " --num-layers-per-virtual-pipeline-stage 10 --commfuse-overlap"
    options, small = scaled(text, 64, limit)
    assert options.text("--num-layers-per-virtual-pipeline-stage") == stage
    assert number(options, "--num-layers") == 2 * small.pipeline
    assert number(options, "--global-batch-size") == 2 * 4 * small.pipeline


def test_experts_and_context_parallelism() -> None:
    text = (
        "--tensor-model-parallel-size 2 --context-parallel-size 4 --expert-model-parallel-size 4 "
        "--num-experts 128 --moe-router-topk 8 --num-attention-heads 32 --hidden-size 2048 "
        "--moe-ffn-hidden-size 768 --seq-length 4096 --micro-batch-size 1 --global-batch-size 16 "
        "--context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 2"
    )
    options, small = scaled(text, 16, 4)
    assert (small.tensor, small.context, small.expert) == (2, 2, 2)
    assert [number(options, name) for name in ("--num-experts", "--moe-router-topk")] == [4, 2]
    assert options.text("--context-parallel-algo") == "ulysses_cp_algo"
    assert number(options, "--seq-length") == 32 * 4
    options, small = scaled(f"{text} --moe-tp-extend-ep --first-k-dense-replace -1", 16, 4)
    assert number(options, "--first-k-dense-replace") == -1, "none, in MindSpeed-LLM"
    assert number(options, "--num-experts") == 2 * small.tensor * small.expert
