"""Machines described in ``configs/hardware``: the times of work and transfers on them.

A launch takes defaults from them; ``commfuse-npu simulate`` and ``plan`` take all their costs.
"""
