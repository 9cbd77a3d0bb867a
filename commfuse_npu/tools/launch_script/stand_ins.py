"""What a launch script finds in place of programs, and the records that they leave.

The script's bash has a search path of its own.  It has real programs that only read, or whose
changes the seal discards.  ``torchrun``, Python and every unknown command are recorded and not run.
Prefixes (``nohup``, ``numactl``) start the first shell, Python or torchrun among their arguments.

A Python that is called by its path is recorded, too: ``PYTHONHOME`` is a folder whose
``encodings``, the first module that any Python imports, is the recorder.
"""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from commfuse_npu.tools.launch_script import UsageError

RUNAWAY = "commands without end"
"""The first word of the record of a shell that executed too many commands."""
_STEPS = 10_000
"""Commands of one shell after which a script is taken to wait for something."""

_REAL = """
bash cat date dirname basename readlink realpath pwd printf hostname whoami nproc wc sed awk gawk
mawk grep egrep fgrep cut tr head tail seq sort uniq expr uname arch id ls stat find xargs which
test true false getopt bc jq tac rev paste comm diff rmdir rm mv ln touch chmod chown mktemp
"""
_RECORDED = f"torchrun python python3 python3.{sys.version_info.minor} sleep"
_PREFIXES = """
nohup setsid timeout stdbuf numactl taskset nice ionice chrt env sudo su time script flock unbuffer
conda mamba micromamba
"""
_SYSTEM = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# The functions do not end a script for what is missing here: a folder, or a command that fails
# because it is sealed.  The last argument of the last command is $_ in the next one.
_SHELL = """\
set -o functrace
command_not_found_handle() { @record "$@"; }
cd() { builtin cd "$@" || @record cd "$@"; }
export COMMFUSE_LINE
_commfuse_steps=0
_commfuse_path=
_commfuse_step() {
    set +o errexit
    [ "$2" = @shell ] || COMMFUSE_LINE=${2##*/}:$1
    if (( ++_commfuse_steps > @steps )); then
        @record @runaway "$3"
        exit 1
    fi
    if [ "$PATH" != "$_commfuse_path" ]; then
        local folder IFS=:
        _commfuse_path=@programs
        for folder in $PATH; do
            case :@programs:@system: in
                *:"$folder":*) ;;
                *) _commfuse_path+=:$folder ;;
            esac
        done
        PATH=$_commfuse_path
    fi
    case ${3%%[[:space:]]*} in
        *[!A-Za-z0-9/_.+-]*) ;;
        /bin/*|/sbin/*|/usr/bin/*|/usr/sbin/*|/usr/local/bin/*|/usr/local/sbin/*)
            local command=${3%%[[:space:]]*}
            eval "function $command { ${command##*/} \\"\\$@\\"; }" ;;
    esac
}
trap '_commfuse_step "$LINENO" "${BASH_SOURCE[0]:-}" "$BASH_COMMAND" "$_"' DEBUG
"""
_PREFIX = """\
#!/bin/sh
start() {
    while [ $# -gt 0 ]; do
        case $1 in
            torchrun|*/torchrun|python*|*/python*|bash|*/bash|sh|*/sh|*.sh|*.py|@prefixes)
                exec "$@" ;;
            -*c|--command) case $2 in *" "*) exec bash -c "$2" ;; esac ;;
            [!A-Za-z_]*) ;;
            *=*) case ${1%%=*} in *[!A-Za-z0-9_]*) ;; *) export "$1" ;; esac ;;
        esac
        shift
    done
}
start "$@"
[ $# = 0 ] || @record "${0##*/}" "$@"
"""
_PROGRAMS = {
    "sh": '#!/bin/sh\nexec bash "$@"\n',
    # mkdir would look for the folder, and cp would read all that it copies.
    **dict.fromkeys(("mkdir", "cp"), "#!/bin/sh\n"),
    # The seal makes the file of tee its standard input.
    "tee": "#!/bin/sh\nexec cat\n",
    **dict.fromkeys(_RECORDED.split(), '#!/bin/sh\nexec @record "${0##*/}" "$@"\n'),
    **dict.fromkeys(_PREFIXES.split(), _PREFIX),
}

_RECORD = '#!/bin/sh\nexport PYTHONHOME=@home\nexec @python @mark "$@"\n'
# Imported before anything of the standard library: there are only built-in modules.
_RECORDER = """\
import posix

def read(path):
    file = posix.open(path, posix.O_RDONLY)
    data, piece = b"", b"-"
    while piece:
        piece = posix.read(file, 1 << 16)
        data += piece
    return data

words = read("/proc/self/cmdline").split(b"\\0")[:-1]
environment = dict(posix.environ)
if words[1:2] == [@mark]:
    words = words[2:]
if words[1:3] == [b"-m", @own_reader]:
    del environment[b"PYTHONHOME"]
    posix.execve(@python, [@python, b"-B", *words[1:]], environment)
output = posix.fstat(1)
used = output.st_mode & 0o170000 == 0o010000 and output.st_ino != @output
report = [b"%d" % used, posix.getcwdb(), b"%d" % len(words), *words]
variables = [name + b"=" + value for name, value in environment.items()]
try:
    posix.write(@report, b"\\0".join(report + variables))
except OSError:  # more than a message holds
    posix.write(@report, b"\\0".join(report))
if used:
    posix.write(1, @answer)
starts = words[0] in (b"sleep", b"torchrun") or any(word.endswith(b".py") for word in words)
posix._exit(0 if starts else @status)
"""
_OWN_READER = b"commfuse_npu.tools.model_config"
"""Our launch scripts run this module to read a configuration: it is not replaced."""
_MARK = b"commfuse-recorded"
_PYTHONS = range(6, 21)
"""Minor versions of Python that may be called by their paths."""


class Answer(NamedTuple):
    """What commands that are not run print, if anything reads it, and their exit code."""

    text: str
    status: int


class StartedCommand(NamedTuple):
    """A command that the script started.

    Attributes:
        environment: all of its variables.
        used: whether something reads what it prints.
        line: of the script, ``FILE:NUMBER``.
    """

    words: list[str]
    folder: str
    environment: dict[str, str]
    used: bool

    @property
    def line(self) -> str:
        return self.environment.get("COMMFUSE_LINE", "")

    def __str__(self) -> str:
        return "".join(filter(str.isprintable, " ".join(self.words)))[:100]


def read_record(report: bytes, programs: Path) -> StartedCommand:
    """The record in a message of a stand-in in a folder.

    Raises:
        ValueError: the message is not one of a stand-in.
    """
    used, folder, count, *rest = map(os.fsdecode, report.split(b"\0"))
    name, *arguments = rest[: int(count)]
    path = Path(name)
    variables = dict(variable.split("=", 1) for variable in rest[int(count) :])
    words = [path.name if path.parent == programs else name, *arguments]
    return StartedCommand(words, folder, variables, used == "1")


def write_stand_ins(folder: Path, answer: Answer, output: int, report: int) -> Mapping[str, str]:
    """Write the programs; returns the variables that make a bash use them.

    Args:
        output: inode of the script's own output.
        report: descriptor that records are written to.

    Raises:
        UsageError: there is no bash.
    """
    if shutil.which("bash") is None:
        raise UsageError("a launch script needs bash, which is not on PATH; give its command line")
    programs = folder / "bin"
    home = folder / "home"
    paths = {
        "programs": programs,
        "home": home,
        "record": folder / "record",
        "shell": folder / "shell",
        "python": sys.executable,
    }
    values = {name: shlex.quote(str(path)) for name, path in paths.items()} | {
        "mark": _MARK.decode(),
        "runaway": shlex.quote(RUNAWAY),
        "steps": f"{_STEPS}",
        "system": _SYSTEM,
        "prefixes": "|".join(_PREFIXES.split()),
    }
    programs.mkdir()
    for name in _REAL.split():
        if (real := shutil.which(name)) is not None:
            os.symlink(os.path.abspath(real), programs / name)
    texts = {f"bin/{name}": text for name, text in _PROGRAMS.items()}
    for name, text in {**texts, "record": _RECORD, "shell": _SHELL}.items():
        path = folder / name
        path.write_text(_filled(text, values), "utf-8")
        path.chmod(0o755)
    recorded = {"output": output, "report": report, "status": answer.status}
    _write_recorder(home, answer=answer.text.encode(), **recorded)
    return {"PATH": str(programs), "BASH_ENV": str(folder / "shell"), "PYTHONHOME": str(home)}


def _write_recorder(home: Path, **values: object) -> None:
    """Write the recorder for each Python that is started with this ``PYTHONHOME``."""
    library = home / "lib"
    library.mkdir(parents=True)
    os.symlink(library, home / "lib64")
    for minor in _PYTHONS:
        os.symlink(library, library / f"python3.{minor}")
    values |= {"mark": _MARK, "own_reader": _OWN_READER, "python": os.fsencode(sys.executable)}
    literals = {name: repr(value) for name, value in values.items()}
    (library / "encodings.py").write_text(_filled(_RECORDER, literals), "utf-8")


def _filled(text: str, values: Mapping[str, object]) -> str:
    return re.sub("@([a-z_]+)", lambda match: str(values.get(match[1], match[0])), text)
