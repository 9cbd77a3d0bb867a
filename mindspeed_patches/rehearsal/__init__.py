"""A rehearsal of Ascend trainings on a CPU: the real torch_npu over stand-ins for CANN."""
