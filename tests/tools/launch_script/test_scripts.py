"""What is read of launch scripts in all usual styles, and what is asked for."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from commfuse_npu.tools.launch_script import UsageError, reading
from commfuse_npu.tools.launch_script.command_line import Launch
from commfuse_npu.tools.launch_script.read_launch import read_launch

Read = Callable[..., Launch]

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
npu-smi info
python preprocess_data.py --output made
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py $GPT_ARGS --data-path $DATA_PATH "$@" | tee train.log
"""
TRAIN = "torchrun --nproc_per_node 8 pretrain_gpt.py --bf16"


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Reads a script in a folder of its own."""
    path = tmp_path / "run.sh"

    def read_text(text: str, *words: str, **options: int) -> Launch:
        path.write_text(text, "utf-8")
        return read_launch(["SHELL_SET=2", "bash", str(path), *words], tmp_path, **options)

    return read_text


def test_a_launch_script_is_read(read: Read, tmp_path: Path) -> None:
    launch = read(SCRIPT, "--lr", "1e-3")
    assert (launch.script, launch.processes) == ("pretrain_gpt.py", 8)
    words = "--num-layers 2 --bf16 --data-path your data path --lr 1e-3"
    assert launch.options.words == words.split()
    assert launch.folder == tmp_path.resolve()
    assert launch.environment == {"SHELL_SET": "2", "SOME_SETTING": "on"}
    assert [path.name for path in tmp_path.iterdir()] == ["run.sh"]


STYLES = {
    "log in a new folder": f"mkdir -p l && cd l && {TRAIN} > l/$(date +%s).log 2>&1 < /dev/null &",
    "last argument": f"mkdir -p 8 && export TP=$_; {TRAIN.replace('8', '$TP')}",
    "append": f"OUT=$HOME/no/out; mkdir -p $OUT; {TRAIN} >> $OUT/log 2>&1",
    "nohup": f"nohup {TRAIN} > train.log 2>&1 & echo started $!",
    "nohup bash": f'nohup bash -c "{TRAIN}" > train.log 2>&1 &',
    "set -e": f"set -euo pipefail\ncat <<X > file\nX\nsource /none/set_env.sh\nfalse\n{TRAIN}",
    "prefixes": f"setsid nice -n 5 ionice -c 2 -n 0 chrt -f 9 time -p stdbuf -oL {TRAIN}",
    "numactl": f"numactl -C 0-7 --membind 0 taskset -c 0-63 timeout -s KILL 10h {TRAIN}",
    "sudo": f"sudo -E -u root env A=b C= conda run -n test --no-capture-output {TRAIN}",
    "script": f"script -q -c '{TRAIN}' log",
    "exec": f"export PATH=/usr/bin:/bin; exec > >(tee -a log) 2>&1; exec {TRAIN}",
    "variables": f"CMD='{TRAIN}'; eval \"$CMD\"",
    "which": f"$(which torchrun) {TRAIN.removeprefix('torchrun')}",
    "command": f"command $(command -v torchrun) {TRAIN.removeprefix('torchrun')}",
    "path": f"unset PYTHONPATH; {sys.executable} -m torch.distributed.run "
    + TRAIN.removeprefix("torchrun"),
    "torchrun by path": f"./bin/{TRAIN} | tee log",
    "sh": f"echo '{TRAIN}' > inner.sh; sh inner/run.sh; ./inner/run.sh",
    "xargs": f"echo 8 | xargs -I{{}} {TRAIN.replace('8', '{}')}",
    "coprocess": f"coproc {TRAIN}; wait",
    "restarts": f"while true; do {TRAIN} || true; sleep 10; done",
    "until": f"until {TRAIN} --lr 0$RANDOM; do sleep 10; done; until false; do sleep 9; done",
    "waits for a process": f"while kill -0 $PPID; do sleep 1; done; {TRAIN}",
    "waits for a port": f"until nc -z host 80; do sleep 1; done; {TRAIN}",
    "a process substitution": f"{TRAIN} > >(tee log) 2> >(tee errors >&2)",
    "heredoc": f"bash <<'X'\n{TRAIN}\nX",
    "a trap": f"trap 'kill 0' INT EXIT; trap '{TRAIN}' EXIT; exit 3",
    "a login shell": f"bash -lc '{TRAIN}'",
    "a log is followed": f"{TRAIN} & tail -f $0",
}


@pytest.mark.parametrize("style", STYLES)
def test_usual_styles_are_read(style: str, read: Read, tmp_path: Path) -> None:
    for name, text in {"bin/torchrun": f"#!{sys.executable}\n", "inner/run.sh": TRAIN}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    launch = read(f"{STYLES[style]}\n")
    assert (launch.processes, launch.options.names[0]) == (8, "--bf16")


COUNT = "torchrun --nproc_per_node $N pretrain_gpt.py --bf16"
ASKED = {
    f"N=$(npu-smi info -l | grep Total | awk '{{print $NF}}'); {COUNT}": "`npu-smi info -l`",
    f"N=$(( $(npu-smi info -l | grep -E 'NPU.*ID' | wc -l) + 1 )); {COUNT}": "`npu-smi info -l`",
    f"N=$(( $(npu-smi info | sed -n 's/.*Chips *: //p') + 1 )); {COUNT}": "`npu-smi info`",
    f"N=$(python3 -c 'import torch; print(2)'); {COUNT}": "depends on `python3 -c import torch",
    f"N=$(/usr/local/sbin/npu-smi info | wc -l); {COUNT}": "depends on `npu-smi info`",
    f"if npu-smi info > /dev/null; then N=8; else N=1; fi; {COUNT}": "depends on `npu-smi info`",
    f"N=$(ls -d /dev/davinci_none* | wc -l); {COUNT}": "processes per node is empty or 0",
    COUNT: "processes per node is empty or 0",
    COUNT.replace("$N", "auto"): "processes per node is empty or 0",
    f"torchrun --nnodes $N pretrain_gpt.py; : {COUNT}": "the number of nodes is empty or 0",
    f"{TRAIN} --num-layers $(lspci | wc -l)": "--num-layers of the launch depends on `lspci`",
    f"srun -N 2 bash run.sh; : {TRAIN}": "starts it by `srun -N 2 bash run.sh` (run.sh:1)",
    f"docker run -it image bash -c '{TRAIN}'": "starts it by `docker run -it image bash -c torc",
    f"docker run image; ssh host '{TRAIN}'": "starts it by `ssh host torchrun",
    "sbatch <<X\nsrun torchrun\nX": "started sbatch, and printed last: nothing",
    f"\nwhile [ ! -f ready ]; do sleep 60; done; {TRAIN}": "waits in run.sh:2 (`sleep 60`)",
    f"\nwhile [ ! -f ready ]; do :; done; {TRAIN}": "waits in run.sh:2 (`commands without end",
    f"\nwhile :; do ssh host ls; done; {TRAIN}": "waits in run.sh:2 (`ssh host ls`)",
}


@pytest.mark.parametrize("script", ASKED)
def test_what_a_reading_cannot_know_is_asked_for(script: str, read: Read) -> None:
    with pytest.raises(UsageError) as error:
        read(script)
    assert ASKED[script] in str(error.value)


def test_a_given_number_takes_the_place_of_a_command(read: Read) -> None:
    assert read(f"N=$(npu-smi info | wc -l); {COUNT}", per_node=16).processes == 16
    script = f"N=$(nvidia-smi | wc -l); {TRAIN} --save $(date +%N)/$RANDOM"
    launch = read(f"{script} --load $(git rev-parse HEAD)", per_node=4)
    assert launch.processes == 8
    assert [note.split()[0] for note in launch.notes] == ["--load"]


def test_a_second_training_in_a_script_is_noted(read: Read) -> None:
    launch = read(
        "torchrun --nproc_per_node $SHELL_SET pretrain_gpt.py --bf16\n"
        "python -m torch.distributed.launch --nproc_per_node 4 pretrain_gpt.py --fp16\n"
    )
    assert (launch.processes, launch.environment["SHELL_SET"]) == (2, "2")
    assert launch.notes == ["run.sh starts 2 trainings; this is about the first"]


def test_comments_that_end_a_command_are_noted(read: Read) -> None:
    launch = read(
        f'cd /no/such\nARGS="--swiglu \\\n # --lora \\\n"\n{TRAIN} \\\n $ARGS \\\n #--x \\\n --y\n'
    )
    folder, stray, command = sorted(launch.notes, key=lambda note: note[:8] == "run.sh:8")
    assert "no such" in folder.replace("/", " ")
    assert (stray[0], command[:24]) == ("#", "run.sh:8: bash takes `--")


def test_a_file_that_the_script_writes_itself_is_noted(read: Read) -> None:
    launch = read(
        f"cat <<X > $0.env\nLR=1\nX\nsource $0.env; {TRAIN} > log 2>&1; cat < /dev/null\n"
    )
    assert [note[:26] for note in launch.notes] == ["the script uses $0.env, wh"]


def test_what_hangs_is_ended(read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it started, which has neither its environment nor its session."""
    monkeypatch.setattr(reading, "_SECONDS", 0.5)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match=r"did not end within 0\.5 s"):
        read("trap '' TERM; env -i setsid sh -c 'read x < pipe' & read x < pipe\n")
    with pytest.raises(OSError, match="No such device or address"):  # nobody reads
        os.open(tmp_path / "pipe", os.O_WRONLY | os.O_NONBLOCK)
