"""What the wrappers of Megatron's bucket groups do, with exchanges that only note what is asked."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_patches.data_parallel import BucketWrappers
from mindspeed_patches.wrappers import LinearWrappers

GROUP = object()


def bucket_group(config: dict[str, Any] | None = None, **changes: Any) -> Any:
    """What the wrappers read of Megatron's class."""
    switches = "overlap_grad_reduce", "overlap_param_gather"
    usual = {"use_distributed_optimizer": True, **dict.fromkeys(switches, False)}
    bucket = SimpleNamespace(
        grad_data=torch.ones(4), param_data=torch.ones(4), gradient_scaling_factor=0.5
    )
    state = {
        "ddp_config": SimpleNamespace(**usual | (config or {})),
        "intra_distributed_optimizer_instance_group": GROUP,
        "intra_distributed_optimizer_instance_size": 2,
        "buckets": [bucket] * 2,
        "grad_reduce_handle": None,
        "param_gather_handle": None,
        "param_gather_dispatched": False,
    }
    return SimpleNamespace(**(state | changes))


class Exchanges:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def reduce_scatter(self, bucket: torch.Tensor, **how: Any) -> Any:
        self.calls.append(("reduce", how))
        return self

    def all_gather(self, bucket: torch.Tensor) -> Any:
        self.calls.append("gather")
        return self

    def wait(self) -> None:
        self.calls.append("wait")


@pytest.fixture
def made() -> Any:
    """Wrappers, what counts their calls, exchanges, and both methods of bucket groups."""
    linears, exchanges = LinearWrappers(), Exchanges()
    wrappers = BucketWrappers(linears)
    for direction in (wrappers.gradients, wrappers.parameters):
        direction.transport = SimpleNamespace(size=2, group=GROUP)  # type: ignore[assignment]
        direction.buckets = lambda: exchanges  # type: ignore[method-assign,assignment,return-value]
    return SimpleNamespace(
        wrappers=wrappers,
        linears=linears,
        calls=exchanges.calls,
        reduce=wrappers.start_grad_sync_wrapper(never),
        gather=wrappers.start_param_sync_wrapper(never),
    )


def never(*_: Any, **__: Any) -> None:
    raise AssertionError("the original was called")


OTHER = {"intra_distributed_optimizer_instance_group": object()}
ALONE = {**OTHER, "intra_distributed_optimizer_instance_size": 1}


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (
            bucket_group({"use_distributed_optimizer": False}),
            "without the distributed optimizer gradients are all-reduced",
        ),
        (
            bucket_group({"num_distributed_optimizer_instances": 2}),
            "several instances of the distributed optimizer reduce over two groups",
        ),
        (
            bucket_group(**OTHER),
            "these parameters are sharded over another group than the dense ones",
        ),
        (bucket_group(**ALONE), "a data-parallel group of one has nothing to transfer"),
    ],
)
def test_what_is_left_to_megatron(made, caplog, group: Any, reason: str) -> None:
    calls: list[Any] = []
    start_grads = made.wrappers.start_grad_sync_wrapper(lambda group: calls.append("gradients"))
    start_params = made.wrappers.start_param_sync_wrapper(
        lambda group, force_sync: calls.append(("parameters", force_sync))
    )
    for _ in range(2):
        start_grads(group)
        start_params(group, force_sync=True)
    assert calls == ["gradients", ("parameters", True)] * 2
    assert made.calls == []
    assert made.linears.calls == {("gradients", reason): 4, ("parameters", reason): 4}
    assert len(caplog.records) == 2  # said once of each


@pytest.mark.parametrize("average", [False, True])
def test_handles_for_megatron_and_for_mindspeed(made, average: bool) -> None:
    config = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    group = bucket_group(config | {"average_in_collective": True} if average else config)
    made.reduce(group)
    made.gather(group)
    assert made.calls == [("reduce", {"average": average, "scale": 0.5})] * 2 + ["gather"] * 2
    group.grad_reduce_handle.wait()
    for one in group.param_gather_handle:
        one.wait()
    assert made.calls.count("wait") == 4


def test_what_is_under_way_is_not_started_again(made) -> None:
    group = bucket_group(grad_reduce_handle=[], param_gather_handle=[])
    with pytest.raises(AssertionError, match=r"gradients .* under way already; call finish_gr"):
        made.reduce(group)
    with pytest.raises(AssertionError, match=r"parameters .* under way already; call finish_p"):
        made.gather(group)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, []),
        ({"check_for_nan_in_grad": True}, [(True, False)]),
        ({"check_for_nan_in_grad": False, "check_for_large_grads": True}, [(False, True)]),
        ({"check_for_nan_in_grad": False, "check_for_large_grads": False}, []),
    ],
)
def test_gradients_are_checked_before_they_leave(made, config, expected) -> None:
    checks: list[tuple[bool, bool]] = []

    def check_grads(check_for_nan_or_inf: bool, check_for_large: bool) -> None:
        assert made.calls == []
        checks.append((check_for_nan_or_inf, check_for_large))

    made.reduce(bucket_group(config, check_grads=check_grads))
    assert checks == expected


def test_lanes_that_were_not_made(made) -> None:
    for direction in (made.wrappers.gradients, made.wrappers.parameters):
        direction.transport = None
    for start, name in ((made.reduce, "gradients"), (made.gather, "parameters")):
        expected = f"the lanes for {name} do not exist: set BucketWrappers.{name}.transport"
        with pytest.raises(RuntimeError, match=re.escape(expected)):
            start(bucket_group())


def test_without_the_distributed_optimizer_nobody_meets() -> None:
    wrappers = BucketWrappers(LinearWrappers())  # it has no lanes to meet over
    finished: list[Any] = []
    model = SimpleNamespace(ddp_config=SimpleNamespace(use_distributed_optimizer=False))
    wrappers.finish_grad_sync_wrapper(finished.append)(model)
    assert finished == [model]
