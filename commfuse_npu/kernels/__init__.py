"""The few device kernels behind the fused operators, plain torch in :mod:`.cpu`."""
