"""Lanes are opened and closed with Megatron's groups and do not affect other groups."""

import json
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu import Schedule, Transport
from commfuse_npu.ops import LinearOptions, all_gather_linear
from commfuse_npu.runtime.order_log import shared_order_log
from mindspeed_patches import LinearWrappers, PatchManager
from mindspeed_patches.data_parallel import BucketWrappers
from mindspeed_patches.ulysses_wrappers import UlyssesWrappers
from tests.distributed.ranks import on_ranks


def life_of_the_lanes(rank: int, folder: str) -> None:
    from megatron.core import parallel_state as state

    linears = LinearWrappers(LinearOptions(Schedule("collective")))
    buckets = BucketWrappers(linears, LinearOptions())
    ulysses = UlyssesWrappers(linears, LinearOptions(Schedule(lanes=2)))
    users = linears, ulysses, *buckets.users.values()
    linears.order_log = folder
    expected = {
        (2, 2): ((rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)),
        (4, 1): ((0, 1, 2, 3), (rank,)),
    }
    manager = PatchManager()
    for user in users:
        user.register_lanes(manager)
    manager.apply_patches()
    for (tensor, context), (layers, shared) in expected.items():
        assert [user.transport for user in users] == [None] * 4
        with mock.patch.object(Transport, "create", side_effect=Transport.create) as create:
            state.initialize_model_parallel(
                tensor, context_parallel_size=context, distributed_timeout_minutes=3
            )
        shapes = [call.kwargs["shape"] for call in create.call_args_list]
        assert shapes == ["collective", "shifted", "shifted", "shifted"]
        own: list[Any] = [user.lanes() for user in users]
        assert [lanes.ranks for lanes in own] == [layers, shared, shared, shared]
        assert [lanes.lanes for lanes in own[:2]] == [1, 2]
        assert own[0].timeout.total_seconds() == 180.0
        assert own[1].group is state.get_context_parallel_group()
        replicas = {"with_context_parallel": True, "partial_data_parallel": True}
        group = state.get_data_parallel_group(**replicas)
        assert own[2].group is own[3].group is group
        assert own[2] is not own[3]
        assert [lanes.order_log is not None for lanes in own] == [True, False, False, False]
        state.destroy_model_parallel()
    assert [user.transport for user in users] == [None] * 4
    manager.remove_patches()
    log = shared_order_log(folder, rank, dist.get_world_size())
    log.close()
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert len(lines) == 6, "the first one, two transports opened and closed, and the end"
    ranks = [line[2] for line in lines if line[0] == "transport"]
    assert ranks == [list(layers) for layers, _ in expected.values()]


def test_made_with_the_groups_given_up_with_them_and_recorded(ranks, tmp_path) -> None:
    ranks(4).run(life_of_the_lanes, str(tmp_path / "log"))


@on_ranks(2)
def test_where_gloo_groups_are_switched_off(rank: int) -> None:
    """MindSpeed's --disable-gloo-group makes ``new_group`` return None for gloo by keyword."""
    new_group, requests = dist.new_group, []

    def replaced(*args: Any, **kwargs: Any) -> Any:
        # Here the device's backend is gloo too: only the first request for gloo is the control's.
        requests.append(kwargs.get("pg_options", "control"))
        if requests[-1] == "control" and requests.count("control") == 1:
            return None
        return new_group(*args, **kwargs)

    with mock.patch.object(dist, "new_group", replaced):
        transport = Transport.create(lanes=1)
    assert requests == [None, "control", "control"]
    x = torch.full((4, 1, 3), float(rank + 1))
    options = LinearOptions(Schedule(lanes=1))
    gathered = all_gather_linear(x, torch.eye(3), group=transport, options=options)
    assert gathered[::4, 0, 0].tolist() == [1.0, 2.0]
