"""Reading launches: options as data, torchrun's forms, shell scripts that must not run."""

import os
import sys
from pathlib import Path

import pytest

from commfuse_npu.tools.launch_script import UsageError, short_run
from commfuse_npu.tools.launch_script.launch import capture_commands, read_launch
from commfuse_npu.tools.launch_script.options import Options
from tests.processes import ended, wait_for

ARGS = ["--num-layers", "2", "--bf16"]
TORCHRUN = "--nproc_per_node 4 --nnodes 2 --node_rank 0"


def test_options_keep_their_order_and_note_changes() -> None:
    words = "--a 1 --flag --path x y --b=2 --min -1 --a 3"
    options = Options(words.split())
    assert (options.values("--path"), options.values("--min")) == (["x", "y"], ["-1"])
    assert options.number("--b", 0) == 2
    options.set("--a", 3)
    assert not options.changes
    options.set("--a", 5, why="because")
    options.drop("--path", "--absent", "--min")
    options.set("--new")
    assert options.words == ["--a", "5", "--flag", "--b", "2", "--new"]
    assert options.changes == [
        "--a 3 -> 5   (because)",
        "--path x y -> (dropped)",
        "--min -1 -> (dropped)",
        "--new (not given) -> given",
    ]


@pytest.mark.parametrize(
    ("before", "processes"),
    [
        ("", None),
        (f"torchrun {TORCHRUN}", 8),
        ("cd /llm && A=b torchrun --nproc-per-node=4", 4),
        # Examples before their placeholders are filled in.
        ("torchrun --master_addr your node IP --nproc_per_node 4 --node_rank --tee=3", 4),
        ("torchrun -r 3 --nproc_per_node 4 -t 3 --nnodes=2 --tee 3", 8),
        (f"python -m torch.distributed.launch --use_env {TORCHRUN}", 8),
        (f"python3 -u -m torch.distributed.run {TORCHRUN}", 8),
        (f"torchrun {TORCHRUN} -m mindspeed_patches.launch", 8),
        ("python -m mindspeed_patches.launch", None),
    ],
)
def test_forms_of_a_launch(before: str, processes: int | None, tmp_path: Path) -> None:
    launch = read_launch([*before.split(), "pretrain_gpt.py", *ARGS], tmp_path)
    assert launch.script == "pretrain_gpt.py"
    assert launch.options.words == ARGS
    assert launch.processes == processes
    with pytest.raises(UsageError, match=r"there is no pretrain_gpt\.py"):
        launch.located(tmp_path)
    (tmp_path / "pretrain_gpt.py").touch()
    assert launch.located(tmp_path) == (tmp_path, (tmp_path / "pretrain_gpt.py").resolve())
    launch.folder = tmp_path / "own"  # it goes before the checkout
    launch.folder.mkdir()
    (launch.folder / "pretrain_gpt.py").touch()
    assert launch.located(tmp_path)[0] == launch.folder


@pytest.mark.parametrize("words", ["ls -l", "torchrun --nproc_per_node 2 -m other x.py", "a.txt"])
def test_what_is_no_launch_is_refused(words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"pretrain_gpt\.py ARGS"):
        read_launch(words.split(), tmp_path)


# ------------------------------------------------------------------ shell scripts

SCRIPT = """\
#!/bin/bash
set -e
export SOME_SETTING=on
cd "$(dirname "$0")"
DATA_PATH="your data path"
NPUS_PER_NODE=4; NNODES=2
DISTRIBUTED_ARGS="
    --nproc_per_node $NPUS_PER_NODE \\
    --nnodes $((NNODES))
"
GPT_ARGS="
    --num-layers 2 \\

    --bf16 \\
"
mkdir -p made
touch touched
npu-smi info
rm -rf precious
python preprocess_data.py --output made
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py $GPT_ARGS --data-path $DATA_PATH "$@" | tee train.log
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "pretrain_it.sh"
    path.write_text(SCRIPT, "utf-8")
    (tmp_path / "precious").mkdir()
    return path


def test_a_launch_script_is_read_and_does_nothing(script: Path) -> None:
    launch = read_launch(["bash", str(script), "--lr", "1e-3"], script.parent)
    assert (launch.script, launch.processes) == ("pretrain_gpt.py", 8)
    words = "--num-layers 2 --bf16 --data-path your data path --lr 1e-3"
    assert launch.options.words == words.split()
    assert launch.folder == script.parent.resolve()
    assert launch.environment["SOME_SETTING"] == "on"
    assert {"PATH", "PWD", "SHLVL"}.isdisjoint(launch.environment)
    assert sorted(p.name for p in script.parent.iterdir()) == ["precious", "pretrain_it.sh"]


def test_neither_torchrun_nor_python_can_be_brought_back(script: Path, tmp_path: Path) -> None:
    """Neither through PATH nor by an absolute path."""
    (tmp_path / "torchrun").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n", "utf-8")
    (tmp_path / "torchrun").chmod(0o755)
    script.write_text(f'export PATH="{tmp_path}:$PATH"\n{SCRIPT}', "utf-8")
    assert read_launch([str(script)], script.parent).processes == 8
    started = f'open("{tmp_path}/started", "w")'
    script.write_text(f"{sys.executable} -c '{started}' pretrain_gpt.py\n", "utf-8")
    with pytest.raises(UsageError, match="starts no pretraining"):
        read_launch([str(script)], script.parent)
    assert not (tmp_path / "started").exists()


def test_a_training_in_the_background_is_read(script: Path) -> None:
    script.write_text("torchrun pretrain_gpt.py --bf16 > log 2>&1 &\nexit 3\n", "utf-8")
    assert read_launch([str(script)], script.parent).options.words == ["--bf16"]
    assert not (script.parent / "log").read_text("utf-8")


def test_two_trainings_are_noted_and_assignments_reach_the_script(script: Path) -> None:
    script.write_text(
        "torchrun --nproc_per_node $COUNT pretrain_gpt.py --bf16\n"
        "python -m torch.distributed.launch --nproc_per_node 4 pretrain_gpt.py --fp16\n",
        "utf-8",
    )
    launch = read_launch(["COUNT=2", "bash", str(script)], script.parent)
    assert (launch.processes, launch.environment["COUNT"]) == (2, "2")
    assert launch.notes == ["pretrain_it.sh starts 2 trainings; this is about the first"]


@pytest.mark.parametrize("trap", ["", "trap '' TERM\n"])
def test_what_hangs_is_killed_with_what_it_started(trap, script, tmp_path, monkeypatch) -> None:
    """Also if a child keeps the script's stdout open, or both ignore SIGTERM without /proc."""
    monkeypatch.setattr(short_run, "_GRACE", 0.1)
    if trap:
        monkeypatch.setattr(short_run, "_marked", lambda mark: [])
    script.write_text(f"{trap}/bin/sleep 1000 & echo $! > {tmp_path}/child\nwait\n", "utf-8")
    with pytest.raises(UsageError, match=r"did not end within 0\.5 s"):
        capture_commands([str(script)], tmp_path, dict(os.environ), timeout=0.5)
    wait_for(lambda: ended(int((tmp_path / "child").read_text())))
