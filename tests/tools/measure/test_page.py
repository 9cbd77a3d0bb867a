"""What is drawn of a measurement."""

from __future__ import annotations

import json
from typing import Any

from commfuse_npu.tools.measure.layer import RATIO
from commfuse_npu.tools.measure.page import _picture


def test_of_one_rank_alone_the_fastest_forms_are_drawn_by_ratio() -> None:
    seconds = {"collective": 9.0, "megatron": 8.0, "ring": 7.0, "coc-4": 5.0, "slices-4": 6.0,
               "ours-c1": 4.0, "ours-c4": 3.0, "flow-4": 2.0}  # fmt: skip
    times: list[dict[str, Any]] = [
        {"form": form, RATIO: ratio, "disturbed": False, "seconds": [one, one, one]}
        for form, one in seconds.items()
        for ratio in (0.5, 1.0)
    ]
    picture = _picture("layer", times)
    assert picture is not None
    drawn = json.dumps(picture, default=vars)
    for form in ("collective", "megatron", "coc-4", "slices-4", "flow-4", "ours-c4"):
        assert f'"{form}"' in drawn
    assert '"ring"' not in drawn
    assert '"ours-c1"' not in drawn
