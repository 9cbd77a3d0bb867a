"""Reading a script leaves files, processes and sockets as they are, whatever the script does."""

import hashlib
import platform
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from commfuse_npu.tools.launch_script import UsageError, sealed
from commfuse_npu.tools.launch_script.launch import read_launch

TRAIN = "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 4 --num-layers 3"
SCRIPTS = {
    "signals": "kill $(cat pid); kill -9 -1; /bin/kill -9 $(cat pid); pkill -9 sleep; ",
    "redirections": ": > log; >| settings; echo new >> log; exec 3<> settings; echo x >&3; ",
    "functions": "stop() { kill -KILL $1; echo stopped > status; }; stop $(cat pid); ",
    "editors": "sed -i s/a/b/ settings; /bin/sed -i.bak d settings; perl -pi -e s/a/b/ settings; ",
    "programs by path": "/bin/rm -rf folder; /bin/mv log gone; /usr/bin/touch new; /bin/ln log l; ",
    "Python by path": '/usr/bin/python3 -I -c \'open("log", "w"); open("new", "w")\'; ',
    "perl": '/usr/bin/perl -e \'unlink "log"; kill 9, $ARGV[0]; mkdir "m"\' $(cat pid); ',
    "sockets": "echo x > /dev/tcp/127.0.0.1/$(cat port); exec 5<> /dev/tcp/127.0.0.1/$(cat port); ",
    "evaluation": "C='rm -rf folder; > log'; eval \"$C\"; X='$(rm log)'; eval \"Y=$X\"; ",
    "arithmetic": "a=(0); i='a[$(> log; kill $(cat pid))]'; echo $((i)) $((a[$(rm log)])); ",
    "sub-shells": "( > log; rm settings ) & { > settings; } & (cd folder && rm -r ./* ..) ; wait; ",
    "traps": "trap '> log; kill $(cat pid)' EXIT ERR DEBUG; false; ",
    "coprocess": "coproc { > log; cat > settings; }; echo new >&${COPROC[1]}; ",
    "later": "(sleep 0.2; > log; kill $(cat pid)) & disown; (env -i setsid sh -c '> log') & ",
    "sizes and modes": "truncate -s 0 log; /bin/truncate -s 0 pid; chmod 777 log; chown 1 log; ",
    "pipes and links": "mkfifo p; mkfifo p > p; ln -sf /dev/null log; cp pid log; mktemp ./XXXX; ",
    "locks": "exec 9< log; flock -n 9; flock log true; set -C; > new; set +C; mkdir lock; ",
    "git": "git init -q .; git -C . checkout -f; /usr/bin/git init . ; ",
    "awk and find": 'awk \'BEGIN{print > "log"; system("rm log")}\'; find . -delete; ',
    "xargs and tee": "echo log pid | xargs rm -f; echo x | tee log; echo x | /usr/bin/tee log; ",
    "here-documents": "cat > log <<X\nnew\nX\ncat <<X > settings\nnew\nX\ntar xf log; dd of=log; ",
    "other shells": "sh -c '> log'; /bin/dash -c '> log; rm pid'; bash -c 'rm *'; env sh -c rm; ",
    "limits": "ulimit -c unlimited; renice 19 $(cat pid); taskset -p 1 $(cat pid); sync; ",
    "exec": "exec > log 2>&1; exec 4> settings; exec bash -c '> log; $0 $@' ",
}


def state(folder: Path) -> dict[str, tuple[object, ...]]:
    """All but access times: content, mode, owner and the times of changes."""
    found: dict[str, tuple[object, ...]] = {}
    for path in (folder, *folder.rglob("*")):
        about = path.lstat()
        content = hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest()
        owner = about.st_uid, about.st_gid, about.st_nlink
        found[str(path)] = (content, about.st_mode, *owner, about.st_mtime_ns, about.st_ctime_ns)
    return found


@pytest.fixture(scope="module")
def user() -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """A process and a listening socket of the user."""
    with (
        subprocess.Popen(["sleep", "600"]) as process,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        server.setblocking(False)
        yield process, server
        process.kill()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_reading_changes_nothing(name: str, user, tmp_path: Path) -> None:
    process, server = user
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("content")
    for file, text in {"log": "aaa\n" * 99, "settings": "a=1\n", "pid": process.pid}.items():
        (tmp_path / file).write_text(f"{text}")
    (tmp_path / "port").write_text(f"{server.getsockname()[1]}")
    (tmp_path / "run.sh").write_text(f"{SCRIPTS[name]}{TRAIN} > log 2>&1\necho $! > pid\n")
    before = state(tmp_path)
    launch = read_launch([str(tmp_path / "run.sh")], tmp_path)
    assert (launch.processes, launch.options.text("--tensor-model-parallel-size")) == (8, "4")
    assert launch.options.text("--num-layers") == "3"
    assert state(tmp_path) == before
    assert process.poll() is None
    with pytest.raises(BlockingIOError):
        server.accept()


HEADERS = {
    "x86_64": "x86_64-linux-gnu/asm/unistd_64.h",
    "aarch64": "asm-generic/unistd.h",
}


@pytest.mark.parametrize("machine", HEADERS)
def test_numbers_of_calls_are_those_of_the_headers(machine: str) -> None:
    header = Path("/usr/include") / HEADERS[machine]
    if not header.is_file():
        pytest.skip(f"no {header}")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)$", header.read_text(), re.M)
    expected = {name: int(number) for name, number in found}
    expected.setdefault("newfstatat", expected.get("fstatat", 0))
    lists = (sealed.ALLOWED, sealed.PRETENDED, sealed.SIGNALS, sealed.SOCKETS, sealed.CHECKED)
    listed = sealed.numbers(";".join(lists), machine)
    listed.pop("fchmodat2")  # newer than many headers
    assert listed == {name: expected.get(name) for name in listed}


def test_other_systems_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    (tmp_path / "run.sh").write_text(TRAIN)
    with pytest.raises(UsageError, match="Linux on x86_64 and aarch64"):
        read_launch([str(tmp_path / "run.sh")], tmp_path)
