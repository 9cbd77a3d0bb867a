"""Whether the layout of a launch fits, and whether CommFuse would take part in it."""

from __future__ import annotations

from collections.abc import Sequence

from commfuse_npu.tools.config_file import ConfigError
from commfuse_npu.tools.doctor.attention import attention_obstacle, recomputes_attention
from commfuse_npu.tools.doctor.data_parallel import check_data_parallel
from commfuse_npu.tools.doctor.finding import Finding, about
from commfuse_npu.tools.doctor.launch import ASSUMED_VOCABULARY, Launch
from commfuse_npu.tools.doctor.refused import (
    ATTENTION_REFUSED,
    DATA_PARALLEL_REFUSED,
    REFUSED,
    ULYSSES_REFUSED,
    refused_value,
)
from commfuse_npu.tools.doctor.ulysses import check_ulysses_layout

__all__ = ["check_launch"]

_about = about("launch")


def check_launch(launch: Launch) -> list[Finding]:
    """Whether the layout fits, and whether CommFuse would take part."""
    config, fuse = launch.config, launch.fuse
    found = []
    try:
        config.validate()
    except ConfigError as error:
        found = [
            _about("layout", "error", problem, "", "the training would end at its start")
            for problem in str(error).splitlines()
        ]
    if not found:
        found.append(
            _about(
                "layout",
                "ok",
                f"{config.world_size} NPUs = TP {config.tensor_model_parallel_size} x PP "
                f"{config.pipeline_model_parallel_size} x CP {config.context_parallel_size} x DP "
                f"{config.data_parallel_size}",
            )
        )
    if not launch.knows_vocabulary:
        found.append(
            _about(
                "--vocab-size",
                "note",
                f"not given; {ASSUMED_VOCABULARY} is assumed, for the shapes of the output layer",
                action="tokenizers are not read here: add --vocab-size to see its shapes",
            )
        )
    if not fuse.use_commfuse:
        found.append(
            _about(
                "--use-commfuse",
                "warning",
                "not given",
                "the flag: without it nothing is fused",
                "add --use-commfuse; what is listed below is what it would do",
            )
        )
    elif not launch.registers:
        found.append(
            _about(
                "--use-commfuse",
                "warning",
                "given to pretrain_gpt.py itself",
                "the launcher before it: MindSpeed-LLM does not know the flag by itself",
                "start -m mindspeed_patches.launch pretrain_gpt.py, or call "
                "mindspeed_patches.install() after import torch in the script",
            )
        )
    if fuse.use_commfuse:
        found.extend(_check_options(launch))
    return found


def _check_options(launch: Launch) -> list[Finding]:
    config, fuse, found = launch.config, launch.fuse, []
    elsewhere = (fuse.ulysses or fuse.dp) and not fuse.attention
    if config.tensor_model_parallel_size == 1 and not elsewhere:
        found.append(
            _about(
                "--tensor-model-parallel-size",
                "error",
                "1",
                "at least 2: a group of one transfers nothing, and --use-commfuse is refused",
                "choose TP of at least 2, or leave --use-commfuse out",
            )
        )
    found.extend(_check_refused(launch, REFUSED, "--use-commfuse"))
    if launch.fuse.attention:
        found.extend(_check_attention(launch))
    if launch.fuse.ulysses:
        found.extend(_check_refused(launch, ULYSSES_REFUSED, "--commfuse-ulysses"))
        found.extend(check_ulysses_layout(config))
    if launch.fuse.dp:
        found.extend(_check_refused(launch, DATA_PARALLEL_REFUSED, "--commfuse-dp"))
        found.extend(check_data_parallel(launch))
    if config.tensor_model_parallel_size > 1 and not config.uses_sequence_parallel:
        found.append(
            _about(
                "--sequence-parallel",
                "warning",
                "not given",
                "the flag: without, column-parallel layers keep Megatron's forward",
                "add --sequence-parallel",
            )
        )
    return found


def _check_refused(launch: Launch, options: Sequence[str], ours: str) -> list[Finding]:
    values = {option: refused_value(launch.options, option) for option in options}
    return [
        _about(
            option,
            "error",
            value,
            f"not together with {ours}, which is refused then",
            f"pass --attention-dropout 0.0 or leave {ours} out"
            if option == "--attention-dropout"
            else "leave one of the two out",
        )
        for option, value in values.items()
        if value is not None
    ]


def _check_attention(launch: Launch) -> list[Finding]:
    name, fuse = "--commfuse-attention", launch.fuse
    found = _check_refused(launch, ATTENTION_REFUSED, name)
    recomputed = recomputes_attention(launch.options)
    obstacle = attention_obstacle(launch.config, recomputed)
    if "proj" not in fuse.layers:
        found.append(
            _about(
                name,
                "error",
                f"given, with --commfuse-layers {','.join(fuse.layers)}",
                "proj among the layers: attention is fused with the output projection",
                "add proj to --commfuse-layers",
            )
        )
    elif obstacle:
        found.append(
            _about(
                name,
                "warning",
                f"given, but {obstacle}",
                "attention that can wait for its projection",
                "leave --recompute-activations and --recompute-granularity selective out"
                if recomputed
                else "add --sequence-parallel",
            )
        )
    else:
        found.append(
            _about(
                name,
                "note",
                "given",
                action="calls with packed sequences, a bias or a mask that is not causal keep "
                "Megatron's attention",
            )
        )
    return found
