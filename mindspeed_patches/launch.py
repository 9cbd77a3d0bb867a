"""Run a pretraining script with CommFuse registered, without editing its source.

::

    torchrun ... -m mindspeed_patches.launch pretrain_gpt.py ... --use-commfuse

is ``torchrun ... pretrain_gpt.py ...`` with :func:`mindspeed_patches.install` called first.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from commfuse_npu.launch.options import unknown_option


def main(command: Sequence[str] | None = None, prepare: Callable[[], object] | None = None) -> None:
    """Run ``command``, a script and its arguments, by default those of this process.

    Args:
        prepare: called once the script's imports can be found, before the script runs; by default
            :func:`mindspeed_patches.install`.
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
    # Megatron would refuse it too, but only after it has listed all of its own options.
    if why := unknown_option(command[1:]):
        raise SystemExit(f"mindspeed_patches.launch: {why}")
    if find_spec("torch") is None:
        raise SystemExit(
            "mindspeed_patches.launch: torch is not installed; start it with the Python of your "
            "training"
        )
    from mindspeed_patches import install

    # From here on as if the script had been started directly.
    sys.argv = command
    folder = os.path.dirname(os.path.abspath(script))
    if getattr(sys.flags, "safe_path", False):  # not before Python 3.11
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder
    (prepare or install)()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
