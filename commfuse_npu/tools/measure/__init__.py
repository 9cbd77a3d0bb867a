"""What the simulator assumes of a machine, measured, and the fastest form of a launch.

From the top down; what is marked (t) imports torch and runs in the processes of the ranks only::

    command       the subcommand: options -> steps -> description and report
    report        verdict and Markdown
    folder        a file per step, so that a run resumes;  its deadline
    steps         the questions, in order of worth
    layer         the step that runs ``commfuse-npu bench``
    trainings     the step that trains ten iterations in each form;  forms  their flags
    figures       from times to the simulator's figures, and their description in yaml
    worker (t)    what a rank times;  stopwatch  by events of the device
    facts         versions, devices, links and variables
"""
