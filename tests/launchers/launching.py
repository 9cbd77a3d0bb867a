"""The launchers as processes, with nothing in their environment but what is given."""

from __future__ import annotations

import atexit
import functools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.limits import LIMIT

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
MODELS = ("llama2_7b", "llama2_13b", "llama2_70b", "llama3_8b", "llama3_70b")


@functools.cache
def remembering_python() -> str:
    """A Python that remembers what it answered: each launch asks it five times."""
    folder = tempfile.mkdtemp(prefix="commfuse-launchers-")
    atexit.register(shutil.rmtree, folder)
    script = Path(folder) / "python"
    script.write_text(
        "#!/usr/bin/env bash\n"
        f'read -r key _ < <(printf \'%s\\n\' "$PYTHONPATH" "$@" | {shutil.which("md5sum")})\n'
        f"answer='{folder}'/$key\n"
        'if [ ! -f "$answer" ]; then\n'
        f'    \'{sys.executable}\' "$@" > "$answer" 2> "$answer.errors"\n'
        '    echo $? > "$answer.code"\n'
        "fi\n"
        'echo -n "$(< "$answer.errors")" >&2; echo "$(< "$answer")"; exit "$(< "$answer.code")"\n',
        "utf-8",
    )
    script.chmod(0o755)
    return str(script)


def launch(
    model: str, *arguments: str, cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a launcher with nothing in the environment but what is given."""
    environment = {"PATH": os.environ["PATH"], "PYTHON": remembering_python(), **variables}
    return subprocess.run(
        ["bash", str(SCRIPTS / f"pretrain_{model}_ptd.sh"), *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def dry_run(model: str, *arguments: str, **variables: str) -> list[str]:
    """The words of the command that a launcher would run, environment and all."""
    run = launch(model, *arguments, DRY_RUN="1", **variables)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("\n") == 1
    return shlex.split(run.stdout)
