"""``commfuse-npu doctor``: is this machine ready for CommFuse?

torch, MindSpeed, Megatron and torch_npu are not imported: versions are read from their files, and
the import of torch_npu, which ends the process without CANN, is tried in a separate process.
:mod:`commfuse_npu.tools.plan` judges launches.

The expected values were read in the sources and manuals of torch_npu, CANN, MindSpeed and
MindSpeed-LLM, and not verified on an NPU.
"""
