"""The ops over gloo, with every transfer completing as late as a device allows.

A receive buffer holds NaN until its ``wait()``.  A send buffer that changes before its ``wait()``
is an error, because a device may read it that late.  Transfers are posted in batches, as HCCL needs
them, unless a test asks for single posts; awaited collectives are late, too.  Kernels of the side
stream and of transfers are checked for races (:mod:`.race_detector`), so that a missing event is
found in every run.

The order in which HCCL matches transfers, and the absence of deadlocks, are proved
(``commfuse-npu verify``) and checked in recorded runs (``commfuse-npu verify --log``).
"""
