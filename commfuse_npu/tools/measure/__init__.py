"""Measures the figures that the simulator assumes of a machine, and compares forms.

On a CPU, the link between two processes is a copy in memory, done by the CPU that should compute
meanwhile, so nothing could be hidden.  The step ``forms`` therefore limits the rate of the links
(:mod:`.wire`): a transfer then takes time on the wire and hardly any CPU.

:mod:`.worker`, :mod:`.forms`, :mod:`.baselines` and :mod:`.sleeping` import torch and run only in
the rank processes.
"""
