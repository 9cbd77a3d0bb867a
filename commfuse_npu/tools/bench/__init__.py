"""Measures how much communication each form of a layer hides: ``commfuse-npu bench``.

On a CPU, the link between two processes is a copy in memory, done by the CPU that should compute
meanwhile, so nothing could be hidden.  The bench therefore limits the rate of the link
(:mod:`.wire`): a transfer then takes time on the wire and hardly any CPU.  All results are ratios
of times from one run.

Modules, from the top down; those marked (t) import torch and run only in the rank processes::

    command       the subcommand: options -> sweeps -> ranks -> report
    sweep         what is measured; controls the ranks: check, set the link, shuffled rounds
    worker (t)    the commands that a rank executes
    works (t)     the workloads;  shapes  their names and sizes
    variants      the ways to run them, by name;  forms (t) creates them
    baselines (t), carriers (t), sleeping (t), wire
    results       from samples to figures;  report  formats them
"""
