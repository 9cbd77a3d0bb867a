"""Simulates programs on a described machine: ``commfuse-npu simulate`` and ``plan --model``.

The simulated programs are those that the transport executes.  Nothing here is measured, and nothing
imports torch.  Modules, from the top down::

    command               the subcommand ``simulate``
    recommend, recommendation_report      the search of ``plan``
    report, lanes         output as text and as a picture;  launch_options  as launch flags
    sweep                 variants over sequence lengths and numbers of NPUs, as ranges
    step                  a training step: stages, micro-batches, buckets, optimizer
    pipeline, data_parallel, footprint
    llama, context_parallel, fb_overlap   a layer, forward and backward, operation by operation;
                          experts, latent  replace parts of it
    linear, mc2           the tensor-parallel linear layers in every variant;  variants
    group                 the ranks of a group, or one rank if all do the same
    rank                  plain collectives and compiled programs as launches
    engine                discrete-event simulation
    launches, links       operations and messages; which transfers share a link
"""
