"""Stand-in for MindSpeed-LLM: importing it applies the patches."""

from mindspeed_llm.tasks import megatron_adaptor_v2

__all__ = ["megatron_adaptor_v2"]
