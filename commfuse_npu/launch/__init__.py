"""What a launch says: CommFuse's options, what they exclude, and the packages that it needs.

The options of a training are declared and refused here for everyone who reads them: the launch
itself, ``commfuse-npu plan`` and the rehearsal.  Torch is not imported.
"""
