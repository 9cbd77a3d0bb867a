"""Forward-backward overlap in Megatron: schedules, state per side, and MindSpeed's feature."""

from __future__ import annotations

from mindspeed_patches.fb_overlap.feature import Overlapping

__all__ = ["Overlapping"]
