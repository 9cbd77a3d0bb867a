"""One device as its own peers: a rank of a group runs where the others are not.

A backend of torch.distributed, ``one_device``.  First all ranks run an operation together, each in
its process on the same device, and what each of them received is kept (:mod:`.recording`).  Then
one of them runs it alone: what it sends goes nowhere, what it receives is copied from what was
kept, on streams of its own that are held for as long as a link of a described rate takes
(:mod:`.process_group`).  Kernels, streams, events and the allocator are the device's; the peers,
the links and what the host does to post are made up, and peers are exactly as fast as this rank.

On CUDA streams are the device's (:mod:`.device_streams`; read, not run); on a CPU they are threads
(:mod:`.thread_streams`), and so is the second stream of an operation.
"""
