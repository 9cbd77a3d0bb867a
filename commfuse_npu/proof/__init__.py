"""Programs and recorded runs, held against the rules of HCCL.  No torch."""
