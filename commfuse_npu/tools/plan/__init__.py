"""``commfuse-npu plan``: does CommFuse help a launch, a folder of them or a model; which flags?"""
