"""What programs cost on a described machine: ``commfuse-npu simulate``.

The programs are the transport's own.  Nothing here is measured, and nothing imports torch.  From
the top down::

    command, arguments    the subcommand
    report, plot, page    what comes out as text, as pictures, as a page;  standing  the verdict
    lanes                 a layer for a picture
    sweep                 variants over sequence lengths and numbers of NPUs, as ranges
    step                  a training step: stages, micro-batches, buckets, optimizer
    pipeline_parallel, data_parallel, footprint
    llama, ulysses        a layer, forward and backward, operation by operation
    linear                the tensor-parallel linear layers in every variant;  variants
    group                 ranks played together, or one for all where they all do the same
    rank                  plain collectives and compiled programs as launches
    engine                discrete events
    launches, links       operations and messages; who shares which link
"""
