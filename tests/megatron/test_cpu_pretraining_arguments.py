"""The command line: flag before yaml before error, and errors that show the way out."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import yaml

from scripts.cpu_pretraining.arguments import DEFAULT_CONFIG, parse_arguments
from scripts.cpu_pretraining.usage_error import UsageError


def parse(*argv: str, world_size: int = 2) -> argparse.Namespace:
    return parse_arguments(argv, world_size=world_size)


def config_with(tmp_path: Path, **changes: object) -> str:
    content = yaml.safe_load(DEFAULT_CONFIG.read_text())
    for name, value in changes.items():
        if value == "REMOVED":
            del content[name]
        else:
            content[name] = value
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_defaults_come_from_the_yaml_file() -> None:
    args = parse()
    content = yaml.safe_load(DEFAULT_CONFIG.read_text())
    assert args.hidden_size == content["hidden_size"]
    assert args.commfuse_layers == ("qkv", "proj", "fc1", "fc2", "output")
    assert args.use_commfuse
    assert (args.resume, args.compare) == (False, False)
    assert args.num_microbatches == args.global_batch_size // args.micro_batch_size


def test_flag_beats_yaml(tmp_path: Path) -> None:
    config = config_with(tmp_path, lr="3e-4", seq_length=128)
    assert parse("--config", config).seq_length == 128
    assert parse("--config", config).lr == 3e-4
    assert parse("--config", config, "--seq-length", "64").seq_length == 64
    assert not parse("--config", config, "--no-use-commfuse").use_commfuse
    assert not parse("--config", config, "--fp32").bf16


def test_unknown_yaml_key_names_the_closest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown option 'hiden_size'.*'hidden_size'"):
        parse("--config", config_with(tmp_path, hiden_size=3))


def test_value_given_nowhere_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--num-layers is neither given nor in"):
        parse("--config", config_with(tmp_path, num_layers="REMOVED"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": "many"}, r"num_layers: invalid value 'many'"),
        ({"num_layers": None}, r"num_layers has no value"),
        ({"bf16": "yes please"}, r"bf16: 'yes please' is not true or false"),
        ({"commfuse_schedule": "fast"}, r"commfuse_schedule: 'fast' is not one of auto"),
        ({"commfuse_layers": ["qkv", "fc3"]}, r"unknown layer 'fc3'"),
    ],
)
def test_yaml_values_are_checked_like_flags(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        parse("--config", config_with(tmp_path, **changes))


def test_missing_and_broken_yaml(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*nowhere.yaml"):
        parse("--config", str(tmp_path / "nowhere.yaml"))
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [")
    with pytest.raises(UsageError, match="not valid yaml"):
        parse("--config", str(broken))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--seq-length", "1001"],
            r"sequence length 1001 is not divisible by the tensor-parallel size 2; "
            r"choose --seq-length 1000 or 1002",
        ),
        (["--num-attention-heads", "7"], r"hidden size 256 is not divisible by .* heads 7"),
        (["--num-query-groups", "1"], r"query groups 1 is not divisible.*--num-query-groups 2"),
        (["--num-query-groups", "6"], r"heads 8 is not divisible by the query groups 6"),
        (["--ffn-hidden-size", "701"], r"feed-forward width 701 .* 700 or 702"),
        (["--global-batch-size", "9"], r"global batch size 9 .*--global-batch-size 8 or 12"),
        (["--lr", "0.001", "--min-lr", "0.01"], r"--min-lr 0.01 is above --lr 0.001"),
        (["--train-iters", "5", "--lr-warmup-iters", "5"], r"5 warm-up iterations leave nothing"),
        (["--valid-fraction", "0"], r"--valid-fraction 0.05 or --eval-interval 0"),
        (["--valid-fraction", "0.9"], r"not in \[0.0, 0.5\]"),
        (["--hidden-size", "24"], r"head dimension 3 is odd"),
        (["--compare", "--resume"], r"leave --resume out"),
        (["--name", "a/b"], r"not a folder name"),
        (["--hidden", "3"], r"unrecognized arguments: --hidden"),
        (["--num-layers", "0"], r"0 is less than 1"),
        (["--num-layers", "x"], r"invalid whole number >= 1 value: 'x'"),
    ],
)
def test_errors_name_value_limit_and_way_out(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(*argv)


def test_world_size_must_match_the_layout() -> None:
    with pytest.raises(UsageError, match=r"4 processes were started.*--data-parallel-size 2"):
        parse(world_size=4)
    assert parse("--data-parallel-size", "2", world_size=4).num_microbatches == 1


def test_one_rank_per_layer_turns_sequence_parallelism_off() -> None:
    args = parse("--tensor-model-parallel-size", "1", "--seq-length", "33", world_size=1)
    assert not args.sequence_parallel
