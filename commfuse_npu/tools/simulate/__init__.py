"""Simulates programs on a described machine: ``commfuse-npu simulate`` and ``plan --model``.

The simulated programs are those that the transport executes.  Nothing here is measured, and nothing
imports torch.  Modules, from the top down::

    simulate_command      the subcommand ``simulate``, and its picture of a layer
    recommend             the search of ``plan``, and its result as flags and as a configuration
    timed                 a training in a form: time, memory, ranges, verdict
    step                  a training step: stages, micro-batches, buckets, optimizer
    training              a model in its layout;  pipeline, footprint
    chunks                the layers of a pipeline stage, in order or as passes that take turns
    passes                such passes;  llama  a layer, operation by operation
    attention_layers, experts, lora
                          its attention, its experts, adapters beside frozen weights
    linear_layers         the tensor-parallel linear layers in every form;  variants  the forms
    rank                  plain collectives and compiled programs as launches; the ranks of a group
    engine                discrete-event simulation: operations, messages, links
"""
