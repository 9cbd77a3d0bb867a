"""Compares forms of a layer on a CPU, over links with a rate.

The link between two processes of a CPU is a copy in memory, done by the CPU that should compute
meanwhile, so nothing could be hidden.  The rate of the links is therefore limited
(:mod:`scripts.cpu_pretraining.wire`): a transfer then takes time on the wire and hardly any CPU.
"""
