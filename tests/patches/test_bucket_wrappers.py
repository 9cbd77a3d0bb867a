"""The wrappers of Megatron's bucket groups, with exchanges that only record their calls."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from commfuse_npu.ops import LinearOptions
from mindspeed_patches import data_parallel
from mindspeed_patches.data_parallel import BucketWrappers
from mindspeed_patches.wrappers import LinearWrappers

GROUP = object()


def bucket_group(config: dict[str, Any] | None = None, **changes: Any) -> Any:
    """The attributes of Megatron's class that the wrappers read."""
    names = (
        *("overlap_grad_reduce", "overlap_param_gather", "average_in_collective"),
        *("check_for_nan_in_grad", "check_for_large_grads"),
    )
    usual = dict.fromkeys(names, False)
    bucket = SimpleNamespace(
        grad_data=torch.ones(4), param_data=torch.ones(4), gradient_scaling_factor=0.5
    )
    state = {
        "intra_distributed_optimizer_instance_group": GROUP,
        "intra_distributed_optimizer_instance_size": 2,
        "grad_reduce_handle": None,
        "param_gather_handle": None,
        "param_gather_dispatched": False,
    }
    ddp_config = SimpleNamespace(**usual | (config or {}))
    return SimpleNamespace(ddp_config=ddp_config, buckets=[bucket] * 2, **(state | changes))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Wrappers, the object that counts their calls, mock exchanges and mock originals."""
    linears, exchanges, original = LinearWrappers(), mock.Mock(), mock.Mock()
    exchanges.reduce_scatter.return_value = exchanges.all_gather.return_value = exchanges
    wrappers: Any = BucketWrappers(linears, LinearOptions())
    monkeypatch.setattr(data_parallel, "Buckets", lambda lanes, options: exchanges)
    for user in wrappers.users.values():
        user.transport = SimpleNamespace(size=2, group=GROUP)
    original.grads.__name__, original.params.__name__ = "grads", "params"
    return SimpleNamespace(
        linears=linears,
        exchanges=exchanges,
        original=original,
        reduce=wrappers.start_grad_sync_wrapper(original.grads),
        gather=wrappers.start_param_sync_wrapper(original.params),
    )


OTHER = {"intra_distributed_optimizer_instance_group": object()}
ALONE = {**OTHER, "intra_distributed_optimizer_instance_size": 1}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (OTHER, "these parameters are sharded over another group than the dense ones"),
        (ALONE, "a data-parallel group of one has nothing to transfer"),
    ],
)
def test_what_is_left_to_megatron(made, changes: Any, reason: str) -> None:
    group = bucket_group(**changes)
    made.reduce(group)
    made.gather(group, force_sync=True)
    assert made.original.mock_calls == [
        mock.call.grads(group),
        mock.call.params(group, force_sync=True),
    ]
    assert made.exchanges.mock_calls == []
    assert [name for name, _ in made.linears.calls] == ["gradients", "parameters"]
    assert all(path.startswith(reason) for _, path in made.linears.calls)
    assert set(made.linears.calls.values()) == {2}


@pytest.mark.parametrize("average", [False, True])
def test_handles_for_megatron_and_for_mindspeed(made, average: bool) -> None:
    config = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    group = bucket_group(config | {"average_in_collective": True} if average else config)
    made.reduce(group)
    made.gather(group)
    exchanges, bucket = made.exchanges, group.buckets[0]
    reduced = mock.call(bucket.grad_data, average=average, scale=0.5)
    assert exchanges.reduce_scatter.call_args_list == [reduced] * 2
    assert exchanges.all_gather.call_args_list == [mock.call(bucket.param_data)] * 2
    for start, name in ((made.reduce, "grad"), (made.gather, "param")):
        with pytest.raises(AssertionError, match=f"call finish_{name}_sync first"):
            start(group)
    exchanges.wait.assert_not_called()
    group.grad_reduce_handle.wait()
    for handle in group.param_gather_handle:
        handle.wait()
    assert exchanges.wait.call_count == 4
    made.gather(group, force_sync=True)  # waits for what is under way
    assert exchanges.wait.call_count == 6
    assert group.param_gather_handle is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, []),
        ({"check_for_nan_in_grad": True}, [(True, False)]),
        ({"check_for_nan_in_grad": False, "check_for_large_grads": True}, [(False, True)]),
    ],
)
def test_gradients_are_checked_before_they_leave(made, config, expected) -> None:
    checks: list[tuple[bool, bool]] = []

    def check_grads(check_for_nan_or_inf: bool, check_for_large: bool) -> None:
        assert made.exchanges.mock_calls == []
        checks.append((check_for_nan_or_inf, check_for_large))

    made.reduce(bucket_group(config, check_grads=check_grads))
    assert checks == expected
