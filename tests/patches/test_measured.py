"""A measured run waits for collectives at once, and says if nothing was trained."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_patches import measured


def test_collectives_of_the_tensor_parallel_group_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, other, run, waits = object(), object(), measured._Run(), []
    state = SimpleNamespace(get_tensor_model_parallel_group=lambda check_initialized: group)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)

    def all_gather_into_tensor(**given: Any) -> Any:
        return SimpleNamespace(wait=lambda: waits.append(given))

    posted = run.posted_wrapper(all_gather_into_tensor)
    posted(group=group, async_op=True)
    assert waits == [{"group": group, "async_op": True}]
    assert run.waited == ["all_gather_into_tensor"]
    for given in ({"group": other, "async_op": True}, {"group": group}, {"async_op": True}):
        posted(**given)
    # Before there are groups.
    state.get_tensor_model_parallel_group = lambda check_initialized: None
    posted(async_op=True)
    assert len(waits) == len(run.waited) == 1
    with pytest.raises(RuntimeError, match=r"never called .*\.setup_model_and_optimizer"):
        run.tell()
