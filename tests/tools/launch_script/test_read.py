"""Reading launches: options as data, and torchrun's forms."""

from pathlib import Path

import pytest

from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.launch_script.option_words import Options
from commfuse_npu.tools.launch_script.read_launch import read_launch

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
