"""The feature's options, what it refuses, and its hooks against the stand-in managers."""

from __future__ import annotations

import argparse
import sys
import types
from typing import Any

import pytest
import torch

from commfuse_npu import Schedule
from mindspeed_patches.arguments import DEFAULTS, commfuse_options
from mindspeed_patches.feature import CommFuseFeature
from mindspeed_patches.patching import PatchManager
from mindspeed_patches.refusals import IncompatibleOptionsError
from mindspeed_patches.wrappers import LAYERS
from tests.patches.launches import ULYSSES, Registered, real_arguments


class TestNeeds:
    def test_attention_needs_the_projection(self) -> None:
        args = real_arguments("--commfuse-attention", "--commfuse-layers", "qkv,fc1")
        with pytest.raises(ValueError, match="--commfuse-attention needs proj among --commfuse-l"):
            CommFuseFeature().validate_args(args)

    @pytest.mark.parametrize("size", [1, None])
    def test_tensor_parallelism_is_needed(self, size: int | None) -> None:
        args = real_arguments(tensor_model_parallel_size=size)
        with pytest.raises(
            IncompatibleOptionsError,
            match="--use-commfuse needs --tensor-model-parallel-size of at least 2",
        ):
            CommFuseFeature().validate_args(args)

    @pytest.mark.parametrize(
        ("arguments", "ways"),
        [
            ({}, "--commfuse-dp with --use-distributed-optimizer for gradients and parameters"),
            (
                {"use_distributed_optimizer": True},
                "--commfuse-dp for gradients and parameters",
            ),
            (
                {"use_distributed_optimizer": True, **ULYSSES},
                "--commfuse-ulysses for the exchange of heads, --commfuse-dp for gradients and "
                "parameters",
            ),
            (
                {"context_parallel_size": 4, "context_parallel_algo": "megatron_cp_algo"},
                "--commfuse-dp with --use-distributed-optimizer for gradients and parameters",
            ),
        ],
    )
    def test_what_there_is_without_tensor_parallelism(self, arguments: Any, ways: str) -> None:
        args = real_arguments(tensor_model_parallel_size=1, **arguments)
        with pytest.raises(IncompatibleOptionsError) as error:
            CommFuseFeature().validate_args(args)
        assert str(error.value).endswith(
            f"transfers nothing; add {ways}, or leave --use-commfuse out"
        )

    def test_who_allows_it_may_have_nothing_fused(self) -> None:
        args = real_arguments("--commfuse-allow-nothing", tensor_model_parallel_size=1)
        CommFuseFeature().validate_args(args)
        assert commfuse_options(args).allow_nothing
        assert not commfuse_options(real_arguments()).allow_nothing

    def test_a_level_that_leaves_the_feature_out(self) -> None:
        args = real_arguments(optimization_level=1)
        assert not CommFuseFeature().is_need_apply(args)
        with pytest.raises(
            IncompatibleOptionsError, match="--use-commfuse and --optimization-level 1 exclude"
        ):
            CommFuseFeature().validate_args(args)


class TestOptions:
    def test_defaults(self) -> None:
        args = real_arguments()
        assert {name: getattr(args, name) for name in DEFAULTS} == DEFAULTS | {"use_commfuse": True}
        options = commfuse_options(args)
        assert options.layers == LAYERS
        assert (options.rows, options.hidden, options.min_rows) == (None, None, None)
        assert options.linear.reduce_dtype is None
        assert options.linear.schedule == Schedule("shifted", lanes=1, chunks=1)

    @pytest.mark.parametrize(
        ("sizes", "chunks"),
        [
            ({"seq_length": 8192, "micro_batch_size": 1}, 2),
            ({"seq_length": "4096", "micro_batch_size": "1"}, 1),
            ({"seq_length": "4096", "micro_batch_size": "1", "hidden_size": "8192"}, 2),
            ({"seq_length": 8192, "micro_batch_size": 2}, 2),
            ({"seq_length": 8192, "micro_batch_size": 1, "context_parallel_size": 2}, 1),
            ({"seq_length": 8192, "micro_batch_size": 1, "commfuse_tuning": "on"}, 1),
            ({"seq_length": 4096, "micro_batch_size": 1, "commfuse_chunks": 4}, 4),
        ],
    )
    def test_small_blocks_stay_whole(self, sizes: dict[str, Any], chunks: int) -> None:
        args = argparse.Namespace(use_commfuse=True, tensor_model_parallel_size=8, **sizes)
        schedule = commfuse_options(args).linear.schedule
        assert (schedule.lanes, schedule.chunks) == (7, chunks)

    @pytest.mark.parametrize(
        ("given", "least", "described"),
        [("auto", None, True), (None, None, True), ("never", None, False), ("1734", 1734, False)],
    )
    def test_where_collectives_stay(
        self, given: str | None, least: int | None, described: bool
    ) -> None:
        options = commfuse_options(argparse.Namespace(commfuse_collectives_from=given))
        assert (options.linear.collectives_from, options.described) == (least, described)

    @pytest.mark.parametrize(
        ("given", "least"),
        [
            ({}, None),
            ({"min_rows": "auto"}, None),
            ({"min_rows": "0"}, 0),
            ({"min_rows": "256", "chunks": "4"}, 256),
            ({"chunks": "1"}, 0),
            ({"tuning": "on"}, 0),
        ],
    )
    def test_the_machine_says_where_layers_stay_unless_chunks_are_chosen(
        self, given: dict[str, str], least: int | None
    ) -> None:
        named = {f"commfuse_{name}": value for name, value in given.items()}
        args = argparse.Namespace(
            tensor_model_parallel_size="8", seq_length="4096", micro_batch_size="2", **named
        )
        options = commfuse_options(args)
        assert (options.rows, options.min_rows) == (1024, least)

    def test_what_is_no_number_of_outputs_is_refused(self) -> None:
        with pytest.raises(ValueError, match="collectives-from: 'some' is neither a whole number"):
            commfuse_options(argparse.Namespace(commfuse_collectives_from="some"))

    @pytest.mark.parametrize("early", [False, True])
    def test_typed_or_as_strings(self, early: bool) -> None:
        given = {
            "commfuse_layers": "qkv,fc1",
            "commfuse_schedule": "shifted",
            "commfuse_lanes": "3",
            "commfuse_chunks": "4",
            "commfuse_taper": "1.5",
            "commfuse_reduce_dtype": "float32",
            "commfuse_wgrad": "blocks",
            "commfuse_min_rows": "16",
            "commfuse_order_log": "a folder",
        }
        if early:
            args = argparse.Namespace(tensor_model_parallel_size="4", **given)
            args.commfuse_keep_gathered = True
        else:
            words = [w for n, v in given.items() for w in (f"--{n.replace('_', '-')}", v)]
            words.append("--commfuse-keep-gathered")
            args = real_arguments(*words, tensor_model_parallel_size=4)
        options = commfuse_options(args)
        assert options.layers == ("qkv", "fc1")
        assert options.min_rows == 16
        linear = options.linear
        assert linear.schedule == Schedule("shifted", lanes=3, chunks=4, taper=1.5)
        assert (linear.reduce_dtype, linear.wgrad) == (torch.float32, "blocks")
        assert linear.keep_gathered
        assert options.order_log == "a folder"

    def test_the_lanes_know_where_to_record(self) -> None:
        feature = CommFuseFeature()
        args = real_arguments("--commfuse-order-log", "a folder", "--commfuse-dp")
        feature.register_patches(PatchManager(), args)
        assert [lanes.order_log for lanes in feature._lanes] == ["a folder"] * 3

    @pytest.mark.parametrize("early", [False, True])
    def test_tuning_keeps_what_it_finds_in_the_users_cache(self, early, monkeypatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
        args = (
            argparse.Namespace(tensor_model_parallel_size="2", commfuse_tuning="on")
            if early
            else real_arguments("--commfuse-tuning", "on")
        )
        tuning = commfuse_options(args).linear.tuning
        assert tuning is not None
        assert tuning.folder == "/somewhere/commfuse_npu"
        assert commfuse_options(real_arguments()).linear.tuning is None

    def test_tuning_and_chunks_exclude_each_other(self) -> None:
        args = real_arguments("--commfuse-tuning", "on", "--commfuse-chunks", "4")
        with pytest.raises(ValueError, match=r"--commfuse-chunks 4 .* leave one or the other out"):
            commfuse_options(args)

    def test_a_taper_out_of_range_is_named(self) -> None:
        with pytest.raises(ValueError, match=r"taper is 0\.1; from 1/8 to 8"):
            commfuse_options(real_arguments("--commfuse-taper", "0.1"))

    def test_lanes_that_nothing_would_use_are_not_made(self) -> None:
        args = real_arguments("--commfuse-lanes", "7", tensor_model_parallel_size=4)
        assert commfuse_options(args).linear.schedule.lanes == 3

    @pytest.mark.parametrize(
        ("local", "shape"), [("8", "shifted"), ("4", "two_level"), ("3", "shifted")]
    )
    def test_auto_is_two_level_where_a_group_spans_nodes(
        self, monkeypatch: pytest.MonkeyPatch, local: str, shape: str
    ) -> None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        args = real_arguments(tensor_model_parallel_size=8)
        schedule = commfuse_options(args).linear.schedule
        assert schedule.shape == shape
        assert schedule.node_size == (4 if shape == "two_level" else None)

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("commfuse_lanes", "0", "--commfuse-lanes: 0 is less than 1"),
            ("commfuse_min_rows", "-1", "--commfuse-min-rows: -1 is less than 0"),
            ("commfuse_lanes", "two", "--commfuse-lanes: .*two"),
            ("commfuse_layers", "qkv,fc3", "--commfuse-layers: unknown layer 'fc3'; choose from"),
            ("commfuse_schedule", "star", "--commfuse-schedule: 'star' is not one of auto"),
        ],
    )
    def test_a_senseless_value_names_its_option(self, name: str, value: str, message: str) -> None:
        args = argparse.Namespace(use_commfuse=True, **{name: value})
        with pytest.raises(ValueError, match=message):
            CommFuseFeature().register_patches(PatchManager(), args)

    def test_the_parser_refuses_it_too(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            real_arguments("--commfuse-chunks", "0")
        assert "--commfuse-chunks: 0 is less than 1" in capsys.readouterr().err

    def test_registering_twice_is_stateless(self) -> None:
        feature = CommFuseFeature()
        for _ in range(2):
            feature.register_args(argparse.ArgumentParser())


class TestHooks:
    def test_patches_only_with_the_flag(self) -> None:
        pytest.importorskip("megatron.core", reason="megatron-core is not installed")

        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        def owners() -> list[Any]:
            return [
                ColumnParallelLinear.forward,
                RowParallelLinear.forward,
                parallel_state.initialize_model_parallel,
            ]

        before, manager, feature = owners(), PatchManager(), CommFuseFeature()
        off = argparse.Namespace(optimization_level=2, use_commfuse=False)
        on = real_arguments(transformer_impl="local")
        assert not feature.is_need_apply(off)
        assert feature.is_need_apply(on)
        feature.register_patches(manager, on)
        assert owners() == before
        manager.apply_patches()
        try:
            assert all(new.__wrapped__ is old for new, old in zip(owners(), before, strict=True))
        finally:
            manager.remove_patches()
        assert owners() == before

    @pytest.mark.parametrize("training", [True, False])
    def test_the_model_is_looked_at_where_megatron_trains(self, monkeypatch, training) -> None:
        monkeypatch.setattr("mindspeed_patches.feature._has_training", lambda: training)
        registered = Registered(real_arguments(transformer_impl="local"))
        assert registered.times("megatron.training.training.get_model") == training

    def test_mindspeeds_accumulation_is_handed_to_the_npu_kernels(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        from commfuse_npu.kernels import npu, use_matmul_add

        calls = []
        ops = types.ModuleType("mindspeed.ops.npu_matmul_add")
        ops.npu_matmul_add_fp32 = lambda *tensors: calls.append(tensors)
        monkeypatch.setitem(sys.modules, "mindspeed.ops.npu_matmul_add", ops)
        monkeypatch.delenv("ATB_HOME_PATH", raising=False)
        args = real_arguments(transformer_impl="local")
        x, grad = torch.ones(4, 3, dtype=torch.bfloat16), torch.ones(4, 2, dtype=torch.bfloat16)
        total = torch.zeros(2, 3)
        try:
            CommFuseFeature().register_patches(PatchManager(), args)
            npu.accumulate_weight_gradient(total, grad, x)
            assert not calls, "it could not be compiled"
            assert "ATB_HOME_PATH is unset" in caplog.text
            monkeypatch.setenv("ATB_HOME_PATH", "/usr/local/Ascend/nnal/atb")
            CommFuseFeature().register_patches(PatchManager(), args)
            npu.accumulate_weight_gradient(total, grad, x)
            # Input first, as in Megatron's extension; this MindSpeed has nothing for 16 bits.
            assert [list(map(id, tensors)) for tensors in calls] == [[id(x), id(grad), id(total)]]
            npu.accumulate_weight_gradient(total.bfloat16(), grad, x)
            assert len(calls) == 1
        finally:
            use_matmul_add()

    def test_the_flag_is_the_name_of_features(self) -> None:
        assert CommFuseFeature().feature_name == "use_commfuse"
