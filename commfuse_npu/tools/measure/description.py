"""What was measured as a description for ``simulate --hardware``."""

from __future__ import annotations

from typing import Any

from commfuse_npu.tools.config_file import find_config, read_config
from commfuse_npu.tools.measure.figures import Measured, Peaks, figures

__all__ = ["description"]

_PARTS = ("low", "typical", "high")


def description(
    base: str, name: str, measured: Measured, facts: dict[str, Any], source: str
) -> str:
    """A description in yaml: what was measured in place of the figures of another one.

    Args:
        base: the description in ``configs/hardware`` whose peaks and unmeasured figures hold.
        name: of the machine.
        facts: of the machine; where they are known ``device bytes``, and ``cube cores``, by which
            the described peak is another one.
        source: where the figures are from; of each of them.
    """
    import yaml

    content = read_config(find_config(base, "hardware"))
    npu, inside = content["npu"], content["inside"]
    cores = npu["cores"]["typical"]
    known = (npu["cube_flops"], npu["hbm_bandwidth"], inside["rate"])
    cube, memory, link = ((one["typical"] if cores else 0.0) for one in known)
    peaks = Peaks(cores, cube, memory, link, switched=inside["topology"] == "switched")
    found = {}
    if cores and (there := facts.get("cube cores")):
        peaks = peaks._replace(cores=there, cube=peaks.cube * there / cores)
        found = {"npu.cores": (there,) * 3, "npu.cube_flops": (peaks.cube,) * 3}
    content["name"] = name
    found |= figures(measured, peaks)
    if (held := facts.get("device bytes")) is not None:
        found["npu.hbm_bytes"] = (float(held),) * 3
    for dotted, values in found.items():
        section, figure = dotted.split(".")
        content[section][figure] = {**dict(zip(_PARTS, values, strict=True)), "source": source}
    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100))
