"""Run by test_mindspeed_parser: parse and validate a command line as MindSpeed-LLM does at a start.

Prints the values as JSON on the last line.  The stand-ins are those of the rehearsal: importing
MindSpeed-LLM asks for CANN's Python modules and for a device.
"""

from __future__ import annotations

import importlib
import json
import sys
from types import ModuleType

import torch

from mindspeed_patches.rehearsal.worker import install_stand_ins

install_stand_ins()
# CoC's layers import it, and it scikit-learn and others; nothing of it is asked for here.
settings = ModuleType("mindspeed.auto_settings.auto_settings")
settings.AutoSettings = object
sys.modules[settings.__name__] = settings
if "--use-commfuse" in sys.argv:
    from mindspeed_patches import install

    install()
# MindSpeed-LLM first, as in pretrain_gpt.py: it patches Megatron before the rest is imported.
importlib.import_module("mindspeed_llm")
arguments = importlib.import_module("megatron.training.arguments")

args = arguments.parse_args()
arguments.validate_args(args)
plain = {k: v for k, v in vars(args).items() if isinstance(v, (bool, int, float, str, type(None)))}
print()
print(json.dumps({**plain, "params_dtype": str(args.params_dtype), "torch": torch.__version__}))
