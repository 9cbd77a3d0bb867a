"""What programs cost on a described machine: ``commfuse-npu simulate`` and ``plan --model``.

The programs are the transport's own.  Nothing here is measured, and nothing imports torch.  From
the top down::

    command               the subcommand ``simulate``;  recommend, recommendation_report  a plan
    report, page, lanes   what comes out as text, as pictures and pages;  launch_options  as flags
    sweep                 variants over sequence lengths and numbers of NPUs, as ranges
    step                  a training step: stages, micro-batches, buckets, optimizer
    pipeline, data_parallel, footprint
    llama, context_parallel, turns   a layer, forward and backward, operation by operation;
                          experts, latent  what takes the place of parts of it
    linear, mc2           the tensor-parallel linear layers in every variant;  variants
    group                 ranks played together, or one for all where they all do the same
    rank                  plain collectives and compiled programs as launches
    engine                discrete events
    launches, links       operations and messages; who shares which link
"""
