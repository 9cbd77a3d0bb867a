"""Machines as ``configs/hardware`` describes them: what work and transfers cost on them.

The start of a launch takes defaults from them, ``commfuse-npu simulate`` and ``plan`` all costs.
"""
