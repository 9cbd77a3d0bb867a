"""Measures the figures that the simulator assumes of a machine, and compares forms of a launch.

Modules, from the top down; those marked (t) import torch and run only in the rank processes::

    command       the subcommand: options -> steps -> description and report
    report        verdict and Markdown
    folder        one file with the results, which the same command continues;  the deadline
    steps         the questions, most useful first; one of them is the bench
    trainings     ten iterations of a launch in a form;  forms  their flags
    figures       from times to the simulator's figures, and their description in yaml
    worker (t)    what a rank measures;  stopwatch  times by device events
"""
