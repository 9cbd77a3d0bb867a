"""What is asked before and after a run: doctor, plan, simulate, bench, verify."""
