"""Stand-in for MindSpeed-LLM 2.1.0: no features."""
