"""What a step asks, and what it makes of the answers."""

from __future__ import annotations

from typing import Any

import pytest

from commfuse_npu.config_file import find_config
from commfuse_npu.tools.measure.steps import STEPS, Scale, Times
from commfuse_npu.tools.model_config import ModelConfig

CONFIG = ModelConfig.load(find_config("llama3_8b"))


def asked(step: str, *, ranks: int = 2, **answers: Any) -> Times:
    """A step of ranks whose answers are known: a value, or what makes one of the arguments."""

    def ask(method: str, *args: Any, **flags: Any) -> list[Any]:
        answer = answers[method]
        return list(answer(*args, **flags) if callable(answer) else answer)

    found = STEPS[step].ask
    assert found is not None
    return found(ask, Scale.of(CONFIG, ranks, "npu"))


def test_what_is_posted_is_what_the_backend_takes() -> None:
    hccl = asked("host", machine=[{"backend": "hccl"}], posting=[[2.0]], launching=[[1.0]])
    assert hccl == [{"what": "batch", "seconds": [2.0]}, {"what": "GEMM", "seconds": [1.0]}]
    gloo = asked("host", machine=[{"backend": "gloo"}], posting=lambda _, batched: [[1 + batched]])
    assert gloo == [{"what": "batch", "seconds": [2]}, {"what": "single", "seconds": [1]}]


def test_events_that_do_not_tell_are_told() -> None:
    with pytest.raises(ValueError, match="device events returned zero durations"):
        asked("host", machine=[{"backend": "hccl"}], posting=[[1.0, 0.0]], launching=[[1.0]])


def test_communicators_of_hccl_are_measured_by_the_size_of_their_buffers() -> None:
    hccl = [{"backend": "hccl"}] * 2
    found = asked("communicators", machine=hccl, communicator=lambda mb: [(0.5, mb), (0.7, 2 * mb)])
    sizes = [one["MB of a buffer"] for one in found]
    assert sizes == [1, 20, 200] * 3
    # Of the rank with most.
    assert [one["bytes taken"] for one in found] == [2 * size for size in sizes]
    assert all(one["seconds"] == [0.7] for one in found)


def test_memory_that_a_rank_does_not_know_is_none() -> None:
    gloo = [{"backend": "gloo"}] * 2
    found = asked("communicators", machine=gloo, communicator=[(0.5, 4096), (0.5, None)])
    assert [one["bytes taken"] for one in found] == [None] * 3
