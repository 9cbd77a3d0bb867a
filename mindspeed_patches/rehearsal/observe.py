"""Watches a training from inside: which features apply, what each iteration gave, what changed.

MindSpeed's own patch manager puts the observers around ``setup_model_and_optimizer`` and
``train_step`` when all features have registered theirs, so that whatever a feature does to these
functions stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_patches.rehearsal.collectives import CollectiveCounter
from mindspeed_patches.rehearsal.records import Record
from mindspeed_patches.state_hashes import optimizer_hash, weight_hashes

__all__ = ["Observer"]

_TRAINING = "megatron.training.training"


class Observer:
    """Fills a record while the script runs.

    Args:
        record: what to fill.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self._collectives = CollectiveCounter()
        self._model: Sequence[torch.nn.Module] = ()
        self._optimizer: Any = None

    def install(self) -> None:
        """Install before Megatron is imported, and before MindSpeed applies its features."""
        from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager

        self._collectives.install()
        apply = MindSpeedFeaturesManager.apply_features_patches

        @functools.wraps(apply)
        def apply_features_patches(args: Any) -> None:
            apply(args)
            self._features_were_applied(args)

        MindSpeedFeaturesManager.apply_features_patches = staticmethod(apply_features_patches)

    def finish(self) -> None:
        """Note the end; call when the script has returned.

        Raises:
            RuntimeError: the script did not train.
        """
        if self._optimizer is None or not self.record.grad_norms:
            raise RuntimeError(
                f"the script never called {_TRAINING}.setup_model_and_optimizer and train_step, so "
                "there is nothing to compare; is it a pretraining script of MindSpeed-LLM?"
            )
        # Only now: with --overlap-param-gather the last step's weights arrive late.
        self.record.weights_after = weight_hashes(self._model)
        self.record.optimizer_after = optimizer_hash(self._optimizer)
        self.record.collectives = [
            (*kind, count) for kind, count in sorted(self._collectives.counts.items())
        ]
        self._note_commfuse()
        self.record.finished = True

    # ------------------------------------------------------------ what was applied

    def _features_were_applied(self, args: Any) -> None:
        from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager
        from mindspeed.patch_utils import MindSpeedPatchesManager

        self.record.features = [
            str(feature.feature_name)
            for feature in MindSpeedFeaturesManager.FEATURES_LIST
            if feature.is_need_apply(args)
        ]
        for name, wrapper in (
            ("setup_model_and_optimizer", self.setup_wrapper),
            ("train_step", self.train_step_wrapper),
        ):
            MindSpeedPatchesManager.register_patch(f"{_TRAINING}.{name}", wrapper)
        MindSpeedPatchesManager.apply_patches()

    def _note_commfuse(self) -> None:
        from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager

        for feature in MindSpeedFeaturesManager.FEATURES_LIST:
            wrappers = getattr(feature, "wrappers", None)
            if feature.feature_name == "use_commfuse" and wrappers is not None:
                self.record.calls = [
                    (layer, path, count) for (layer, path), count in sorted(wrappers.calls.items())
                ]
            overlapping = getattr(feature, "overlapping", None)
            if overlapping is not None and overlapping.overlap is not None:
                self.record.pairs = overlapping.overlap.pairs

    # -------------------------------------------------------- what an iteration gave

    def setup_wrapper(self, setup: Callable[..., Any]) -> Callable[..., Any]:
        """Around ``setup_model_and_optimizer``: the weights before the first iteration."""

        @functools.wraps(setup)
        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            result = setup(*args, **kwargs)
            self._model, self._optimizer = result[:2]
            self._know_groups()
            self.record.weights_before = weight_hashes(self._model)
            return result

        return setup_model_and_optimizer

    def train_step_wrapper(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """Around ``train_step``, which returns the losses first and the gradient norm fifth."""

        @functools.wraps(train_step)
        def recorded_train_step(*args: Any, **kwargs: Any) -> Any:
            self._collectives.active = True
            try:
                result = train_step(*args, **kwargs)
            finally:
                self._collectives.active = False
            losses, grad_norm = result[0], result[5]
            self.record.losses.append({name: _hex(value) for name, value in losses.items()})
            self.record.grad_norms.append(None if grad_norm is None else _hex(grad_norm))
            return result

        return recorded_train_step

    def _know_groups(self) -> None:
        from megatron.core import parallel_state

        # First, because other groups may be the same object.
        group = parallel_state.get_tensor_model_parallel_group()
        self._collectives.know_group("tensor", group)
        for name, value in vars(parallel_state).items():
            if "_GROUP" in name and isinstance(value, dist.ProcessGroup):
                words = name.replace("_GROUP", "").lower().split("_")
                self._collectives.know_group(" ".join(filter(None, words)), value)
        self.record.layout = ", ".join(
            f"{short} {getattr(parallel_state, f'get_{kind}_parallel_rank')()}"
            f"/{getattr(parallel_state, f'get_{kind}_parallel_world_size')()}"
            for short, kind in (
                ("tp", "tensor_model"),
                ("pp", "pipeline_model"),
                ("cp", "context"),
                ("dp", "data"),
            )
        )


def _hex(value: Any) -> str:
    number = value.item() if isinstance(value, torch.Tensor) else value
    return float(number).hex()
