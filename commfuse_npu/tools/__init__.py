"""What is asked before and after a run: doctor, coverage, plan, simulate, bench, verify."""
