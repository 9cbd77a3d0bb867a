"""The configurations against published parameter counts, and constraints on layouts."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from commfuse_npu.tools.config_file import ConfigError
from commfuse_npu.tools.model_config import ModelConfig
from tests.launchers.launching import ROOT

CONFIGS = ROOT / "configs"
PARAMETERS = {
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
}


def load(name: str, options: str = "") -> ModelConfig:
    return ModelConfig.load(CONFIGS / f"{name}.yaml", options.split())


def from_options(options: str) -> ModelConfig:
    return ModelConfig.from_options(options.split())


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_the_number_of_parameters_is_the_published_one(name: str, parameters: int) -> None:
    config = load(name)
    hidden, groups = config.hidden_size, config.num_query_groups
    keys_and_values = 2 * groups * hidden // config.num_attention_heads
    features = 2 * hidden + keys_and_values + 3 * config.ffn_hidden_size + 2
    tables = 2 * config.vocab_size
    assert hidden * (config.num_layers * features + tables + 1) == parameters


PP, TP, CP = (f"--{kind}-parallel-size" for kind in ("pipeline-model", "tensor-model", "context"))
ULYSSES = f"{CP} 2 --nnodes 2 --context-parallel-algo ulysses_cp_algo"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama2_7b", f"{PP} 3 --num-layers 33", "8 is not divisible by TP*PP*CP = 8*3*1 = 24; "),
        ("llama2_13b", f"{TP} 16 --nnodes 2", "8 is not divisible by TP 16; choose TP 8"),
        ("llama2_7b", f"--num-layers 33 {PP} 2", "33 is not divisible by PP 2; choose PP 1 or 3"),
        ("llama3_8b", "--num-layer-list 32", "NUM_LAYER_LIST 32 does not fit PP 1 and 32 layers; "),
        ("llama2_7b", f"--seq-length 4090 {TP} 2 {CP} 4", "choose --seq-length 4088 or 4096"),
        ("llama2_7b", f"--seq-length 4092 {TP} 1 {CP} 4", "not divisible by 2*CP = 2*4 = 8; cho"),
        ("llama2_13b", ULYSSES, "heads per TP rank 5 is not divisible by CP 2; choose CP 1 or 5"),
        ("llama2_7b", "--max-position-embeddings 2048", "4096 exceeds --max-position-embeddings 2"),
        ("llama2_7b", "--hidden-size 4100", "choose --hidden-size 4096 or 4128"),
        ("llama2_7b", "--ffn-hidden-size 11009", "feed-forward width 11009 is not divisible by T"),
        ("llama3_8b", "--num-query-groups 24", "choose --num-attention-heads 24 or 48"),
        ("llama3_8b", f"{TP} {10**11}", "8 is not divisible by TP 100000000000; choose TP 8"),
    ],
)
def test_what_does_not_fit_is_said(name: str, options: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(name, options).validate()


def test_arguments_appear_where_they_say_something() -> None:
    load("llama3_70b", f"{PP} 2 --num-layer-list=none").validate()
    # Only Ulysses splits the heads among context-parallel ranks.
    contexts = load("llama3_8b", f"{CP} 8 --nnodes 8")
    contexts.validate()
    assert f"{CP} 8 --context-parallel-algo megatron_cp_algo" in " ".join(contexts.arguments())
    assert {CP, "--vocab-size", "--num-layer-list"}.isdisjoint(load("llama3_8b").arguments())


SHORT = (
    "--num-layers 2 --hidden-size 192 --num-attention-heads 4 --vocab-size 300 --seq-length 64 "
    "--micro-batch-size 2 --tensor-model-parallel-size 2"
)


def test_what_a_command_line_leaves_out_is_what_megatron_takes() -> None:
    config = from_options(SHORT)
    assert (config.ffn_hidden_size, config.num_query_groups, config.world_size) == (768, 4, 2)
    assert (config.padded_vocab_size, config.global_batch_size) == (512, 2)
    grouped = "--swiglu --group-query-attention --num-query-groups 2 --nproc-per-node 8"
    config = from_options(f"{SHORT} {grouped}")
    assert (config.ffn_hidden_size, config.num_query_groups) == (512, 2)
    assert (config.data_parallel_size, config.global_batch_size) == (4, 8)
    padded = SHORT.replace("--vocab-size", "--padded-vocab-size")
    assert from_options(padded).padded_vocab_size == 300
    # Query groups have an effect only with their flag.
    assert from_options(f"{SHORT} --num-query-groups 2").num_query_groups == 4
    with pytest.raises(ConfigError, match=r"^--num-attention-heads, --vocab-size, --seq-length n"):
        from_options("--num-layers 2 --hidden-size 64 --micro-batch-size 1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"commfuse_chunk": 2}, "unknown: --commfuse-chunk; did you mean --commfuse-chunks?"),
        ({"commfuse_wgrad": "blocks"}, "--commfuse-wgrad was removed: a weight gradient is one"),
        ({"sequence_parallel": "yes"}, "--sequence-parallel: ignored explicit argument 'yes'"),
        ({"num_layers": 3.5}, "--num-layers: '3.5' is not a whole number from 1"),
        ({"num_layers": True}, "--num-layers: expected one argument"),
        ({"num_layers": False}, "--num-layers: 'False' is not a whole number from 1"),
        ({"hidden_size": 10**12 + 1}, "is not a whole number from 1 to 1000000000000"),
        ({"hidden_size": [1, 2]}, "hidden_size: [1, 2] is not a value"),
        ({"num_layers": ..., "num_layer": 3}, "unknown option 'num_layer'; did you mean num_layer"),
        ({"pretrain_option": "--bf16"}, "unknown option 'pretrain_option'; did you mean pretrain_"),
        ({"tokenizer_type": None}, "tokenizer_type missing; every option has to be there"),
        ({"nnodes": ...}, "nnodes missing; every option has to be there"),
        *(({"pretrain_options": one}, f"{one!r} is not a line of opt") for one in (3, "overlap")),
    ],
)
def test_a_bad_file_is_explained(tmp_path, change, message) -> None:
    content = yaml.safe_load((CONFIGS / "llama3_8b.yaml").read_text("utf-8")) | change
    path = tmp_path / "broken.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in content.items() if v is not ...}), "utf-8")
    with pytest.raises(ConfigError, match=f"^{path}: .*{re.escape(message)}"):
        ModelConfig.load(path)


def test_other_keys_of_a_file_are_passed_on(tmp_path: Path) -> None:
    text = (CONFIGS / "llama3_8b.yaml").read_text("utf-8")
    path = tmp_path / "more.yaml"
    more = "seed: 0\ndata_path: [1, a]\nfp16: false\nsave: null\npretrain_options: --fp8 hybrid"
    path.write_text(f"{text}\n{more}", "utf-8")
    words = " ".join(ModelConfig.load(path).pretrain_options)
    assert words.startswith(
        "--rotary-base 500000 --norm-epsilon 1e-05 --init-method-std 0.01 --bf16"
    )
    assert words.endswith(" --adam-beta2 0.95 --seed 0 --data-path 1 a --fp8 hybrid")


@pytest.mark.parametrize("name", PARAMETERS)
def test_what_is_written_is_read_again_from_files_and_options(name: str, tmp_path: Path) -> None:
    file, config = tmp_path / "again.yaml", load(name)
    more = (*config.pretrain_options, "--overlap-grad-reduce")
    changed = replace(config, pretrain_options=more, commfuse_options=())
    for written in (config, changed):
        file.write_text(written.as_yaml(), "utf-8")
        assert ModelConfig.load(file) == written
    assert changed.arguments() == [*config.arguments(), "--overlap-grad-reduce"]
    # What from_options ignores.
    plain = replace(config, pretrain_options=(), commfuse_options=("--use-commfuse",))
    torchrun = ["--nproc_per_node", str(plain.npus_per_node), "--nnodes", str(plain.nnodes)]
    options = [*torchrun, *plain.arguments(), "--vocab-size", str(plain.vocab_size)]
    algorithm = {"context_parallel_algo": plain.context_parallel_algo}
    assert replace(ModelConfig.from_options(options), **algorithm) == plain
