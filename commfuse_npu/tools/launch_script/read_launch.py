"""The launch that a command line or a launch script describes."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from commfuse_npu.tools.launch_script import NoTrainingError, UsageError
from commfuse_npu.tools.launch_script.command_line import (
    NODES,
    PER_NODE,
    Launch,
    launch_of,
    starts_inference,
    starts_training,
    values,
)
from commfuse_npu.tools.launch_script.reading import Reading, read_script
from commfuse_npu.tools.launch_script.short_run import names_files
from commfuse_npu.tools.launch_script.stand_ins import RUNAWAY, Answer, StartedCommand

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.S)


def _checkout_of(folder: Path) -> Path:
    """The nearest folder, from this one up, with ``pretrain_gpt.py``; otherwise this one."""
    folders = (folder, *folder.parents)
    return next((path for path in folders if (path / "pretrain_gpt.py").is_file()), folder)


def read_launch(
    words: Sequence[str],
    checkout: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    per_node: int | None = None,
) -> Launch:
    """Read the launch that follows ``--`` on the command line.

    It may have ``cd FOLDER &&`` and assignments before it.

    Args:
        words: the command, or a launch script with its arguments.
        checkout: MindSpeed-LLM's folder, in which launch scripts are started; by default the
            nearest one from the script's folder up, or that folder.
        environ: environment of launch scripts.
        per_node: number of processes on each node, if the launch does not say it.

    Raises:
        UsageError: it is not a launch, the script starts none, or it depends on a command that is
            not run.
    """
    typed = list(words[words.index("&&") + 1 :] if "&&" in words else words)
    assigned = {}
    while typed and (match := _ASSIGNMENT.fullmatch(typed[0])):
        assigned[match[1]] = match[2]
        del typed[0]
    script = typed[1:] if typed and Path(typed[0]).name in ("bash", "sh") else typed
    if script and script[0].endswith(".sh"):
        launch = _from_shell(script, checkout, {**environ, **assigned}, per_node)
        launch.environment = {**assigned, **launch.environment}
        return launch
    if read := launch_of(typed, str(Path.cwd()), assigned):
        _require_sizes(read, per_node, "is not a number here")
        return read
    raise UsageError(
        f"the launch {' '.join(words[:6])!r} is none that can be read; give "
        "pretrain_gpt.py ARGS, torchrun ... pretrain_gpt.py ARGS, or a launch script"
    )


def _require_sizes(launch: Launch, per_node: int | None, why: str) -> None:
    """Fill in a number of processes per node that the launch does not say, and ``why`` not."""
    way_out = "set the variable that it comes from, or give the command line of torchrun after --"
    if launch.nodes == 0:
        raise UsageError(f"the number of nodes {why}; {way_out}")
    if launch.per_node == 0:
        if per_node is None:
            raise UsageError(
                f"the number of processes per node {why}; give it (plan has --nproc-per-node N), "
                f"{way_out}"
            )
        launch.per_node = per_node


# ------------------------------------------------------------------ what a script would start

_NOT_THE_LAUNCHS = {
    *("BASH_ENV", "PWD", "OLDPWD", "SHLVL", "_", "PATH", "PYTHONHOME", "COMMFUSE_LINE"),
    *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"),
}
"""Variables of the shell itself, of the reading, or specific to a single start."""
_ANSWER = Answer("3\n", 0)
_WRITTEN = re.compile(r"(?<![<&\d])>>?\s*([^\s;&|<>()]+)")
_USED = re.compile(r"(?:(?:^|[\s;(])(?:source|\.|bash|sh)\s|\$\(cat\s|<)\s*([^\s;&|<>()]+)", re.M)
"""The files of redirections, and those that a script takes something from."""
_STARTS = re.compile(r"(^|[\s/\"'])(torchrun|\S+\.sh|\S+\.py)(?=[\s\"']|$)")
"""What a command that is not run may start a training by."""


def _from_shell(
    words: Sequence[str],
    checkout: Path | None,
    environ: Mapping[str, str],
    per_node: int | None,
) -> Launch:
    """The first training that a script starts."""
    file = Path(words[0]).expanduser()
    folder = checkout or _checkout_of(file.resolve().parent)
    script = next((path for path in (file, folder / file) if path.is_file()), None)
    if script is None:
        raise UsageError(f"there is no launch script {file} here or in {folder}")
    read = partial(read_script, [str(script.resolve()), *words[1:]], folder, environ)
    reading = read(_ANSWER)
    not_run = [record for record in reading.records if _is_not_run(record)]
    if not reading.trainings:
        raise _without_training(script, reading, not_run)
    first, *others = reading.trainings
    launch = _launch_of(first, environ)
    text = script.read_text("utf-8", "replace")
    launch.notes += _notes(reading, launch, text)
    if any(_differences(first, other) for other in others):
        count = 1 + len(others)
        launch.notes.append(f"{script.name} starts {count} trainings; this is about the first")
    changing = _changing(read, first, text) if not_run else set()
    used = [record for record in not_run if record.used] or not_run
    commands = ", ".join(list(dict.fromkeys(f"`{record}`" for record in used))[:3])
    depends = f"depends on {commands}, which the reading of a script does not run"
    launch.nodes = 0 if NODES in changing else launch.nodes
    launch.per_node = 0 if PER_NODE in changing else launch.per_node
    sizes = changing & {NODES, PER_NODE}
    _require_sizes(launch, per_node, depends if sizes else "is empty or 0 here")
    for name in sorted(changing - sizes):
        if not names_files(name):
            raise UsageError(
                f"{name} of the launch {depends}; give the command line of torchrun after --"
            )
        launch.notes.append(f"{name} {depends}")
    return launch


def _changing(read: Callable[..., Reading], training: StartedCommand, text: str) -> set[str]:
    """Options of a training that depend on commands that are not run.

    They change if the script is read with other answers of such commands: another number, the
    script's text, in which a ``grep`` finds what it looks for, and a failure.

    Args:
        read: the script, with an answer.
        text: of the script.
    """

    def changed(answer: Answer) -> set[str]:
        other = read(answer, first_only=True)
        if other.trainings:
            return _differences(training, other.trainings[0])
        # A failure may end the script before.  So does a text that it takes for a number, which may
        # be the number of processes.
        return {PER_NODE} if answer.text else set()

    # Without options and, once more, without operators of patterns; as comments, because a script
    # may evaluate what a command prints.
    plain = text.replace("--", "")
    lines = [*plain.splitlines(), *re.sub(r"[\\*+?^]", "", plain).splitlines()]
    found = "".join(f"# {line} {number}\n" for number, line in enumerate(lines, 1))
    answers = (Answer("7\n", 0), Answer(found, 0), Answer("", 1))
    names = set().union(*map(changed, answers))
    # The time of a reading and its process id change, too.
    return names - changed(_ANSWER) if names else names


def _is_not_run(record: StartedCommand) -> bool:
    """Whether a command would have printed or done something that the script may depend on."""
    name = record.words[0]
    return not (
        starts_training(record.words) or name in (RUNAWAY, "cd", "sleep") or name[:1] == "-"
    )


def _launch_of(record: StartedCommand, environ: Mapping[str, str]) -> Launch:
    changed = {
        name: value
        for name, value in record.environment.items()
        if environ.get(name) != value and name not in _NOT_THE_LAUNCHS
    }
    launch = launch_of(record.words, record.folder, changed)
    assert launch is not None
    return launch


def _differences(training: StartedCommand, other: StartedCommand) -> set[str]:
    """Options in which two trainings differ."""
    here = values(training.words)
    there = values(other.words)
    return {name for name in here.keys() | there.keys() if here.get(name) != there.get(name)}


def _without_training(
    script: Path, reading: Reading, not_run: Sequence[StartedCommand]
) -> UsageError:
    if any(starts_inference(record.words) for record in reading.records):
        return NoTrainingError(f"{script} starts no training but an inference; give a training")
    starting = [record for record in not_run if _STARTS.search(f"{record}")]
    elsewhere = [record for record in starting if "python" not in record.words[0]]
    if elsewhere:
        return UsageError(
            f"{script} starts it by `{elsewhere[-1]}` ({elsewhere[-1].line}), which is not read "
            "here; give the command line of torchrun inside after --"
        )
    if reading.ended:
        return UsageError(
            f"{script} {reading.ended} and has started no training; set the variables that it "
            "asks for, or give the command line of torchrun after --"
        )
    called = [f"{record}"[:80] for record in not_run]
    lines = reading.printed.decode("utf-8", "replace").strip().splitlines()
    *_, last = [line for line in lines if "_commfuse" not in line] or ["nothing"]  # of set -x
    shown = "".join(filter(str.isprintable, last))[:200]
    kind = UsageError if reading.code else NoTrainingError
    return kind(
        f"{script} starts no pretraining: it ended with code {reading.code}, started "
        f"{', '.join(called) or 'nothing'}, and printed last: {shown}; set the "
        "variables that it asks for, or give the command line of torchrun after --"
    )


def _notes(reading: Reading, launch: Launch, text: str) -> list[str]:
    """Remarks on what may surprise in how a script was read."""
    notes = [
        f"the script uses {file}, which it writes itself: a reading does not write it"
        for file in sorted({*_WRITTEN.findall(text)} & {*_USED.findall(text)})
    ]
    for record in reading.records:
        if record.words[0] == "cd":
            notes.append(f"{record.line}: there is no folder for `{record}`")
        elif record.words[0].startswith("-"):
            notes.append(
                f"{record.line}: bash takes `{record}` for a command of its own, because a "
                "comment or a line without \\ ended the command before it"
            )
    if strays := [word for word in launch.options.words if word.startswith("#")]:
        notes.append(
            f"{' '.join(strays)}: a # inside quotes begins no comment; the words after it are "
            f"options of {launch.script}"
        )
    if b"here-document" in reading.printed:
        notes.append(
            "this bash writes here-documents into files, which a reading does not; 5.1 does not"
        )
    return notes
