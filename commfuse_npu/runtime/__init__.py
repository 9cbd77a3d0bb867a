"""Execution of programs: lanes over a process group, the executor, and the order log."""
