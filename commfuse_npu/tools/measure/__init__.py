"""Measures the figures that the simulator assumes of a machine, and compares forms.

On a CPU, the link between two processes is a copy in memory, done by the CPU that should compute
meanwhile, so nothing could be hidden.  The step ``forms`` therefore limits the rate of the links
(:mod:`.wire`): a transfer then takes time on the wire and hardly any CPU.

Modules, from the top down; those marked (t) import torch and run only in the rank processes::

    command       the subcommand: options -> steps -> description and report
    report        verdicts and Markdown
    folder        one file with the results, which the same command continues;  the deadline
    figures       from times to the simulator's figures, and their description in yaml
    rounds        controls the ranks that compare forms of layers: check, set the links, rounds
    launches      the forms of a launch: their flags, ten iterations, and what they print
    worker (t)    what a rank measures;  stopwatch  times by device events
    forms_worker (t), layers (t)    what a rank does to compare forms, and the workloads
    forms (t)     creates a form by its name;  baselines (t)  those that are not this project's
    sleeping (t), wire
    steps         the questions, most useful first;  sizes, workloads and names of forms
"""
