"""``commfuse-npu plan``: does CommFuse help a launch or a model, and with which flags?"""
