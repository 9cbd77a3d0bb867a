"""Llama pretraining on CPU with the real Megatron-Core; see `python -m scripts.cpu_pretraining`."""
