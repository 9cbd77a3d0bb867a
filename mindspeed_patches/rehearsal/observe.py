"""Records a training from inside: losses, gradient norms, collectives, weight hashes.

MindSpeed's own patch manager wraps ``setup_model_and_optimizer`` and ``train_step``; the
collectives are wrapped before Megatron is imported.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_patches.patching import around
from mindspeed_patches.registration import wrap_training
from mindspeed_patches.rehearsal.records import NORM, Record
from mindspeed_patches.state_hashes import optimizer_hash, weight_hashes

__all__ = ["CollectiveCounter", "Observer"]

_COLLECTIVES = (
    *("all_reduce", "all_reduce_coalesced", "reduce", "broadcast"),
    *("all_gather", "all_gather_into_tensor", "_all_gather_base", "all_gather_coalesced"),
    *("reduce_scatter", "reduce_scatter_tensor", "_reduce_scatter_base"),
    *("all_gather_single", "reduce_scatter_single"),
    *("all_to_all", "all_to_all_single", "gather", "scatter", "barrier", "send", "isend"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
)
"""Functions of ``torch.distributed``; those that the installed version lacks are skipped."""


class CollectiveCounter:
    """Counts collectives and messages while :attr:`active` is set.

    Attributes:
        active: whether calls are counted at present.
        counts: number of calls, by the description of the group and the function,
            ``group: function``.
    """

    def __init__(self) -> None:
        self.active = False
        self.counts: Counter[str] = Counter()

    def install(self) -> None:
        """Wrap the functions; modules that imported them earlier keep the originals."""
        for name in filter(functools.partial(hasattr, dist), _COLLECTIVES):
            counted = self._counted(name, getattr(dist, name))
            setattr(dist, name, counted)
            setattr(dist.distributed_c10d, name, counted)
        from commfuse_npu.runtime import executor  # binds collectives: only now

        post = executor.post_send

        def isend(group: Any, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
            return post(group, tensors, peer, tag)

        executor.post_send = self._counted("isend", isend)

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return function(*args, **kwargs)
            group: Any = signature.bind(*args, **kwargs).arguments.get("group")
            group = group or dist.group.WORLD
            words = group.group_desc.lower().replace("_group", "").replace("_", " ")
            self.counts[f"{words}: {name}"] += 1
            # Collectives of objects call collectives of tensors: only the outer one counts.
            self.active = False
            try:
                return function(*args, **kwargs)
            finally:
                self.active = True

        return call


class Observer:
    """Fills a record while the script runs.

    Args:
        record: the record of this rank.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self._collectives = CollectiveCounter()
        self._model: Sequence[torch.nn.Module] = ()
        self._optimizer: Any = None

    def install(self) -> None:
        """Install before Megatron is imported, and before MindSpeed applies its features."""
        self._collectives.install()
        wrap_training(self.setup_model_and_optimizer_wrapper, self.train_step_wrapper)

    @around
    def setup_model_and_optimizer_wrapper(
        self, setup: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Store the model, the optimizer, and the weights before the first iteration."""
        result = setup(*args, **kwargs)
        self._model, self._optimizer = result[:2]
        self.record.weights_before = weight_hashes(self._model)
        return result

    @around
    def train_step_wrapper(self, train_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record the losses and the gradient norm, the first and the sixth value returned."""
        self._collectives.active = True
        try:
            result = train_step(*args, **kwargs)
        finally:
            self._collectives.active = False
        self.record.iterations += 1
        for name, value in {**result[0], NORM: result[5]}.items():
            if value is not None:  # a skipped iteration has no norm
                key = f"iteration {self.record.iterations}, {name}"
                self.record.numbers[key] = float(value).hex()
        return result

    def finish(self) -> None:
        """Complete the record; call it after the script has returned.

        Raises:
            RuntimeError: the script did not train.
        """
        if self._optimizer is None or not self.record.iterations:
            raise RuntimeError(
                "the script never called setup_model_and_optimizer and train_step, so there is "
                "nothing to compare; is it a pretraining script of MindSpeed-LLM?"
            )
        from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager

        # Only now, because with --overlap-param-gather the last step's weights arrive late.
        self.record.weights_after = weight_hashes(self._model)
        self.record.optimizer_after = optimizer_hash(self._optimizer)
        self.record.collectives = dict(sorted(self._collectives.counts.items()))
        for feature in MindSpeedFeaturesManager.FEATURES_LIST:
            wrappers = getattr(feature, "wrappers", None)
            if feature.feature_name == "use_commfuse" and wrappers is not None:
                self.record.calls = [(*key, count) for key, count in sorted(wrappers.calls.items())]
            overlapping = getattr(feature, "overlapping", None)
            if overlapping is not None and overlapping.overlap is not None:
                self.record.pairs = overlapping.overlap.pairs
