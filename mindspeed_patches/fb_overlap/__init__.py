"""Forward-backward overlap in Megatron: schedules, and state per pass."""

from __future__ import annotations

from mindspeed_patches.fb_overlap.overlapping import Overlapping

__all__ = ["Overlapping"]
