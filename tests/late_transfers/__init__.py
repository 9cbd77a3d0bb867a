"""The ops over gloo, with transfers as late as a device may have them.

A receive buffer holds NaN until its ``wait()``; a send buffer that changes before its ``wait()`` is
an error, because a device may read it as late as that.  Transfers are posted in batches, as HCCL
needs them.  In which order HCCL matches them, and what deadlocks, is proved (``commfuse-npu
verify``) and checked in recorded runs (``commfuse-npu verify --log``).
"""
