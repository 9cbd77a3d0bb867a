"""The ops over gloo, with everything as late as a device may have it.

A receive buffer holds NaN until its ``wait()``; a send buffer that changes before its ``wait()`` is
an error, because a device may read it as late as that.  Transfers are posted in batches, as HCCL
needs them, unless a test asks for single ones; collectives that are waited for are late, too.  The
kernels of an operation's side stream, and of transfers, are checked for races
(:mod:`.race_detector`): an event that is missing shows every time.

In which order HCCL matches transfers, and what deadlocks, is proved (``commfuse-npu verify``) and
checked in recorded runs (``commfuse-npu verify --log``).
"""
