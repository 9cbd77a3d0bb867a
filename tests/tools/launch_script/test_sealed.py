"""Reading a script leaves files, processes and sockets as they are, whatever the script does."""

import hashlib
import os
import platform
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from commfuse_npu.tools.launch_script import UsageError, sealed
from commfuse_npu.tools.launch_script.read_launch import read_launch
from tests.limits import LIMIT

# If the seal were broken, nothing here would harm more than what the tests own.
TRAIN = "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 4 --num-layers 3"
SCRIPTS = {
    "signals": "kill $(cat pid); kill -9 $(cat pid); /bin/kill -9 $(cat pid); ",
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


CALLS = """
os.open("log", os.O_RDWR); os.open("log", os.O_TRUNC); os.open("new", os.O_CREAT)
os.open(".", os.O_TMPFILE | os.O_RDWR); open(f"/proc/{pid}/oom_score_adj", "w").write("9")
libc.syscall(437, -100, b"log", (ctypes.c_ulong * 3)(os.O_WRONLY | os.O_TRUNC), 24)
libc.syscall(425, 8, 0); os.truncate("log", 0); os.ftruncate(file, 0)
os.chmod("log", 0); os.fchmod(file, 0); os.chown("log", 1, 1); os.utime("log"); os.utime(file)
os.setxattr("log", "user.a", b"b"); os.removexattr("log", "user.a"); os.remove("log")
os.rename("log", "new"); os.link("log", "new"); os.symlink("log", "new"); os.mkdir("new")
os.rmdir("folder"); os.mkfifo("new"); os.mknod("new"); os.sync(); fcntl.flock(file, fcntl.LOCK_EX)
fcntl.lockf(file, fcntl.LOCK_SH); fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
os.kill(pid, 9); libc.tgkill(pid, pid, 9); libc.syscall(424, file, 9, 0, 0)
signal.pidfd_send_signal(os.pidfd_open(pid), 9); libc.ptrace(16, pid, 0, 0)
fcntl.fcntl(pipe, fcntl.F_SETOWN, pid); fcntl.fcntl(pipe, 10, 9)
fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK); os.write(writer, b"x")
socket.create_connection(("127.0.0.1", port)); socket.socketpair(); socket.socket(socket.AF_UNIX)
os.setpriority(os.PRIO_PROCESS, pid, 9); os.nice(9)
os.sched_setaffinity(pid, {0}); os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
resource.prlimit(pid, resource.RLIMIT_NOFILE, (9, 9)); libc.unshare(0x10000000)
resource.setrlimit(resource.RLIMIT_CORE, (99, 99)); os.setsid(); os.setpgid(0, 0)
libc.shmget(77, 99, 0o1600); libc.msgget(77, 0o1600)
os.open("other", os.O_WRONLY); os.close(0); os.fstat(0)
"""


def test_no_call_of_a_sealed_process_has_an_effect(user, tmp_path: Path) -> None:
    """Each is tried alone; names are those of Python and of the C library."""
    process, server = user
    (tmp_path / "folder").mkdir()
    (tmp_path / "log").write_text("aaa")
    calls = [call.strip() for call in re.split(r"[;\n]", CALLS)]
    program = f"""
import ctypes, fcntl, os, resource, signal, socket
libc, pid, port = ctypes.CDLL(None), {process.pid}, {server.getsockname()[1]}
file, (pipe, writer) = os.open("log", os.O_RDONLY), os.pipe()
for call in {calls!r}:
    try:
        exec(call)
    except (OSError, ValueError, AttributeError):
        pass
print(os.getpgrp(), os.getsid(0), resource.getrlimit(resource.RLIMIT_CORE))
"""
    read_end, write_end = os.pipe()
    before = state(tmp_path), about(process.pid)
    with open(read_end) as output:
        with open(write_end, "wb"):
            started = sealed.start_sealed(
                [sys.executable, "-I", "-c", program],
                sealed.filter_here(),
                folder=tmp_path,
                environment=os.environ,
                output=write_end,
                keep=write_end,
            )
        printed = output.read()
    assert (started.wait(LIMIT), printed) == (0, f"{started.pid} {started.pid} (0, 0)\n")
    assert (state(tmp_path), about(process.pid)) == before
    assert process.poll() is None
    with pytest.raises(BlockingIOError):
        server.accept()


def about(pid: int) -> tuple[object, ...]:
    """What others can set of a process."""
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    score = Path(f"/proc/{pid}/oom_score_adj").read_text()
    scheduling = os.sched_getaffinity(pid), os.sched_getscheduler(pid)
    return limits, score, os.getpriority(os.PRIO_PROCESS, pid), *scheduling


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
