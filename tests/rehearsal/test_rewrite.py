"""What a rehearsal changes in a launch, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

from commfuse_npu.tools.launch_script.options import Options
from commfuse_npu.tools.launch_script.short_run import MOCK_VOCABULARY
from mindspeed_patches.rehearsal.rewrite import commfuse_run, prepare, reference_run


def prepared(text: str, folder: Path, iterations: int = 4) -> Options:
    options = Options(text.split())
    prepare(options, iterations, folder)
    return options


def test_a_run_is_short_and_leaves_no_files(tmp_path: Path) -> None:
    options = prepared(
        "--train-iters 2000 --train-samples 9 --lr-warmup-iters 500 --lr-decay-iters 2 --eval-iters"
        " 10 --load a b --save c --profile --tensorboard-dir t --log-interval 10 --lr 1e-6",
        tmp_path,
    )
    assert options.values("--train-iters") == ["4"]
    # Megatron wants the warm-up to be shorter than the decay.
    assert options.values("--lr-warmup-iters") == ["3"]
    assert options.values("--eval-iters") == ["0"]
    assert options.values("--log-interval") == ["1"]
    assert options.values("--lr") == ["1e-6"]
    for dropped in ("--train-samples", "--lr-decay-iters", "--load", "--save", "--profile"):
        assert dropped not in options
    assert any(line.startswith("--load a b -> (dropped)") for line in options.changes)


def test_data_that_are_not_here_become_mock_data(tmp_path: Path) -> None:
    options = prepared(
        "--data-path your data path --tokenizer-type PretrainedFromHF --tokenizer-name-or-path x "
        "--padded-vocab-size 32000 --vocab-size 100",
        tmp_path,
    )
    assert "--data-path" not in options
    assert "--mock-data" in options
    assert options.values("--tokenizer-type") == ["NullTokenizer"]
    assert options.number("--vocab-size", 0) == MOCK_VOCABULARY == 4607
    assert "--padded-vocab-size" not in options
    assert any("not on this machine" in line for line in options.changes)


def test_data_and_tokenizer_that_are_here_stay(tmp_path: Path) -> None:
    for name in ("text.bin", "text.idx", "tokenizer.model"):
        (tmp_path / name).touch()
    text = "--data-path 0.5 text --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model"
    options = prepared(text, tmp_path)
    assert options.words[: len(text.split())] == text.split()
    assert "--mock-data" not in options


def test_a_larger_vocabulary_stays(tmp_path: Path) -> None:
    text = "--mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --attention-dropout 0.0"
    options = prepared(text, tmp_path)
    assert options.values("--vocab-size") == ["32000"]
    assert not any("vocab" in line for line in options.changes)


def test_dropout_of_attention_is_taken_out(tmp_path: Path) -> None:
    assert prepared("--bf16", tmp_path).values("--attention-dropout") == ["0.0"]


def test_a_peer_gives_way_unless_the_launch_asks_for_both(tmp_path: Path) -> None:
    assert "--use-ascend-coc" not in prepared("--use-ascend-coc", tmp_path)
    assert "--use-ascend-coc" in prepared("--use-ascend-coc --use-commfuse", tmp_path)


def test_memory_that_a_forward_keeps_is_left_to_forward_backward_overlap(tmp_path: Path) -> None:
    text = "--swap-attention --reuse-fp32-param"
    assert "--swap-attention" not in prepared(text, tmp_path)
    options = prepared(f"{text} --commfuse-fb-overlap", tmp_path)
    assert "--swap-attention" in options
    assert "--reuse-fp32-param" not in options


def test_instructions_are_not_mocked(tmp_path: Path) -> None:
    options = prepared("--is-instruction-dataset --data-path d", tmp_path)
    assert "--mock-data" not in options
    assert options.values("--data-path") == ["d"]


def test_the_two_runs_differ_in_commfuse_only() -> None:
    options = Options(
        ["--a", "1", "--use-commfuse", "--commfuse-lanes", "2", "--no-commfuse-attention", "--b"]
    )
    assert reference_run(options) == ["--a", "1", "--b"]
    assert commfuse_run(options) == options.words
    plain = Options(["--a", "1"])
    assert reference_run(plain) == ["--a", "1"]
    assert commfuse_run(plain) == ["--a", "1", "--use-commfuse"]
    assert not plain.changes
