"""Which versions go together, and what the text of a version says.

Read in the sources of MindSpeed-LLM, MindSpeed and Megatron-LM.
"""

from __future__ import annotations

import re

__all__ = [
    "MEGATRON",
    "NPU_TORCH",
    "SUPPORTED_LLM",
    "TOGETHER",
    "WHY_WITHOUT",
    "WITHOUT_MINDSPEED",
    "numbers",
]


SUPPORTED_LLM = ("2.2.0", "2.3.0", "26.0.0", "26.1.0")
NPU_TORCH = "2.7.1"
MEGATRON = "0.12.1"
TOGETHER = (
    "MindSpeed-LLM 2.2.0, 2.3.0, 26.0.0, 26.1.0 or master, with MindSpeed's branch "
    "<version>_core_r0.12.1 or master, and Megatron-LM core_v0.12.1"
)

WITHOUT_MINDSPEED = (0, 17)
"""From this Megatron core on MindSpeed has no layers with norm of its own any more."""
WHY_WITHOUT = (
    "from 0.17 on its layers are adapted to NPUs by MegatronAdaptor and TransformerEngineNPU, "
    "which CommFuse does not know"
)


def numbers(version: str) -> tuple[int, ...]:
    """Leading numbers: of 26.0.0dev0, 2.7.1+cpu, 8.3.RC1."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
