"""The five launchers: what they would run, what they refuse, and the exit code of what they ran."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from commfuse_npu.tools.model_config import ModelConfig
from tests.launchers.launching import (
    MODELS,
    ROOT,
    SCRIPTS,
    dry_run,
    launch,
    remembering_python,
)
from tests.limits import LIMIT

LAUNCHERS = [SCRIPTS / f"pretrain_{model}_ptd.sh" for model in MODELS]

# Everything but the model's numbers, in the order in which it has to appear.
MODEL = (
    "--use-mcore-models --tensor-model-parallel-size --pipeline-model-parallel-size "
    "--sequence-parallel {stages}--num-layers --hidden-size --ffn-hidden-size "
    "--num-attention-heads {groups}--seq-length --max-position-embeddings "
    "--position-embedding-type --rotary-base --normalization --norm-epsilon --swiglu "
    "--disable-bias-linear --attention-dropout --hidden-dropout "
    "--untie-embeddings-and-output-weights --init-method-std --make-vocab-size-divisible-by "
    "--tokenizer-type --micro-batch-size --global-batch-size --train-iters --lr --min-lr "
    "--lr-decay-style --lr-warmup-fraction --weight-decay --clip-grad --adam-beta1 --adam-beta2 "
    "--bf16 {further}{tokenizer}"
)
DATA = "--data-path --split"
OUTPUT = (
    "--log-interval --log-throughput --save-interval --eval-interval --eval-iters --ckpt-format"
)
OPTIMIZE = (
    "--transformer-impl --use-flash-attn --use-fused-rmsnorm --use-fused-swiglu "
    "--use-fused-rotary-pos-emb --no-masked-softmax-fusion --attention-softmax-in-fp32 "
    "--no-gradient-accumulation-fusion --use-distributed-optimizer"
)
ODD = ("--tensorboard-dir", 'a "b"')
TORCHRUN = "--nproc_per_node --nnodes --node_rank --master_addr --master_port"


def options_of(model: str, commfuse: bool) -> list[str]:
    large = model.endswith("70b")
    words = MODEL.format(
        stages="--num-layer-list " if model == "llama3_70b" else "",
        groups="--group-query-attention --num-query-groups "
        if large or model == "llama3_8b"
        else "",
        further="--num-layers-per-virtual-pipeline-stage --adam-eps "
        if model == "llama2_70b"
        else "",
        tokenizer="--tokenizer-name-or-path" if model.startswith("llama3") else "--tokenizer-model",
    )
    fused = "--use-commfuse" if commfuse else ""
    return f"{words} {DATA} {OUTPUT} {OPTIMIZE} {fused} --distributed-backend".split()


def value(words: list[str], option: str) -> str:
    assert words.count(option) == 1, option
    return words[words.index(option) + 1]


@pytest.mark.parametrize(
    "model",
    [
        *("llama2_7b", "llama3_70b"),
        *(pytest.param(model, marks=pytest.mark.long) for model in MODELS[1:4]),
    ],
)
def test_the_options_and_their_order(model: str) -> None:
    fused, plain = dry_run(model), dry_run(model, USE_COMMFUSE="0")
    for words, entry in ((fused, ["-m", "mindspeed_patches.launch"]), (plain, [])):
        script = words.index("pretrain_gpt.py")
        torchrun = words[words.index("torchrun") + 1 : script]
        assert [word for word in torchrun if word.startswith("-")] == [
            *TORCHRUN.split(),
            *entry[:1],
        ]
        assert words[script - len(entry) : script] == entry
        options = [word for word in words[script + 1 :] if word.startswith("--")]
        assert options == options_of(model, bool(entry))
        assert words[-2:] == ["--distributed-backend", "nccl"]
    # All else is the same.
    extra = [f"PYTHONPATH={ROOT}", "-m", "mindspeed_patches.launch", "--use-commfuse"]
    assert [word for word in fused if word not in extra] == plain
    assert [word for word in fused if word in extra] == extra


def test_the_numbers_are_those_of_the_configuration() -> None:
    words = dry_run("llama3_8b")
    expected = {
        "--nproc_per_node": "8",
        "--nnodes": "1",
        "--tensor-model-parallel-size": "8",
        "--num-layers": "32",
        "--hidden-size": "4096",
        "--ffn-hidden-size": "14336",
        "--num-query-groups": "8",
        "--seq-length": "8192",
        "--rotary-base": "500000",
        "--norm-epsilon": "1e-05",
        "--micro-batch-size": "2",
    }
    assert {option: value(words, option) for option in expected} == expected


def test_the_environment_is_set_and_can_be_set_otherwise() -> None:
    def assignments(**variables: str) -> list[str]:
        words = dry_run("llama2_7b", USE_COMMFUSE="0", **variables)
        return words[: words.index("torchrun")]

    assert assignments() == [
        "CUDA_DEVICE_MAX_CONNECTIONS=1",
        "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True",
        "HCCL_CONNECT_TIMEOUT=3600",
        "HCCL_EXEC_TIMEOUT=3600",
        "TASK_QUEUE_ENABLE=2",
        "CPU_AFFINITY_CONF=1",
    ]
    others = {"TASK_QUEUE_ENABLE": "1", "HCCL_EXEC_TIMEOUT": "60", "CPU_AFFINITY_CONF": "2"}
    assert assignments(**others)[-3:] == [
        "HCCL_EXEC_TIMEOUT=60",
        "TASK_QUEUE_ENABLE=1",
        "CPU_AFFINITY_CONF=2",
    ]


def test_the_layout_can_be_set_from_the_environment() -> None:
    words = dry_run(
        "llama3_70b",
        NPUS_PER_NODE="16",
        NNODES="2",
        NODE_RANK="1",
        MASTER_ADDR="node0",
        MASTER_PORT="7000",
        TP="4",
        PP="2",
        CP="2",
        NUM_LAYER_LIST="39,41",
    )
    expected = {
        "--nproc_per_node": "16",
        "--nnodes": "2",
        "--node_rank": "1",
        "--master_addr": "node0",
        "--master_port": "7000",
        "--tensor-model-parallel-size": "4",
        "--pipeline-model-parallel-size": "2",
        "--context-parallel-size": "2",
        "--context-parallel-algo": "megatron_cp_algo",
        "--num-layer-list": "39,41",
    }
    assert {option: value(words, option) for option in expected} == expected


def test_paths_with_blanks_and_quotes_survive() -> None:
    paths = {
        "DATA_PATH": "/a b/it's_text_document",
        "TOKENIZER_MODEL": "/a b/$tokenizer",
        "CKPT_SAVE_DIR": "/save here",
        "CKPT_LOAD_DIR": "/load `this`",
    }
    words = dry_run("llama3_8b", *ODD, **paths)
    assert value(words, "--data-path") == paths["DATA_PATH"]
    assert value(words, "--tokenizer-name-or-path") == paths["TOKENIZER_MODEL"]
    assert value(words, "--save") == paths["CKPT_SAVE_DIR"]
    assert value(words, "--load") == paths["CKPT_LOAD_DIR"]
    assert words[-2:] == list(ODD)


def test_only_loading_what_was_saved_here_brings_the_optimizer_back() -> None:
    assert "--no-load-optim" in dry_run("llama3_8b", CKPT_LOAD_DIR="/a", CKPT_SAVE_DIR="/b")
    assert "--no-load-optim" not in dry_run("llama3_8b", CKPT_LOAD_DIR="/a", CKPT_SAVE_DIR="/a")


@pytest.mark.parametrize(
    ("model", "arguments", "folders", "rate"),
    [
        ("llama3_8b", "", {"CKPT_LOAD_DIR": "/a"}, "0.0003"),
        ("llama2_70b", "", {"CKPT_LOAD_DIR": "/a", "CKPT_SAVE_DIR": "/b"}, "0.00015"),
        ("llama3_8b", "--load /a --finetune", {}, "0.0003"),
        ("llama3_8b", "", {"CKPT_LOAD_DIR": "/a", "CKPT_SAVE_DIR": "/a"}, None),
        ("llama3_8b", "--lr 1.25e-6 --min-lr 1e-7", {"CKPT_LOAD_DIR": "/a"}, None),
        ("llama3_8b", "--lr=1.25e-6 --min-lr=1e-7", {"CKPT_LOAD_DIR": "/a"}, None),
        ("llama3_8b", "--load /a", {}, None),
        ("llama3_8b", "", {}, None),
    ],
)
def test_a_peak_rate_for_loaded_weights_is_warned_of(model, arguments, folders, rate) -> None:
    run = launch(model, *arguments.split(), DRY_RUN="1", **folders)
    assert run.returncode == 0
    warnings = [line for line in run.stderr.splitlines() if "warning" in line]
    if rate is None:
        assert warnings == []
    else:
        (line,) = warnings
        assert f"weights are loaded, and --lr {rate} of {ROOT}/configs/{model}.yaml is" in line
        assert line.endswith("1.25e-6 (7B, 8B) and 1e-6 (13B, 70B): pass --lr and --min-lr")


def test_the_layout_without_tensor_parallelism_of_the_7b() -> None:
    theirs = ("--micro-batch-size", "1", "--overlap-grad-reduce")
    for more, variables in (((), {"USE_COMMFUSE": "0"}), (("--commfuse-dp",), {})):
        words = dry_run("llama2_7b", *theirs, *more, TP="1", PP="2", **variables)
        assert value(words, "--tensor-model-parallel-size") == "1"
        assert value(words, "--pipeline-model-parallel-size") == "2"
        assert "--sequence-parallel" not in words
        assert ("--use-commfuse" in words) == bool(more)
        assert words[-len([*theirs, *more]) :] == [*theirs, *more]


def test_the_options_of_commfuse_are_passed_when_they_are_set() -> None:
    chosen = {
        "COMMFUSE_LAYERS": "qkv,fc1",
        "COMMFUSE_SCHEDULE": "shifted",
        "COMMFUSE_LANES": "3",
        "COMMFUSE_CHUNKS": "2",
        "COMMFUSE_REDUCE_DTYPE": "none",
    }
    words = dry_run("llama3_8b", **chosen)
    at = words.index("--use-commfuse")
    assert words[at + 1 : at + 11] == [
        *("--commfuse-layers", "qkv,fc1", "--commfuse-schedule", "shifted"),
        *("--commfuse-lanes", "3", "--commfuse-chunks", "2", "--commfuse-reduce-dtype", "none"),
    ]
    plain = dry_run("llama3_8b", USE_COMMFUSE="0", **chosen)
    assert not [word for word in plain if "commfuse" in word]


def written(folder: Path, **changes: object) -> str:
    """A configuration as ``commfuse-npu plan --write`` leaves it."""
    config = dataclasses.replace(ModelConfig.load(ROOT / "configs" / "llama3_8b.yaml"), **changes)
    (folder / "planned.yaml").write_text(config.as_yaml(), "utf-8")
    return str(folder / "planned.yaml")


def test_a_written_configuration_takes_the_place_of_the_models(tmp_path) -> None:
    options = ("--use-commfuse", "--commfuse-lanes", "3")
    file = written(
        tmp_path,
        tensor_model_parallel_size=4,
        nnodes=2,
        pretrain_options=("--overlap-grad-reduce", "--recompute-granularity", "full"),
        commfuse_options=options,
    )
    words = dry_run("llama2_7b", "--commfuse-chunks", "2", CONFIG=file, COMMFUSE_LAYERS="qkv")
    assert value(words, "--tensor-model-parallel-size") == "4"
    assert value(words, "--nnodes") == "2"
    assert value(words, "--rotary-base") == "500000"
    assert value(words, "--recompute-granularity") == "full"
    at = words.index("--use-commfuse")
    assert words[at : at + 5] == [*options, "--commfuse-layers", "qkv"]
    plain = dry_run("llama2_7b", CONFIG=file, USE_COMMFUSE="0")
    assert not [word for word in plain if "commfuse" in word]
    assert "--overlap-grad-reduce" in plain


@pytest.mark.parametrize("use", ["", "0", "1"])
def test_a_written_configuration_says_whether_commfuse_is_used(use: str, tmp_path) -> None:
    file = written(tmp_path, commfuse_options=())
    words = dry_run("llama3_8b", CONFIG=file, USE_COMMFUSE=use)
    assert ("--use-commfuse" in words) == (use == "1")


def test_a_written_configuration_may_fuse_context_parallelism_alone(tmp_path) -> None:
    alone = written(
        tmp_path,
        tensor_model_parallel_size=1,
        context_parallel_size=2,
        context_parallel_algo="ulysses_cp_algo",
        commfuse_options=("--use-commfuse", "--commfuse-ulysses"),
    )
    assert "--commfuse-ulysses" in dry_run("llama3_8b", CONFIG=alone)


def test_a_written_configuration_needs_no_launcher_of_its_model(llm, tmp_path) -> None:
    script = ["bash", str(SCRIPTS / "launch_pretraining.sh"), *ODD]
    environment = {"PYTHON": remembering_python(), **llm}
    keywords = {"capture_output": True, "text": True, "timeout": LIMIT, "check": False}
    run = subprocess.run(script, env={**environment, "CONFIG": written(tmp_path)}, **keywords)
    assert (run.returncode, run.stderr) == (3, "")
    assert (tmp_path / "home" / "logs" / "train_planned_commfuse.log").exists()
    recorded = (tmp_path / "recorded").read_text("utf-8").splitlines()
    assert recorded[-2:] == list(ODD)
    run = subprocess.run(script, env=environment, **keywords)
    assert run.returncode == 2
    assert "CONFIG is not set; set it to what commfuse-npu plan --write FILE has" in run.stderr


def test_the_package_is_found_once_beside_what_is_on_the_path() -> None:
    assert f"PYTHONPATH={ROOT}:/other" in dry_run("llama3_8b", PYTHONPATH="/other")
    there = f"/other:{ROOT}"
    assert f"PYTHONPATH={there}" in dry_run("llama3_8b", PYTHONPATH=there)


def test_the_printed_command_is_run_as_it_is_in_a_shell(tmp_path) -> None:
    """Paste it: the same words and the same environment arrive at torchrun."""
    home = tmp_path / "Mind Speed"
    home.mkdir()
    run = launch("llama3_8b", *ODD, DRY_RUN="1", MINDSPEED_LLM_HOME=str(home))
    fake_torchrun(tmp_path, exit_code=0)
    path = f"{tmp_path}:{os.environ['PATH']}"
    pasted = ["bash", "-c", run.stdout]
    subprocess.run(pasted, env={"PATH": path}, check=True, timeout=LIMIT)
    recorded = (tmp_path / "recorded").read_text("utf-8").splitlines()
    words = shlex.split(run.stdout)
    assert recorded[0] == str(home)
    assert recorded[1] == f"1 3600 {ROOT}"
    assert recorded[2:] == words[words.index("torchrun") + 1 :]
    assert recorded[-2:] == list(ODD)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"TP": "3"}, "32 attention heads, 8 query groups, a feed-forward width of 14336 are not"),
        ({"TP": "16", "NNODES": "2"}, "8 query groups are not divisible by TP 16; choose TP from"),
        ({"NPUS_PER_NODE": "12"}, "12 NPUs (NNODES 1 x NPUS_PER_NODE 12) are not divisible by TP"),
        ({"CP": "2"}, "8 NPUs (NNODES 1 x NPUS_PER_NODE 8) are not divisible by TP*PP*CP = 8*1*2"),
        ({"PP": "3", "NNODES": "3"}, "32 layers are not divisible by PP 3; choose PP from 1, 2, 4"),
        ({"TP": "two"}, "TP (--tensor-model-parallel-size): 'two' is not a whole number from 1"),
        ({"TP": "1"}, "USE_COMMFUSE=1 with TP 1: a group of one has nothing to transfer; choose"),
        ({"USE_COMMFUSE": "yes"}, "USE_COMMFUSE is 'yes'; set it to 0 or 1"),
    ],
)
def test_what_cannot_work_is_refused_also_when_dry(variables: dict[str, str], message: str) -> None:
    run = launch("llama3_8b", DRY_RUN="1", **variables)
    assert run.returncode == 2
    assert f": error: {message}" in run.stderr
    assert run.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--seq-length 8190", "sequence length 8190 is not divisible by TP*CP = 8*1 = 8; choose"),
        ("--global-batch-size 63", "global batch size 63 is not divisible by micro-batch size"),
        ("--num-attention-heads=30", "30 attention heads are not divisible by TP 8; choose TP"),
    ],
)
def test_arguments_are_checked_with_the_layout(arguments: str, message: str) -> None:
    run = launch("llama3_8b", *arguments.split(), DRY_RUN="1")
    assert run.returncode == 2
    assert f"llama3_8b.yaml: error: {message}" in run.stderr


def test_arguments_take_the_place_of_what_the_file_says() -> None:
    words = dry_run("llama2_7b", "--num-layers", "4", "--tensor-model-parallel-size", "4")
    # Megatron takes the last; the launcher must not have checked or printed another.
    assert [words[i + 1] for i, word in enumerate(words) if word == "--num-layers"] == ["4", "4"]
    assert words[-4:] == ["--num-layers", "4", "--tensor-model-parallel-size", "4"]


def test_a_single_group_runs_without_commfuse() -> None:
    words = dry_run("llama3_8b", TP="1", USE_COMMFUSE="0")
    assert "--sequence-parallel" not in words


def fake_torchrun(folder: Path, exit_code: int) -> None:
    """A torchrun that records how it was called, says a line on either stream, and exits."""
    script = folder / "torchrun"
    script.write_text(
        "#!/usr/bin/env bash\n"
        f'{{ pwd; echo "$CUDA_DEVICE_MAX_CONNECTIONS $HCCL_EXEC_TIMEOUT $PYTHONPATH"; '
        f"printf '%s\\n' \"$@\"; }} > '{folder}/recorded'\n"
        f"echo a line; echo an error >&2; exit {exit_code}\n",
        "utf-8",
    )
    script.chmod(0o755)


@pytest.fixture
def llm(tmp_path: Path) -> dict[str, str]:
    """A folder that looks like MindSpeed-LLM, data and a tokenizer; as variables."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("home/pretrain_gpt.py", "data_text_document.bin", "tokenizer.model"):
        (tmp_path / name).touch()
    fake_torchrun(tmp_path, exit_code=3)
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "MINDSPEED_LLM_HOME": str(home),
        "DATA_PATH": str(tmp_path / "data_text_document"),
        "TOKENIZER_MODEL": str(tmp_path / "tokenizer.model"),
    }


def test_the_exit_code_and_the_log_are_those_of_the_run(llm, tmp_path) -> None:
    run = launch("llama3_8b", *ODD, **llm)
    assert run.returncode == 3
    assert run.stdout == "a line\nan error\n"
    log = tmp_path / "home" / "logs" / "train_llama3_8b_commfuse.log"
    assert log.read_text("utf-8") == run.stdout
    recorded = (tmp_path / "recorded").read_text("utf-8").splitlines()
    assert recorded[:2] == [llm["MINDSPEED_LLM_HOME"], f"1 3600 {ROOT}"]
    dry = dry_run("llama3_8b", *ODD, **llm)
    assert recorded[2:] == dry[dry.index("torchrun") + 1 :]


def test_a_run_that_ends_well_ends_with_zero(llm, tmp_path) -> None:
    fake_torchrun(tmp_path, exit_code=0)
    assert launch("llama3_8b", **llm).returncode == 0


def test_every_kind_of_run_has_its_log(llm, tmp_path) -> None:
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0"}
    for variables in ({}, {"USE_COMMFUSE": "0"}, nodes):
        launch("llama2_7b", **llm, **variables)
    assert sorted(path.name for path in (tmp_path / "home" / "logs").iterdir()) == [
        "train_llama2_7b.log",
        "train_llama2_7b_commfuse.log",
        "train_llama2_7b_commfuse_node1.log",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"DATA_PATH": ""}, "DATA_PATH is not set; set it to the prefix of the preprocessed data"),
        ({"DATA_PATH": "/none"}, "DATA_PATH is '/none', but there is nothing of that name"),
        ({"TOKENIZER_MODEL": ""}, "TOKENIZER_MODEL is not set; set it to the file or folder of"),
        ({"TOKENIZER_MODEL": "/none"}, "TOKENIZER_MODEL is '/none', but there is nothing of that"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR is not set; set it to the address of"),
        ({"NNODES": "2", "MASTER_ADDR": "a"}, "NODE_RANK is not set; set it to 0 on that node, up"),
        ({"MINDSPEED_LLM_HOME": "/"}, "there is no pretrain_gpt.py in /; start in the root of"),
        ({"DRY_RUN": "maybe"}, "DRY_RUN is 'maybe'; set it to 0 or 1"),
    ],
)
def test_what_is_missing_is_named_before_anything_starts(llm, tmp_path, change, message) -> None:
    run = launch("llama3_8b", **{**llm, **change})
    assert run.returncode == 2
    assert f"pretrain: error: {message}" in run.stderr
    assert not (tmp_path / "recorded").exists()


def test_without_torchrun_the_message_says_so(llm, tmp_path) -> None:
    (tmp_path / "torchrun").unlink()
    for tool in ("bash", "dirname", "tr", "mkdir", "tee"):
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / tool).symlink_to(found)
    run = launch("llama3_8b", **{**llm, "PATH": str(tmp_path)})
    assert run.returncode == 2
    assert "torchrun is not on PATH" in run.stderr


def test_mock_data_and_no_tokenizer_need_no_paths(llm, tmp_path) -> None:
    """What a rehearsal passes."""
    bare = {**llm, "DATA_PATH": "", "TOKENIZER_MODEL": ""}
    options = ("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "999")
    assert launch("llama2_7b", *options, **bare).returncode == 3
    recorded = (tmp_path / "recorded").read_text("utf-8").splitlines()
    assert "--data-path" not in recorded
    assert "--tokenizer-model" not in recorded


def test_a_dry_run_says_what_it_put_in_place() -> None:
    run = launch("llama3_70b", DRY_RUN="1")
    assert run.stderr.splitlines() == [
        f"pretrain: {name} is not set; <{name}> stands for it"
        for name in ("MASTER_ADDR", "NODE_RANK", "TOKENIZER_MODEL", "DATA_PATH")
    ]


@pytest.mark.parametrize(
    "script", [*LAUNCHERS, SCRIPTS / "launch_pretraining.sh"], ids=lambda path: path.name
)
def test_bash_reads_it(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=LIMIT)
    assert os.access(script, os.X_OK)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", LAUNCHERS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    run = subprocess.run(
        ["shellcheck", "--external-sources", "--source-path=SCRIPTDIR", str(script)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert run.returncode == 0, run.stdout
