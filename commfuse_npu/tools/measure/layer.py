"""Two layers of the model, forward and backward, in each form that can be launched.

By ``commfuse-npu bench`` over the links as they are, in processes of its own.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from commfuse_npu.tools.bench.standing import verdict
from commfuse_npu.tools.bench.stored import load
from commfuse_npu.tools.launch_script.bounded import last_lines, run_bounded
from commfuse_npu.tools.measure.steps import Scale, Times
from commfuse_npu.tools.ranks import RanksError

__all__ = ["layer_times"]

_VARIANTS = "collective,megatron,coc-*,auto"
"""What can be launched, and ``collective``: nothing overlapped."""


def layer_times(scale: Scale, config: str, device: str, limit: float) -> tuple[Times, list[str]]:
    """Quartiles of each form's seconds, and the benchmark's verdict; ``limit`` in seconds.

    Raises:
        RanksError: it failed, or took longer.
    """
    words = ["--works", "layers", "--ranks", str(scale.ranks), "--device", device]
    words += ["--config", config, "--variants", _VARIANTS, "--ratios", "0"]
    words += ["--dtypes", "bf16", "--scale", str(scale.shrink), "--sequence", str(scale.rows)]
    words += ["--rounds", "3" if device == "cpu" else "10"]
    with tempfile.TemporaryDirectory(prefix="commfuse-measure-") as temporary:
        path, log = Path(temporary, "bench.json"), Path(temporary, "log")
        command = [sys.executable, "-m", "commfuse_npu", "bench", *words, "--json", str(path)]
        try:
            code = run_bounded(
                command, folder=Path.cwd(), environment=os.environ, log=log, seconds=limit
            )
        except TimeoutError as error:
            raise RanksError(f"commfuse-npu bench {error}") from error
        if code:
            said = "\n".join(last_lines(log)) or f"exit code {code}"
            raise RanksError(f"commfuse-npu bench {' '.join(words)}: {said}")
        _, results, _ = load(path)
    times: Times = []
    for one in results:
        low, high = one.quartiles_ms
        seconds = [ms / 1e3 for ms in (low, one.median_ms, high)]
        times.append({"form": one.variant, "seconds": seconds})
    return times, verdict(results)
