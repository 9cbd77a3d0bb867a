"""The commands before and after a training: doctor, plan, simulate, bench, measure, verify."""
