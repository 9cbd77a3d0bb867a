"""How much communication is hidden, and against whom: ``commfuse-npu bench``.

On a CPU the link between two processes is a copy in memory, which costs the CPU that should
compute meanwhile: nothing can be hidden.  So the link is given a rate
(:mod:`.wire`), a transfer then takes wire time and hardly any CPU, and everything is reported
as a ratio of times of one run.

From the top down; what is marked (t) imports torch and runs in the processes of the ranks only::

    command       the subcommand: options -> programme -> processes -> report
    arguments     its options
    programme     which works, links, ratios and variants are measured
    sweep         one group of processes: check, set the link, measure in shuffled rounds
    ..ranks       the ranks, started and ended
    worker (t)    what a rank does when it is asked
    works (t)     the pieces of work
    variants      the ways to run them, by name;  forms (t) makes them
    baselines (t), ring (t), carriers (t), sleeping (t), peak_memory (t)
    results       from samples to figures;  report, plot  show them
"""
