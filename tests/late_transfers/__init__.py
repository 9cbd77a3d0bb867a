"""The ops over gloo, with everything as late as a device may have it.

A receive buffer holds NaN until its ``wait()``; a send buffer that changes before its ``wait()`` is
an error, because a device may read it as late as that.  Transfers are posted in batches, as HCCL
needs them, unless a test asks for single ones; collectives that are waited for are late, too.  The
side stream of an operation does nothing before an event makes it (:mod:`.late`), or its kernels,
and those of transfers, are checked for races (:mod:`.race_detector`).  A wait or an event that is
missing shows every time.

In which order HCCL matches transfers, and what deadlocks, is proved (``commfuse-npu verify``) and
checked in recorded runs (``commfuse-npu verify --log``).
"""
