"""Forward-backward overlap in Megatron: schedules, state per side, and MindSpeed's feature."""
