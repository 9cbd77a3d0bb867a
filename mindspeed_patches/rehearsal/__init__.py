"""Rehearses Ascend trainings on a CPU: the real torch_npu on top of stand-ins for CANN."""
