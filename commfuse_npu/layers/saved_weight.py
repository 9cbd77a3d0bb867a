"""A weight kept for the backward as it is, not as a saved tensor."""

from __future__ import annotations

import torch

__all__ = ["SavedWeight"]


class SavedWeight:
    """Holds a weight from forward to backward, and notices if it was changed in between.

    Hooks on saved tensors (activation swapping) hand back another tensor, without ``main_grad`` and
    the other attributes of Megatron's weights.  What a saved tensor does besides is done here.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self._version = self._current()

    def _current(self) -> int | None:
        # Inference tensors count no versions.
        return None if self._weight.is_inference() else self._weight._version

    def get(self, name: str) -> torch.Tensor:
        """The weight.

        Raises:
            RuntimeError: it was modified in place since the forward of ``name``.
        """
        if self._current() != self._version:
            raise RuntimeError(
                f"{name}: the weight was modified in place between forward and backward (version "
                f"{self._current()}, expected {self._version}); the gradient would be that of "
                "another layer. Run the backward before the optimizer step"
            )
        return self._weight
