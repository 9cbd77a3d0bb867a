"""An old name of :mod:`commfuse_npu.refusals`, for what still imports it."""

from commfuse_npu.refusals import FB_OVERLAP_REFUSALS

__all__ = ["FB_OVERLAP_REFUSALS"]
