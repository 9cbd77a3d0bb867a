"""Measures the figures that the simulator assumes of a machine, and compares forms of a launch.

:mod:`.measuring_worker` imports torch and runs only in the rank processes.
"""
