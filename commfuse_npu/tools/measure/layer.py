"""Two layers of the model, forward and backward: Megatron's order, CoC's slices, ours.

By ``commfuse-npu bench`` over the links as they are, in a process of its own: its ranks are not
those that were asked before.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from commfuse_npu.tools.bench.processes import RanksError
from commfuse_npu.tools.bench.standing import verdict
from commfuse_npu.tools.bench.stored import load
from commfuse_npu.tools.launch_script.bounded import last_lines, run_bounded
from commfuse_npu.tools.measure.steps import Scale, Times

__all__ = ["RATIO", "layer_times"]

_VARIANTS = "collective,megatron,coc-*,auto,flow-4-coll"
"""What can be launched; ``collective`` is what nobody overlaps."""

_ALONE = "collective,megatron,coc-[48],slices-[48],ring,ours-c[148],flow-4*"
RATIO = "transfers / computation"
_RATIOS = "0.25,0.5,1,1.5"
"""Of a rank alone, whose links have the rate that they are given."""


def layer_times(
    scale: Scale, config: str, device: str, limit: float, *, one_device: bool = False
) -> tuple[Times, list[str]]:
    """The times of each form, their quartiles and median, and the benchmark's verdict.

    Args:
        limit: in seconds.
        one_device: of one rank alone, with copies as its links.

    Raises:
        RanksError: it failed, or took longer.
    """
    with tempfile.TemporaryDirectory(prefix="commfuse-measure-") as temporary:
        path = Path(temporary, "bench.json")
        words = ["--works", "layers", "--ranks", str(scale.ranks), "--device", device]
        words += ["--config", config, "--json", str(path)]
        if one_device:
            words += ["--variants", _ALONE, "--links", "one-device", "--ratios", _RATIOS]
        else:
            link = "unpaced" if device == "cpu" else "mesh"
            words += ["--variants", _VARIANTS, "--links", link, "--ratios", "1"]
        words += ["--dtypes", "bf16", "--scale", str(scale.shrink), "--sequence", str(scale.rows)]
        words += ["--rounds", "3" if device == "cpu" else "10"]
        log = Path(temporary, "log")
        try:
            code = run_bounded(
                [sys.executable, "-m", "commfuse_npu", "bench", *words],
                folder=Path.cwd(),
                environment=os.environ,
                log=log,
                seconds=limit,
            )
        except TimeoutError as error:
            raise RanksError(f"commfuse-npu bench {error}") from error
        if code:
            said = "\n".join(last_lines(log))
            raise RanksError(f"commfuse-npu bench {' '.join(words)}: {said or f'exit code {code}'}")
        _, results, _ = load(path)
    times: Times = []
    for one in results:
        low, high = one.quartiles_ms
        seconds = [ms / 1e3 for ms in (low, one.median_ms, high)]
        of: dict[str, Any] = {"form": one.variant, "disturbed": one.inconclusive}
        if one_device:
            of[RATIO] = one.setting.ratio
        times.append({**of, "seconds": seconds})
    return times, [line.replace("**", "") for line in verdict(results)]
