"""What the simulator assumes of a machine, measured, and the fastest form of a launch.

From the top down; what is marked (t) imports torch and runs in the processes of the ranks only::

    command       the subcommand: options -> steps -> description and report
    report        verdict and Markdown
    folder        a file per step, so that a run resumes;  its deadline
    steps         the questions, in order of worth; one of them is the bench
    trainings     ten iterations of a launch in a form;  forms  their flags
    figures       from times to the simulator's figures, and their description in yaml
    worker (t)    what a rank measures;  stopwatch  by events of the device
"""
