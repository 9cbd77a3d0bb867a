"""What a step asks, and what it makes of the answers."""

from __future__ import annotations

from typing import Any

import pytest

from commfuse_npu.tools.bench.processes import RanksError
from commfuse_npu.tools.config_file import find_config
from commfuse_npu.tools.measure.steps import STEPS, Scale, Times
from commfuse_npu.tools.model_config import ModelConfig

CONFIG = ModelConfig.load(find_config("llama3_8b"))


def asked(step: str, *, ranks: int = 2, **answers: Any) -> Times:
    """A step of ranks whose answers are known: a value, or what makes one of the arguments."""

    def ask(method: str, *args: Any, **flags: Any) -> list[Any]:
        answer = answers[method]
        return list(answer(*args, **flags) if callable(answer) else answer)

    (found,) = [one for one in STEPS if one.name == step]
    assert found.ask is not None
    return found.ask(ask, Scale.of(CONFIG, ranks, "npu"))


def test_a_pipeline_that_hangs_says_what_worked() -> None:
    times = [{"lanes": [1e-3], "pipeline": [2e-3], "both": [2e-3]}] * 8

    def hangs(size: int, lanes: int, calls: int) -> list[dict[str, list[float]]]:
        if lanes == 4:
            raise RanksError("no answer within 120 s\n")
        return times

    with pytest.raises(RanksError, match=r"no answer within 120 s \(.* 4 at once; worked: 1, 2\)$"):
        asked("pipelines", ranks=8, pipelines=hangs)
    found = asked("pipelines", ranks=8, pipelines=times)
    assert [one["lanes at once"] for one in found[::3]] == [1, 2, 4, 7]


def test_what_is_posted_is_what_the_backend_takes() -> None:
    hccl = asked("host", machine=[{"backend": "hccl"}], posting=[[2.0]], launching=[[1.0]])
    assert hccl == [{"what": "batch", "seconds": [2.0]}, {"what": "GEMM", "seconds": [1.0]}]
    gloo = asked("host", machine=[{"backend": "gloo"}], posting=lambda _, batched: [[1 + batched]])
    assert gloo == [{"what": "batch", "seconds": [2]}, {"what": "single", "seconds": [1]}]


def test_events_that_do_not_tell_are_told() -> None:
    with pytest.raises(ValueError, match="events of this device do not tell"):
        asked("host", machine=[{"backend": "hccl"}], posting=[[1.0, 0.0]], launching=[[1.0]])


def test_communicators_of_hccl_are_measured_by_the_size_of_their_buffers() -> None:
    hccl = [{"backend": "hccl"}] * 2
    found = asked("communicators", machine=hccl, communicator=lambda mb: [(0.5, mb), (0.7, 2 * mb)])
    sizes = [one["MB of a buffer"] for one in found]
    assert sizes == [1] * 3 + [20] * 3 + [200] * 3
    # Of the rank with most.
    assert [one["bytes taken"] for one in found] == [2 * size for size in sizes]
    assert all(one["seconds"] == [0.7] for one in found)


def test_memory_that_a_rank_does_not_know_is_none() -> None:
    gloo = [{"backend": "gloo"}] * 2
    found = asked("communicators", machine=gloo, communicator=[(0.5, 4096), (0.5, None)])
    assert [one["bytes taken"] for one in found] == [None] * 3


def test_a_grouped_gemm_is_left_out_where_there_is_none() -> None:
    gemm = lambda *shape, **view: [[1.0]] * 2  # noqa: E731
    there = {"one by one": [2.0], "one call": [1.0], "by": "it"}
    found = asked("shapes", gemm=gemm, row_gemms=[there, {**there, "one call": [1.5]}])
    assert found[-1]["what"] == "8 GEMMs of rows, one call"
    assert (found[-1]["seconds"], found[-1]["one call by"]) == ([1.5], "it")
    without = {**there, "one call": None, "by": "no such call"}
    left = asked("shapes", gemm=gemm, row_gemms=[without] * 2)
    assert left[-1]["what"] == "8 GEMMs of rows, one by one"
    assert (left[-1]["seconds"], left[-1]["one call by"]) == ([2.0], "no such call")
    assert left[:-1] == found[:-2]
