"""Arguments of a launch as MindSpeed's parser returns them, and the wrappers it registers."""

import argparse
from typing import Any

from mindspeed_patches.feature import CommFuseFeature

ULYSSES = {
    "context_parallel_size": 4,
    "context_parallel_algo": "ulysses_cp_algo",
    "num_attention_heads": 16,
    "seq_length": 64,
    "attention_dropout": 0.0,
    "attention_mask_type": "causal",
}
"""Arguments that ``--commfuse-ulysses`` needs."""

DATA_PARALLEL = {"use_distributed_optimizer": True}
"""Arguments that ``--commfuse-dp`` needs."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    CommFuseFeature().register_args(parser)
    return parser


def real_arguments(*options: str, **others: Any) -> argparse.Namespace:
    """The feature's options as parsed, with the attributes of ``others`` added."""
    args = _parser().parse_args(["--use-commfuse", *options])
    vars(args).update({"tensor_model_parallel_size": 2, "optimization_level": 2} | others)
    return args


def early(*options: str, **others: Any) -> argparse.Namespace:
    """The same from MindSpeed's first parser: values of Megatron's options are strings."""
    args = _parser().parse_args(["--use-commfuse", *options])
    for name, value in ({"tensor_model_parallel_size": 2} | others).items():
        setattr(args, name, value if isinstance(value, bool | list) else str(value))
    return args


class Registered(dict[str, list[Any]]):
    """A patch manager that only notes the wrappers, by the path of the function."""

    def register_patch(self, path: str, wrapper: Any) -> None:
        self.setdefault(path, []).append(wrapper)


def registered(args: argparse.Namespace) -> Registered:
    """What a launch registers."""
    manager = Registered()
    CommFuseFeature().register_patches(manager, args)
    return manager
