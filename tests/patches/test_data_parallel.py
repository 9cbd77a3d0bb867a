"""``--commfuse-dp``: what it needs and refuses, what it registers, and what the wrappers do."""

from __future__ import annotations

import argparse
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commfuse_npu import Schedule
from commfuse_npu.ops import BucketOptions
from mindspeed_patches.arguments import commfuse_options
from mindspeed_patches.data_parallel import BucketWrappers
from mindspeed_patches.feature import CommFuseFeature
from mindspeed_patches.patching import PatchManager
from mindspeed_patches.refusals import IncompatibleOptionsError
from mindspeed_patches.wrappers import LinearWrappers
from tests.patches.launches import DATA_PARALLEL, INITIALIZE, LINEAR, Registered, real_arguments

LAYOUT = {"tensor_model_parallel_size": 2, **DATA_PARALLEL}

GROUPS = "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup"
MODEL = "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel"
PATCHED = (
    f"{GROUPS}.start_grad_sync",
    f"{GROUPS}.start_param_sync",
    f"{MODEL}.finish_grad_sync",
)


def data_parallel(*options: str, **others: Any) -> argparse.Namespace:
    return real_arguments("--commfuse-dp", *options, **(LAYOUT | others))


class TestNeeds:
    @pytest.mark.parametrize("given", [False, None])
    def test_the_distributed_optimizer(self, given: bool | None) -> None:
        with pytest.raises(
            IncompatibleOptionsError,
            match=r"--commfuse-dp needs --use-distributed-optimizer: .+; add it, or leave",
        ):
            CommFuseFeature().validate_args(data_parallel(use_distributed_optimizer=given))

    def test_the_master_flag(self) -> None:
        args = data_parallel()
        args.use_commfuse = False
        with pytest.raises(
            IncompatibleOptionsError, match=r"--commfuse-dp needs --use-commfuse, .+; add it"
        ):
            CommFuseFeature().validate_args(args)

    def test_no_tensor_parallelism(self) -> None:
        CommFuseFeature().validate_args(data_parallel(tensor_model_parallel_size=1))

    def test_attention_needs_it_all_the_same(self) -> None:
        args = data_parallel(
            "--commfuse-attention", tensor_model_parallel_size=1, attention_dropout=0.0
        )
        with pytest.raises(
            IncompatibleOptionsError,
            match=r"--commfuse-attention needs --tensor-model-parallel-size of at least 2: .+; lea",
        ):
            CommFuseFeature().validate_args(args)


class TestOptions:
    def test_off_by_default(self) -> None:
        assert commfuse_options(real_arguments(**LAYOUT)).data_parallel is None

    @pytest.mark.parametrize(
        ("sizes", "local", "expected"),
        [
            ({}, "8", Schedule("shifted", lanes=2)),
            ({}, "2", Schedule("two_level", lanes=2, node_size=1)),  # the same transfers as shifted
            ({}, "4", Schedule("two_level", lanes=2, node_size=2)),
            ({"pipeline_model_parallel_size": 2}, "8", Schedule("shifted", lanes=1)),
            (
                {"pipeline_model_parallel_size": 2, "use_tp_pp_dp_mapping": True},
                "4",
                Schedule("two_level", lanes=1, node_size=1),
            ),
            ({"tensor_model_parallel_size": 8}, "8", Schedule("shifted", lanes=1)),
        ],
    )
    @pytest.mark.parametrize("early", [False, True])
    def test_the_schedule_is_that_of_the_group(
        self,
        monkeypatch: pytest.MonkeyPatch,
        sizes: dict[str, int],
        local: str,
        expected: Schedule,
        early: bool,
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "8")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        if early:
            values = {name: v if v is True else str(v) for name, v in (LAYOUT | sizes).items()}
            args = argparse.Namespace(use_commfuse=True, commfuse_dp=True, **values)
        else:
            args = data_parallel(world_size=8, **sizes)
        assert commfuse_options(args).data_parallel == BucketOptions(expected, last_first=True)

    def test_gradients_are_added_in_their_own_dtype_unless_asked(self) -> None:
        options = commfuse_options(data_parallel("--commfuse-reduce-dtype", "float32"))
        assert options.data_parallel is not None
        assert options.data_parallel.reduce_dtype is None
        options = commfuse_options(data_parallel("--commfuse-dp-reduce-dtype", "float32"))
        assert options.linear.reduce_dtype is None
        assert options.data_parallel is not None
        assert options.data_parallel.reduce_dtype is torch.float32


class TestPatches:
    def test_beside_the_linears(self) -> None:
        found = Registered(data_parallel(transformer_impl="local"))
        assert [found.times(path) for path in PATCHED] == [1, 1, 1]
        assert found.times(LINEAR) == 1
        assert found.times(INITIALIZE) == 3  # lanes of layers, of gradients and of parameters

    @pytest.mark.parametrize("size", [1, None])
    def test_without_tensor_parallelism_nothing_else(self, size: int | None) -> None:
        found = Registered(data_parallel(transformer_impl="local", tensor_model_parallel_size=size))
        assert [found.times(path) for path in PATCHED] == [1, 1, 1]
        assert found.times(LINEAR) == 0
        assert found.times(INITIALIZE) == 2

    def test_without_the_flag_nothing_of_it(self) -> None:
        found = Registered(real_arguments(transformer_impl="local", **LAYOUT))
        assert [found.times(path) for path in PATCHED] == [0, 0, 0]

    def test_before_and_after(self) -> None:
        pytest.importorskip("megatron.core", reason="megatron-core is not installed")
        from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Of

        def replacement(group: Any) -> None: ...

        before, manager = Of.start_grad_sync, PatchManager()
        manager.register_patch(PATCHED[0], replacement)
        BucketWrappers(LinearWrappers()).register(manager)
        manager.apply_patches()
        try:
            assert Of.start_grad_sync.__wrapped__ is replacement
        finally:
            manager.remove_patches()
        assert Of.start_grad_sync is before


GROUP = object()


def bucket_group(**changes: Any) -> Any:
    """What the wrappers read of Megatron's class."""
    config = {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
    }
    config |= changes.pop("config", {})
    state = {
        "ddp_config": SimpleNamespace(**config),
        "intra_distributed_optimizer_instance_group": GROUP,
        "intra_distributed_optimizer_instance_size": 2,
        "buckets": [
            SimpleNamespace(
                grad_data=torch.ones(4), param_data=torch.ones(4), gradient_scaling_factor=0.5
            )
        ]
        * 2,
        "grad_reduce_handle": None,
        "param_gather_handle": None,
        "param_gather_dispatched": False,
    }
    return SimpleNamespace(**(state | changes))


class Exchanges:
    """Buckets that only note what is asked of them."""

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


def wrappers(size: int = 2) -> tuple[BucketWrappers, LinearWrappers, Exchanges]:
    linears, exchanges = LinearWrappers(), Exchanges()
    made = BucketWrappers(linears)
    for direction in (made.gradients, made.parameters):
        direction.transport = SimpleNamespace(size=size, group=GROUP)  # type: ignore[assignment]
        direction.buckets = lambda: exchanges  # type: ignore[method-assign,assignment,return-value]
    return made, linears, exchanges


def never(*_: Any, **__: Any) -> None:
    raise AssertionError("the original was called")


OBSTACLES = [
    (
        bucket_group(config={"use_distributed_optimizer": False}),
        2,
        "without the distributed optimizer gradients are all-reduced",
    ),
    (
        bucket_group(config={"num_distributed_optimizer_instances": 2}),
        2,
        "several instances of the distributed optimizer reduce over two groups",
    ),
    (
        bucket_group(intra_distributed_optimizer_instance_group=object()),
        2,
        "these parameters are sharded over another group than the dense ones",
    ),
    (
        bucket_group(
            intra_distributed_optimizer_instance_group=object(),
            intra_distributed_optimizer_instance_size=1,
        ),
        2,
        "a data-parallel group of one has nothing to transfer",
    ),
]


class TestWrappers:
    @pytest.mark.parametrize(("group", "size", "reason"), OBSTACLES)
    def test_obstacles_by_their_reason(
        self, group: Any, size: int, reason: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        made, linears, exchanges = wrappers(size)
        calls: list[Any] = []
        start_grads = made.start_grad_sync_wrapper(lambda group: calls.append("gradients"))
        start_params = made.start_param_sync_wrapper(
            lambda group, force_sync: calls.append(("parameters", force_sync))
        )
        for _ in range(2):
            start_grads(group)
            start_params(group, force_sync=True)
        assert calls == ["gradients", ("parameters", True)] * 2
        assert exchanges.calls == []
        assert linears.calls == {("gradients", reason): 4, ("parameters", reason): 4}
        assert len(caplog.records) == 2  # said once of each

    def test_synchronous_calls_leave_no_handle(self) -> None:
        made, linears, exchanges = wrappers()
        group = bucket_group(config={"average_in_collective": True})
        made.start_grad_sync_wrapper(never)(group)
        how = ("reduce", {"average": True, "scale": 0.5})
        assert exchanges.calls == [how, how, "wait", "wait"]
        made.start_param_sync_wrapper(never)(group)
        assert exchanges.calls[4:] == ["gather", "gather", "wait", "wait"]
        assert (group.grad_reduce_handle, group.param_gather_handle) == (None, None)
        assert group.param_gather_dispatched
        assert linears.calls == {("gradients", "fused"): 2, ("parameters", "fused"): 2}
        assert linears.describe() == ["gradients: 2 buckets fused", "parameters: 2 buckets fused"]

    @pytest.mark.parametrize("finish", ["whole", "list"])
    def test_handles_for_megatron_and_for_mindspeed(self, finish: str) -> None:
        made, _, exchanges = wrappers()
        overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
        group = bucket_group(config=overlap)
        made.start_grad_sync_wrapper(never)(group)
        made.start_param_sync_wrapper(never)(group)
        assert "wait" not in exchanges.calls
        for handle in (group.grad_reduce_handle, group.param_gather_handle):
            if finish == "whole":
                handle.wait()
            else:
                for one in handle:
                    one.wait()
        assert exchanges.calls.count("wait") == 4

    def test_a_gather_that_is_forced(self) -> None:
        made, _, exchanges = wrappers()
        group = bucket_group(config={"overlap_param_gather": True})
        start = made.start_param_sync_wrapper(never)
        start(group, force_sync=True)
        assert exchanges.calls == ["gather", "gather", "wait", "wait"]
        assert group.param_gather_handle is None
        # One that is under way is finished, and no second one started.
        start(group)
        start(group, force_sync=True)
        assert exchanges.calls[4:] == ["gather", "gather", "wait", "wait"]
        assert group.param_gather_handle is None

    def test_what_is_under_way_is_not_started_again(self) -> None:
        made, _, _ = wrappers()
        group = bucket_group(grad_reduce_handle=[], param_gather_handle=[])
        with pytest.raises(AssertionError, match=r"gradients .* under way already; call finish_gr"):
            made.start_grad_sync_wrapper(never)(group)
        with pytest.raises(AssertionError, match=r"parameters .* under way already; call finish_p"):
            made.start_param_sync_wrapper(never)(group)

    @pytest.mark.parametrize(
        ("config", "expected"),
        [
            ({}, []),
            ({"check_for_nan_in_grad": True}, [(True, False)]),
            ({"check_for_nan_in_grad": False, "check_for_large_grads": True}, [(False, True)]),
            ({"check_for_nan_in_grad": False, "check_for_large_grads": False}, []),
        ],
    )
    def test_gradients_are_checked_before_they_leave(
        self, config: dict[str, bool], expected: list[tuple[bool, bool]]
    ) -> None:
        made, _, exchanges = wrappers()
        checks: list[tuple[bool, bool]] = []

        def check_grads(check_for_nan_or_inf: bool, check_for_large: bool) -> None:
            assert exchanges.calls == []
            checks.append((check_for_nan_or_inf, check_for_large))

        group = bucket_group(config=config, check_grads=check_grads)
        made.start_grad_sync_wrapper(never)(group)
        assert checks == expected

    def test_lanes_that_were_not_made(self) -> None:
        made = BucketWrappers(LinearWrappers())
        for start, name in (
            (made.start_grad_sync_wrapper(never), "gradients"),
            (made.start_param_sync_wrapper(never), "parameters"),
        ):
            expected = f"the lanes for {name} do not exist: set BucketWrappers.{name}.transport"
            with pytest.raises(RuntimeError, match=re.escape(expected)):
                start(bucket_group())

    def test_without_the_distributed_optimizer_nobody_meets(self) -> None:
        made = BucketWrappers(LinearWrappers())  # it has no lanes to meet over
        finished: list[Any] = []
        model = SimpleNamespace(ddp_config=SimpleNamespace(use_distributed_optimizer=False))
        made.finish_grad_sync_wrapper(finished.append)(model)
        assert finished == [model]
