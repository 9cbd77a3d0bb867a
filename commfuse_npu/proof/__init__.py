"""Proves programs and recorded runs by the rules of HCCL and gloo.  Imports no torch."""
