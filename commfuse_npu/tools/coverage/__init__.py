"""``commfuse-npu coverage FOLDER``: what would ``--use-commfuse`` fuse in each launch script?

Scripts run with recorders in the place of torchrun and Python, in a copy of their folder; what they
would have started is judged by the tables of refusals and of linear layers, on any machine.  No
torch is imported, and nothing is trained.
"""
