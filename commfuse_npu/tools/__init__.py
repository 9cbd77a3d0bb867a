"""The commands before and after a training: doctor, plan, simulate, measure, verify."""
