"""One rank alone: a rank of a group runs where the others are not.

A backend of torch.distributed, ``one_device``.  First all ranks run an operation together, and what
each of them received is kept (:mod:`.recording`).  Then one of them runs it alone: what it sends
goes nowhere, what it receives is copied from what was kept, on streams of its own that are as late
as events allow (:mod:`.late_streams`), or whose kernels are checked for races
(:mod:`.race_detector`).  A test can then say whether every wait and event of an operation is there:
one that is missing shows every time.
"""
