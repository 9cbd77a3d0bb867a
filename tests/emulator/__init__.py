"""An emulated HCCL for CPU tensors: a backend of torch.distributed that hangs where HCCL would.

gloo matches messages by tag, in any order, and so executes what HCCL never finishes.  Here the
rules of HCCL hold, as far as they could be read in the sources of torch_npu and in the documents of
HCCL; none of it was compared with an NPU.  A *referee* in the process that starts the ranks sees
every operation, lets it happen by the rules, and tells every rank that waits in vain who waits for
whom::

    tests -> emulated_ranks -> referee_thread -> referee, operation, deadlock
                  |                  |
             rank processes ------ link <- work, process_group <- collectives, tensor_rules
                                            ^ backend               memory

Emulated: communicators opened at first use by all their ranks, one per pair for single transfers;
links of a communicator opened by the first batch between two ranks, both hosts standing still; one
in-order stream per communicator and rank, or fewer that are shared; rendezvous without
buffering; matching by order; batches with one handle; collectives in the same queue; receive
buffers that are poisoned until they are waited for and send buffers that are read at the wait;
HCCL's data types and contiguous tensors only; one thread per group; transfers of random duration.

Not emulated: time, links and the order inside a batch; the order in which HCCL adds (gloo's is
taken); memory that is freed while it is in use; options of groups and environment variables.  Two
things are stricter: ``wait()`` holds the host, which on the device only the stream would do, so
that a communicator opened behind a wait is opened later; and data are there after their own wait
only, not after that of a later operation of the same stream.  What a rank waits for elsewhere, in a
gloo group say, the referee does not see: it counts as running until the time limit.
"""
