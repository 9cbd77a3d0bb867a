"""Which schedule is fastest here: tried out at first use, remembered on disk.

How many chunks pay depends on the shape, the group, the links and the speed of the GEMMs together,
and whether fusing pays at all does too: without anything to gain, smaller GEMMs and more messages
only cost.  So a few schedules and torch's collectives (in Megatron's order, where it has one) run
on the real shape, interleaved, until the slower ones are out (:mod:`.trials`); rank 0 decides for
all.  What is tried is what runs: the whole forward of a layer, or its whole backward.

The answer is a matter of this machine and these versions (:mod:`.cache`), and it decides in which
pieces GEMMs run, which some GEMM libraries round differently.  Where two runs have to give the same
bits, leave it off and fix the schedule.
"""

from commfuse_npu.tuning.cache import default_folder
from commfuse_npu.tuning.tuner import COLUMN, ROW, Layer, Problem, Tuning, decisions, tuned

__all__ = [
    "COLUMN",
    "ROW",
    "Layer",
    "Problem",
    "Tuning",
    "decisions",
    "default_folder",
    "tuned",
]
