"""The launchers: their commands, their refusals, and the exit code of the command they ran."""

import dataclasses
import os
import shlex
from pathlib import Path

import pytest

from commfuse_npu.tools.model_config import ModelConfig
from tests.launchers.launching import FILES, MODELS, NODE, ROOT, SCRIPTS, dry_run, launch, started


def value(words: list[str], option: str) -> str:
    assert words.count(option) == 1, option
    return words[words.index(option) + 1]


@pytest.mark.parametrize("model", MODELS)
def test_what_is_started_and_for_whom(model: str) -> None:
    fused, plain = dry_run(model), dry_run(model, USE_COMMFUSE="0")
    script = fused.index("pretrain_gpt.py")
    assert fused[script - 2 : script] == ["-m", "mindspeed_patches.launch"]
    tokenizer = "--tokenizer-model" if "llama2" in model else "--tokenizer-name-or-path"
    assert value(fused, tokenizer) == "/tokenizer"
    # Everything else is the same.
    option = "--commfuse-overlap" if model == "llama2_70b" else "--use-commfuse"
    extra = ["-m", "mindspeed_patches.launch", option]
    assert [word for word in fused if word not in extra] == plain
    assert [word for word in extra if word in plain] == []
    torchrun = "--nproc_per_node --nnodes --node_rank --master_addr --master_port"
    assert plain[0] == "torchrun"
    assert plain[1 : plain.index("pretrain_gpt.py") : 2] == torchrun.split()
    script = SCRIPTS / f"pretrain_{model}_ptd.sh"
    done = started(str(script), env={**os.environ, **NODE, **FILES, "DRY_RUN": "1"})
    assert shlex.split(done.stdout) == fused


@pytest.mark.parametrize(
    ("arguments", "variables", "expected"),
    [
        ("", {}, {"--nproc_per_node": "8", "--nnodes": "1", "--num-query-groups": "8",
                  "--rotary-base": "500000", "--norm-epsilon": "1e-05", "--master_port": "6001"}),
        ("", {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "7"},
         {"--nnodes": "2", "--node_rank": "1", "--master_addr": "node0", "--master_port": "7"}),
        ("", {"PP": "2", "CP": "2", "TP": "2", "NUM_LAYER_LIST": "15,17"},
         {"--num-layer-list": "15,17", "--context-parallel-size": "2"}),
        ("", {"CKPT_LOAD_DIR": "/it's `this`", "CKPT_SAVE_DIR": "/save here"},
         {"--load": "/it's `this`", "--save": "/save here", "--no-load-optim": "--no-load-rng"}),
        ("", {"CKPT_LOAD_DIR": "/a", "CKPT_SAVE_DIR": "/a"},
         {"--load": "/a", "--save": "/a", "--no-load-optim": None}),
        ("", {"TP": "1", "USE_COMMFUSE": "0"}, {"--sequence-parallel": None}),
        ("--mock-data --tokenizer-type NullTokenizer --vocab-size 9",
         {"DATA_PATH": "", "TOKENIZER_MODEL": ""},
         {"--data-path": None, "--tokenizer-model": None, "--tokenizer-name-or-path": None}),
        ("--data-path=/x --tokenizer-name-or-path /t", {"DATA_PATH": "", "TOKENIZER_MODEL": ""},
         {"--data-path": None, "--tokenizer-name-or-path": "/t"}),
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


def written(folder: Path, **changes: object) -> str:
    """The path of a configuration as ``commfuse-npu plan --write`` writes it."""
    config = dataclasses.replace(ModelConfig.load(ROOT / "configs" / "llama3_8b.yaml"), **changes)
    (folder / "planned.yaml").write_text(config.as_yaml(), "utf-8")
    return str(folder / "planned.yaml")


def test_a_written_configuration_takes_the_place_of_the_models(tmp_path: Path) -> None:
    options = ("--use-commfuse", "--commfuse-lanes", "3")
    more = ("--mock-data", "--overlap-grad-reduce", "--recompute-granularity", "full")
    layout = {"tensor_model_parallel_size": 4, "nnodes": 2}
    file = written(tmp_path, pretrain_options=more, commfuse_options=options, **layout)
    words = dry_run("llama2_7b", "--commfuse-chunks", "2", CONFIG=file)
    line = " ".join(words)
    for given in ("tensor-model-parallel-size 4", "nnodes 2", "seq-length 8192", *[" ".join(more)]):
        assert given in line
    assert " ".join(options) in line
    assert "--data-path" not in words
    plain = dry_run("--lr=1e-5", CONFIG=file, USE_COMMFUSE="0")
    assert "commfuse" not in " ".join(plain)
    assert "--overlap-grad-reduce" in plain
    # The file also decides whether CommFuse is used.
    file = written(tmp_path, commfuse_options=())
    for use, expected in (("", False), ("0", False), ("1", True)):
        assert ("--use-commfuse" in dry_run("llama3_8b", CONFIG=file, USE_COMMFUSE=use)) is expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"MODEL": "--lr"}, "CONFIG: set it to what commfuse-npu plan --write FILE has written"),
        ({"TP": "3"}, "llama3_8b: 32 attention heads, 8 query groups and feed-forward width 14"),
        ({"TP": "two"}, "--tensor-model-parallel-size: 'two' is "),
        ({"USE_COMMFUSE": "yes"}, "USE_COMMFUSE is 'yes'; set it to 0 or 1"),
        ({"DATA_PATH": ""}, "DATA_PATH: set it to the prefix of the preprocessed data, or pass --"),
        ({"TOKENIZER_MODEL": ""}, "TOKENIZER_MODEL: set it to the folder of the tokenizer"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR: set it to the address of node 0"),
        ({"NNODES": "2", "MASTER_ADDR": "a"}, "NODE_RANK: set it to 0 on node 0, 1 on node 1"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(variables, message) -> None:
    done = launch(variables.pop("MODEL", "llama3_8b"), **{**FILES, **variables})
    assert done.returncode != 0
    assert message in done.stderr
    assert done.stderr.count("\n") <= 4
    assert done.stdout == ""


@pytest.fixture
def llm(tmp_path: Path) -> dict[str, str]:
    """Variables that name a fake MindSpeed-LLM, and a torchrun on the path.

    The torchrun records its call, prints a line on each stream, and exits with 3.
    """
    (tmp_path / "Mind Speed").mkdir()
    script = tmp_path / "torchrun"
    script.write_text(
        "#!/usr/bin/env bash\n"
        f'{{ pwd; echo "$CUDA_DEVICE_MAX_CONNECTIONS $HCCL_EXEC_TIMEOUT $PYTHONPATH"; '
        f"printf '%s\\n' torchrun \"$@\"; }} > '{tmp_path}/recorded'\n"
        "echo a line; echo an error >&2; exit ${CODE:-3}\n",
        "utf-8",
    )
    script.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    return {"PATH": path, "MINDSPEED_LLM_HOME": str(tmp_path / "Mind Speed"), **FILES}


def test_the_printed_command_is_run_and_logged(llm, tmp_path) -> None:
    words = "llama3_8b", "--tensorboard-dir", 'a "b"'
    llm |= {"CKPT_SAVE_DIR": "/save here", "HCCL_EXEC_TIMEOUT": "60", "PYTHONPATH": "/other"}
    done = launch(*words, **llm)
    assert (done.returncode, done.stdout) == (3, "a line\nan error\n")
    log = Path(llm["MINDSPEED_LLM_HOME"], "logs", "train_llama3_8b_commfuse.log")
    assert log.read_text("utf-8") == done.stdout
    folder, environment, *recorded = (tmp_path / "recorded").read_text("utf-8").splitlines()
    assert (folder, environment) == (llm["MINDSPEED_LLM_HOME"], f"1 60 {ROOT}:/other")
    assert recorded[-2:] == list(words[1:])
    assert value(recorded, "--save") == "/save here"
    printed = launch(*words, **llm, DRY_RUN="1").stdout
    assert printed.count("\n") == 1
    assert shlex.split(printed) == recorded


def test_every_kind_of_run_has_its_log(llm, tmp_path) -> None:
    second = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a"}
    for variables in ({"USE_COMMFUSE": "0"}, second, {"CONFIG": written(tmp_path)}):
        assert launch("llama2_7b", **llm, **variables, CODE="0").returncode == 0
    names = {path.name for path in Path(llm["MINDSPEED_LLM_HOME"], "logs").iterdir()}
    kinds = "llama2_7b", "llama2_7b_commfuse_node1", "planned_commfuse"
    assert names == {f"train_{kind}.log" for kind in kinds}
