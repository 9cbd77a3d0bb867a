"""Run a pretraining script with CommFuse registered, without an edit of its source.

::

    torchrun ... -m mindspeed_patches.launch pretrain_gpt.py ... --use-commfuse

is ``torchrun ... pretrain_gpt.py ...`` with :func:`mindspeed_patches.install` called first.
"""

from __future__ import annotations

import difflib
import os
import runpy
import sys
from collections.abc import Callable, Sequence

from commfuse_npu.options import FB_OVERLAP_OPTIONS, OPTIONS, option_name
from mindspeed_patches.registration import install

__all__ = ["main"]


def main(command: Sequence[str] | None = None, prepare: Callable[[], object] = install) -> None:
    """Run ``command``, a script and its arguments, by default those of this process.

    Args:
        prepare: called where the script's imports would be found, before the script runs.
    """
    command = list(sys.argv[1:] if command is None else command)
    if not command or command[0].startswith("-"):
        raise SystemExit(
            "usage: torchrun [options] -m mindspeed_patches.launch SCRIPT [its arguments]; the "
            "script, as pretrain_gpt.py, comes first"
        )
    script = command[0]
    if not os.path.isfile(script):
        raise SystemExit(
            f"mindspeed_patches.launch: there is no script {script} in {os.getcwd()}; run it from "
            "MindSpeed-LLM's folder or give the script's path"
        )
    _check_names(command[1:])
    # As if the script had been started itself.
    sys.argv = command
    folder = os.path.dirname(os.path.abspath(script))
    if getattr(sys.flags, "safe_path", False):  # not before Python 3.11
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder
    prepare()
    runpy.run_path(script, run_name="__main__")


def _check_names(words: Sequence[str]) -> None:
    """Refuse an option that looks like ours and is none, with the one that was meant.

    Megatron would refuse it as well, after it has listed all of its own.
    """
    known = [option_name(name) for name in (*OPTIONS, *FB_OVERLAP_OPTIONS)]
    known += [f"--no-{name.removeprefix('--')}" for name in known]
    for word in words:
        name = word.partition("=")[0]
        if name.startswith(("--commfuse", "--use-commfuse", "--no-commfuse")) and name not in known:
            (near,) = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise SystemExit(f"mindspeed_patches.launch: unknown: {name}; did you mean {near}?")


if __name__ == "__main__":
    main()
