"""How much communication is hidden, and against whom: ``commfuse-npu bench``.

On a CPU the link between two processes is a copy in memory, which costs the CPU that should
compute meanwhile: nothing can be hidden.  So the link is given a rate
(:mod:`.wire`), a transfer then takes wire time and hardly any CPU, and everything is reported
as a ratio of times of one run.

From the top down; what is marked (t) imports torch and runs in the processes of the ranks only::

    command       the subcommand: options -> sweeps -> ranks -> report
    sweep         what is measured; ranks at work: check, set the link, shuffled rounds
    worker (t)    what a rank does when it is asked
    works (t)     the pieces of work;  shapes  their names and sizes
    variants      the ways to run them, by name;  forms (t) makes them
    baselines (t), carriers (t), sleeping (t), wire
    results       from samples to figures;  report  shows them
"""
