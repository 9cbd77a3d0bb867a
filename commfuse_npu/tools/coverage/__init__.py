"""``commfuse-npu coverage FOLDER``: the doctor's judgement of each launch script below a folder."""
