"""``commfuse-npu measure``: what the simulator assumes of a machine, measured on it."""
