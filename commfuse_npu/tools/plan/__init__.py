"""``commfuse-npu plan``: would it help a launch, many or a model, and which flags?"""
