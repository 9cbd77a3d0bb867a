"""What a rehearsal changes in a launch, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from commfuse_npu.tools.launch_script.options import Options
from commfuse_npu.tools.launch_script.short_run import MOCK_VOCABULARY
from mindspeed_patches.rehearsal.rewrite import commfuse_run, prepare, reference_run

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
SWAP = "--swap-attention --reuse-fp32-param"


@pytest.mark.parametrize(
    ("text", "with_values", "without", "noted"),
    [
        (
            LONG,
            # Megatron wants the warm-up to be shorter than the decay.
            "--train-iters 4 --lr-warmup-iters 3 --eval-iters 0 --log-interval 1 --lr 1e-6",
            "--train-samples --lr-decay-iters --load --save --profile",
            "--load a b -> (dropped)",
        ),
        (
            ELSEWHERE,
            f"--mock-data --tokenizer-type NullTokenizer --vocab-size {MOCK_VOCABULARY}",
            "--data-path --padded-vocab-size",
            "not on this machine",
        ),
        (HERE, HERE, "--mock-data", ""),
        (NULL, NULL, "", ""),
        ("--is-instruction-dataset --data-path d", "--data-path d", "--mock-data", ""),
        ("--bf16", "--attention-dropout 0.0", "", "no dropout"),
        ("--use-ascend-coc", "", "--use-ascend-coc", "CommFuse takes its place"),
        # A launch that asks for both is shown how CommFuse refuses them.
        ("--use-ascend-coc --use-commfuse", "--use-ascend-coc", "", ""),
        (SWAP, "", SWAP, "no device memory"),
        (f"{SWAP} --commfuse-fb-overlap", "--swap-attention", "--reuse-fp32-param", ""),
    ],
)
def test_what_is_changed(
    text: str, with_values: str, without: str, noted: str, tmp_path: Path
) -> None:
    for name in ("text.bin", "text.idx", "tokenizer.model"):
        (tmp_path / name).touch()
    options = Options(text.split())
    prepare(options, 4, tmp_path)
    wanted = Options(with_values.split())
    assert {name: options.values(name) for name in wanted.names} == {
        name: wanted.values(name) for name in wanted.names
    }
    assert not set(without.split()) & set(options.names)
    assert not noted or any(noted in line for line in options.changes)


def test_the_two_runs_differ_in_commfuse_only() -> None:
    options = Options(
        ["--a", "1", "--use-commfuse", "--commfuse-lanes", "2", "--no-commfuse-attention", "--b"]
    )
    assert reference_run(options) == ["--a", "1", "--b"]
    assert commfuse_run(options) == options.words
    plain = Options(["--a", "1", "--no-use-commfuse"])
    assert reference_run(plain) == ["--a", "1"]
    assert commfuse_run(plain) == ["--a", "1", "--use-commfuse"]
    assert not plain.changes
    overlap = Options(["--commfuse-fb-overlap"])
    assert commfuse_run(overlap) == ["--commfuse-fb-overlap"]
