"""The launchers: their commands, their refusals, and the exit code of the command they ran."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from commfuse_npu.config_file import ConfigError
from commfuse_npu.tools.launch_command import launch_command
from commfuse_npu.tools.model_config import ModelConfig
from tests.launchers.launching import MODELS, ROOT, SCRIPTS, dry_run, started
from tests.limits import LIMIT

LAUNCHERS = [*(SCRIPTS / f"pretrain_{model}_ptd.sh" for model in MODELS),
             SCRIPTS / "launch_pretraining.sh"]  # fmt: skip
ODD = ("--tensorboard-dir", 'a "b"')


FIXED = (
    "--use-mcore-models --sequence-parallel --swiglu --disable-bias-linear --attention-dropout "
    "--hidden-dropout --untie-embeddings-and-output-weights --bf16 --split --log-throughput "
    "--transformer-impl --use-flash-attn --use-fused-rmsnorm --use-fused-swiglu "
    "--use-fused-rotary-pos-emb --no-masked-softmax-fusion --attention-softmax-in-fp32 "
    "--no-gradient-accumulation-fusion --use-distributed-optimizer --distributed-backend nccl"
)
"""Options that every model has."""


def value(words: list[str], option: str) -> str:
    assert words.count(option) == 1, option
    return words[words.index(option) + 1]


@pytest.mark.parametrize("model", MODELS)
def test_what_is_started_and_for_whom(model: str) -> None:
    fused, plain = dry_run(model), dry_run(model, USE_COMMFUSE="0")
    script = fused.index("pretrain_gpt.py")
    assert fused[script - 2 : script] == ["-m", "mindspeed_patches.launch"]
    assert "--tokenizer-name-or-path" in fused or "llama2" in model
    # Everything else is the same.
    extra = [f"PYTHONPATH={ROOT}", "-m", "mindspeed_patches.launch", "--use-commfuse"]
    assert [word for word in fused if word not in extra] == plain
    assert [word for word in extra if word in plain] == []
    start = plain.index("torchrun")
    assert " ".join(plain[:start]) == (
        "CUDA_DEVICE_MAX_CONNECTIONS=1 PYTORCH_NPU_ALLOC_CONF=expandable_segments:True "
        "HCCL_CONNECT_TIMEOUT=3600 HCCL_EXEC_TIMEOUT=3600 TASK_QUEUE_ENABLE=2 CPU_AFFINITY_CONF=1"
    )
    torchrun = "--nproc_per_node --nnodes --node_rank --master_addr --master_port"
    assert plain[start + 1 : plain.index("pretrain_gpt.py") : 2] == torchrun.split()
    assert set(FIXED.split()) <= set(plain)


@pytest.mark.parametrize(
    ("arguments", "variables", "expected"),
    [
        ("", {}, {"--nproc_per_node": "8", "--nnodes": "1", "--num-query-groups": "8",
                  "--rotary-base": "500000", "--norm-epsilon": "1e-05", "--master_port": "6001"}),
        ("", {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "7"},
         {"--nnodes": "2", "--node_rank": "1", "--master_addr": "node0", "--master_port": "7"}),
        ("", {"PP": "2", "CP": "2", "TP": "2", "NUM_LAYER_LIST": "15,17"},
         {"--num-layer-list": "15,17", "--context-parallel-size": "2"}),
        ("", {"CKPT_LOAD_DIR": "/a", "CKPT_SAVE_DIR": "/b"},
         {"--load": "/a", "--save": "/b", "--no-load-optim": "--no-load-rng"}),
        ("", {"TP": "1", "USE_COMMFUSE": "0"}, {"--sequence-parallel": None}),
        ("--mock-data --tokenizer-type NullTokenizer --vocab-size 9", {},
         {"--data-path": None, "--tokenizer-model": None, "--tokenizer-name-or-path": None}),
        ("--data-path=/x --tokenizer-name-or-path /t", {},
         {"--data-path": None, "--tokenizer-name-or-path": "/t"}),
        ("", {"COMMFUSE_LAYERS": "qkv,fc1", "COMMFUSE_LANES": "3",
              "COMMFUSE_CHUNKS": "2", "COMMFUSE_REDUCE_DTYPE": "none"},
         {"--use-commfuse": "--commfuse-layers", "--commfuse-layers": "qkv,fc1",
          "--commfuse-lanes": "3", "--commfuse-chunks": "2", "--commfuse-reduce-dtype": "none"}),
        ("", {"USE_COMMFUSE": "0", "COMMFUSE_LANES": "3"},
         {"--use-commfuse": None, "--commfuse-lanes": None}),
        ("--commfuse-dp", {"TP": "1", "PP": "2"}, {"--use-commfuse": "--distributed-backend"}),
    ],
)  # fmt: skip
def test_variables_and_arguments_change_the_command(
    arguments: str, variables: dict[str, str], expected: dict[str, str | None]
) -> None:
    words = dry_run("llama3_8b", *arguments.split(), **variables)
    for option, wanted in expected.items():
        if wanted is None:
            assert option not in words
        else:
            assert value(words, option) == wanted
    assert words[len(words) - len(arguments.split()) :] == arguments.split()


def test_the_environment_can_be_set_otherwise() -> None:
    variables = {"TASK_QUEUE_ENABLE": "1", "HCCL_EXEC_TIMEOUT": "60", "PYTHONPATH": "/other"}
    words = dry_run("llama2_7b", **variables)
    assert {"TASK_QUEUE_ENABLE=1", "HCCL_EXEC_TIMEOUT=60", f"PYTHONPATH={ROOT}:/other"} < set(words)
    path = f"/other:{ROOT}"
    assert f"PYTHONPATH={path}" in dry_run("llama3_8b", PYTHONPATH=path)


@pytest.mark.parametrize(
    ("arguments", "folders", "warned"),
    [
        ("", {"CKPT_LOAD_DIR": "/a"}, True),
        ("--load /a --finetune", {}, True),
        ("", {"CKPT_LOAD_DIR": "/a", "CKPT_SAVE_DIR": "/a"}, False),
        ("--lr=1.25e-6 --min-lr=1e-7", {"CKPT_LOAD_DIR": "/a"}, False),
    ],
)
def test_a_peak_rate_for_loaded_weights_is_warned_of(arguments, folders, warned, capsys) -> None:
    dry_run("llama3_8b", *arguments.split(), **folders)
    stderr = capsys.readouterr().err
    assert stderr.count("warning") == warned
    assert ("weights are loaded, and --lr 0.0003 of" in stderr) is warned


def written(folder: Path, **changes: object) -> str:
    """The path of a configuration as ``commfuse-npu plan --write`` writes it."""
    config = dataclasses.replace(ModelConfig.load(ROOT / "configs" / "llama3_8b.yaml"), **changes)
    (folder / "planned.yaml").write_text(config.as_yaml(), "utf-8")
    return str(folder / "planned.yaml")


def test_a_written_configuration_takes_the_place_of_the_models(tmp_path: Path) -> None:
    options = ("--use-commfuse", "--commfuse-lanes", "3")
    more = ("--overlap-grad-reduce", "--recompute-granularity", "full")
    layout = {"tensor_model_parallel_size": 4, "nnodes": 2}
    file = written(tmp_path, pretrain_options=more, commfuse_options=options, **layout)
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
    # The file also decides whether CommFuse is used, and may fuse context parallelism alone.
    file = written(tmp_path, commfuse_options=())
    for use, expected in (("", False), ("0", False), ("1", True)):
        assert ("--use-commfuse" in dry_run("llama3_8b", CONFIG=file, USE_COMMFUSE=use)) is expected
    cp_only = {"tensor_model_parallel_size": 1, "context_parallel_size": 2,
             "context_parallel_algo": "ulysses_cp_algo"}  # fmt: skip
    file = written(tmp_path, commfuse_options=("--use-commfuse", "--commfuse-ulysses"), **cp_only)
    assert "--commfuse-ulysses" in dry_run("llama3_8b", CONFIG=file)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"TP": "3"}, "llama3_8b.yaml: 32 attention heads, 8 query groups, a feed-forw"),
        ({"TP": "two"}, r"llama3_8b.yaml: TP \(--tensor-model-parallel-size\): 'two' is "),
        ({"TP": "1"}, "USE_COMMFUSE=1 with TP 1: a group of one has nothing to transfer;"),
        ({"USE_COMMFUSE": "yes"}, "USE_COMMFUSE is 'yes'; set it to 0 or 1"),
    ],
)
def test_what_cannot_work_is_refused_also_when_dry(variables, message) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        dry_run("llama3_8b", **variables)


@pytest.fixture
def llm(tmp_path: Path) -> dict[str, str]:
    """Variables that name a fake MindSpeed-LLM, data, a tokenizer and a torchrun.

    The torchrun records its call, prints a line on each stream, and exits with 3.
    """
    (tmp_path / "Mind Speed").mkdir()
    for name in ("Mind Speed/pretrain_gpt.py", "data_text_document.bin", "tokenizer.model"):
        (tmp_path / name).touch()
    script = tmp_path / "torchrun"
    script.write_text(
        "#!/usr/bin/env bash\n"
        f'{{ pwd; echo "$CUDA_DEVICE_MAX_CONNECTIONS $HCCL_EXEC_TIMEOUT $PYTHONPATH"; '
        f"printf '%s\\n' \"$@\"; }} > '{tmp_path}/recorded'\n"
        "echo a line; echo an error >&2; exit ${CODE:-3}\n",
        "utf-8",
    )
    script.chmod(0o755)
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "MINDSPEED_LLM_HOME": str(tmp_path / "Mind Speed"),
        "DATA_PATH": str(tmp_path / "data_text_document"),
        "TOKENIZER_MODEL": str(tmp_path / "tokenizer.model"),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"DATA_PATH": ""}, "DATA_PATH is not set; set it to the prefix of the preprocessed data"),
        ({"TOKENIZER_MODEL": "/none"}, "TOKENIZER_MODEL is '/none', but there is nothing of that"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR is not set; set it to the address of"),
        ({"NNODES": "2", "MASTER_ADDR": "a"}, "NODE_RANK is not set; set it to 0 on that node, up"),
        ({"MINDSPEED_LLM_HOME": "/"}, "there is no pretrain_gpt.py in /; start in the root of"),
        ({"PATH": "/none"}, "torchrun is not on PATH; activate the environment that torch_npu is"),
    ],
)
def test_what_is_missing_is_named_before_anything_starts(llm, change, message) -> None:
    launch_command(["llama3_8b"], llm)
    with pytest.raises(ConfigError, match=f"^{message}"):
        launch_command(["llama3_8b"], {**llm, **change})


def test_every_kind_of_run_has_its_log_and_a_dry_one_says_what_it_put_in_place(capsys) -> None:
    second = {"NNODES": "2", "NODE_RANK": "1", "DATA_PATH": "d"}
    for variables, name, missing in (
        ({"USE_COMMFUSE": "0"}, "llama2_7b", ["TOKENIZER_MODEL", "DATA_PATH"]),
        (second, "llama2_7b_commfuse_node1", ["MASTER_ADDR", "TOKENIZER_MODEL"]),
    ):
        log, _ = launch_command(["llama2_7b"], {"DRY_RUN": "1", **variables})
        assert log == f"logs/train_{name}.log"
        warnings = [f"pretrain: {key} is not set; <{key}> stands for it" for key in missing]
        assert capsys.readouterr().err.splitlines() == warnings


def test_what_is_printed_is_what_is_run_with_its_exit_code_and_a_log(llm, tmp_path) -> None:
    folders = {"CKPT_SAVE_DIR": "/save here", "CKPT_LOAD_DIR": "/it's `this`"}
    llm |= folders
    launcher = "bash", str(LAUNCHERS[3]), *ODD
    done = started(*launcher, env=llm)
    assert (done.returncode, done.stdout) == (3, "a line\nan error\n")
    log = Path(llm["MINDSPEED_LLM_HOME"], "logs", "train_llama3_8b_commfuse.log")
    assert log.read_text("utf-8") == done.stdout
    recorded = (tmp_path / "recorded").read_text("utf-8").splitlines()
    assert recorded[:2] == [llm["MINDSPEED_LLM_HOME"], f"1 3600 {ROOT}"]
    assert recorded[-2:] == list(ODD)
    for option, folder in zip(("--save", "--load"), folders.values(), strict=True):
        assert value(recorded, option) == folder
    # Pasted into a shell, it passes the same words and environment to torchrun.
    printed = started(*launcher, env=llm | {"DRY_RUN": "1"}).stdout
    assert printed.count("\n") == 1
    (tmp_path / "recorded").unlink()
    pasted = ["bash", "-c", printed]
    subprocess.run(pasted, env={"PATH": llm["PATH"], "CODE": "0"}, check=True, timeout=LIMIT)
    assert (tmp_path / "recorded").read_text("utf-8").splitlines() == recorded


def test_a_written_configuration_needs_no_launcher_of_its_model(llm, tmp_path) -> None:
    variables = llm | {"CONFIG": written(tmp_path), "CODE": "0"}
    launcher = "bash", str(LAUNCHERS[-1])
    done = started(*launcher, *ODD, env=variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert Path(llm["MINDSPEED_LLM_HOME"], "logs", "train_planned_commfuse.log").exists()
    for change, message in (
        ({"CONFIG": ""}, "pretrain: error: CONFIG is not set; set it to what commfuse-npu plan "),
        ({"TP": "3"}, "pretrain: error: planned.yaml: 32 attention heads, 8 query groups"),
    ):
        refused = started(*launcher, env=variables | change)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr.startswith(message)


@pytest.mark.parametrize("script", LAUNCHERS, ids=lambda path: path.name)
def test_a_launcher_names_its_model_and_shellcheck_finds_nothing(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=LIMIT)
    if script != LAUNCHERS[-1]:
        model = script.name.removeprefix("pretrain_").removesuffix("_ptd.sh")
        last = shlex.split(script.read_text("utf-8").splitlines()[-1])
        assert last[-2:] == [model, "$@"]
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = started("shellcheck", "--external-sources", "--source-path=SCRIPTDIR", str(script))
    assert done.returncode == 0, done.stdout
