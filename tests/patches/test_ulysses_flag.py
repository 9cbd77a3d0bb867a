"""``--commfuse-ulysses``: what it needs, what it refuses, and what it registers."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from commfuse_npu import Schedule
from mindspeed_patches.arguments import commfuse_options
from mindspeed_patches.feature import CommFuseFeature
from mindspeed_patches.refusals import IncompatibleOptionsError
from mindspeed_patches.ulysses import MINDSPEED_ULYSSES
from tests.patches.launches import INITIALIZE, LINEAR, ULYSSES, Registered, real_arguments

LAYOUT = {"tensor_model_parallel_size": 2, **ULYSSES}
LAYER = "megatron.core.transformer.attention.Attention.forward"


def ulysses(*options: str, **others: Any) -> argparse.Namespace:
    return real_arguments("--commfuse-ulysses", *options, **(LAYOUT | others))


class TestLayout:
    @pytest.mark.parametrize("size", [1, None])
    def test_context_parallelism_is_needed(self, size: int | None) -> None:
        with pytest.raises(
            IncompatibleOptionsError,
            match=r"--commfuse-ulysses needs --context-parallel-size of at least 2: .+; leave",
        ):
            CommFuseFeature().validate_args(ulysses(context_parallel_size=size))

    @pytest.mark.parametrize("algorithm", ["megatron_cp_algo", "hybrid_cp_algo", None])
    def test_the_algorithm_has_to_be_ulysses(self, algorithm: str | None) -> None:
        with pytest.raises(
            IncompatibleOptionsError,
            match="--commfuse-ulysses needs --context-parallel-algo ulysses_cp_algo, "
            f"not {algorithm}: .+; choose it",
        ):
            CommFuseFeature().validate_args(ulysses(context_parallel_algo=algorithm))

    def test_heads_that_cannot_be_shared_out(self) -> None:
        with pytest.raises(
            IncompatibleOptionsError,
            match="--num-attention-heads 12 is not divisible by --tensor-model-parallel-size 2 "
            "times --context-parallel-size 4; choose sizes whose product divides 12",
        ):
            CommFuseFeature().validate_args(ulysses(num_attention_heads=12))

    def test_a_sequence_that_cannot_be_cut(self) -> None:
        with pytest.raises(
            IncompatibleOptionsError,
            match="--seq-length 66 is not divisible by --context-parallel-size 4; choose 68",
        ):
            CommFuseFeature().validate_args(ulysses(seq_length=66))

    def test_the_master_flag_is_needed(self) -> None:
        args = ulysses()
        args.use_commfuse = False
        with pytest.raises(
            IncompatibleOptionsError, match=r"--commfuse-ulysses needs --use-commfuse, .+; add it"
        ):
            CommFuseFeature().validate_args(args)

    def test_tensor_parallelism_is_not_needed(self) -> None:
        CommFuseFeature().validate_args(ulysses(tensor_model_parallel_size=1))
        with pytest.raises(IncompatibleOptionsError, match="--tensor-model-parallel-size of at le"):
            CommFuseFeature().validate_args(
                real_arguments(**(LAYOUT | {"tensor_model_parallel_size": 1}))
            )

    def test_attention_and_projection_in_one_stay_refused(self) -> None:
        with pytest.raises(
            IncompatibleOptionsError,
            match="--commfuse-attention and --context-parallel-size exclude each other",
        ):
            CommFuseFeature().validate_args(ulysses("--commfuse-attention"))


class TestSchedule:
    def test_off_by_default(self) -> None:
        assert commfuse_options(real_arguments(**LAYOUT)).ulysses is None

    def test_as_for_the_linears_but_over_the_other_group(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        options = commfuse_options(ulysses("--commfuse-lanes", "7", "--commfuse-chunks", "2"))
        assert options.linear.schedule == Schedule("shifted", lanes=1, chunks=2)
        assert options.ulysses is not None
        assert options.ulysses.schedule == Schedule("shifted", lanes=3, chunks=2)

    def test_the_weight_gradient_of_projections_in_the_exchange(self) -> None:
        options = commfuse_options(ulysses("--commfuse-wgrad", "blocks"))
        assert options.ulysses is not None
        assert options.ulysses.wgrad == "blocks"

    @pytest.mark.parametrize(
        ("local", "node_size"), [("8", None), ("4", 2), ("2", 1), ("1", None), ("3", None)]
    )
    def test_ranks_of_a_node_are_as_far_apart_as_tensor_parallelism_is_wide(
        self, monkeypatch: pytest.MonkeyPatch, local: str, node_size: int | None
    ) -> None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        options = commfuse_options(ulysses())
        assert options.ulysses is not None
        assert options.ulysses.schedule.node_size == node_size


class TestPatches:
    def test_beside_the_linears(self) -> None:
        found = Registered(ulysses(transformer_impl="local"))
        assert found.times(f"{MINDSPEED_ULYSSES}.forward") == found.times(LAYER) == 1
        assert found.times(LINEAR) == 1
        assert found.times(INITIALIZE) == 2  # lanes of two groups

    @pytest.mark.parametrize("size", [1, None])
    def test_without_tensor_parallelism_nothing_else(self, size: int | None) -> None:
        found = Registered(ulysses(transformer_impl="local", tensor_model_parallel_size=size))
        assert found.times(f"{MINDSPEED_ULYSSES}.forward") == found.times(LAYER) == 1
        assert found.times(LINEAR) == 0
        assert found.times(INITIALIZE) == 1

    def test_without_the_flag_nothing_of_it(self) -> None:
        found = Registered(real_arguments(transformer_impl="local", **LAYOUT))
        assert found.times(f"{MINDSPEED_ULYSSES}.forward") == found.times(LAYER) == 0
        assert found.times(INITIALIZE) == 1
