"""The ops over gloo with the streams of a device, and transfers as late as HCCL may complete them.

What a device would run on several streams runs here in the order of the host, and
:mod:`.device` reports what no event orders: a read of data that has not arrived, a write to what is
still being sent, a sum of the side stream that nobody waits for.  So a missing wait or event is
found in every run.

The order in which HCCL matches transfers, and the absence of deadlocks, are proved
(``commfuse-npu verify``) and checked in recorded runs (``commfuse-npu verify --log``).
"""
