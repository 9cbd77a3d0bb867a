"""Whether the layout of a launch fits, and whether CommFuse would take part in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from commfuse_npu.config_file import ConfigError
from commfuse_npu.plan import least_rows
from commfuse_npu.tools.doctor.finding import Finding
from commfuse_npu.tools.doctor.judgement import Refused
from commfuse_npu.tools.doctor.launch import ASSUMED_VOCABULARY, Launch
from commfuse_npu.tools.doctor.layers import LLAMA_LAYERS
from commfuse_npu.tools.linear_layers import recomputes_attention
from commfuse_npu.tools.model_config import ModelConfig

__all__ = ["check_launch"]

_about = partial(Finding, "launch")


def check_launch(launch: Launch) -> Iterator[Finding]:
    """Whether the layout fits, and whether CommFuse would take part."""
    yield from _check_layout(launch.config)
    if not launch.knows_vocabulary:
        said = f"not given; {ASSUMED_VOCABULARY} is assumed, for the shapes of the output layer"
        why = "tokenizers are not read here: add --vocab-size to see its shapes"
        yield _about("--vocab-size", "note", said, action=why)
    if not launch.fuse.use_commfuse:
        expected = "the flag: without it nothing is fused"
        action = "add --use-commfuse; what is listed below is what it would do"
        yield _about("--use-commfuse", "warning", "not given", expected, action)
    elif not launch.registers:
        yield _about(
            "--use-commfuse",
            "warning",
            "given to pretrain_gpt.py itself",
            "the launcher before it: MindSpeed-LLM does not know the flag by itself",
            "start -m mindspeed_patches.launch pretrain_gpt.py, or call "
            "mindspeed_patches.install() after import torch in the script",
        )
    if launch.fuse.use_commfuse:
        yield from _check_options(launch)
    yield _other_options(launch)
    others = [one for one in launch.judged.layers if one.layer not in LLAMA_LAYERS]
    if others:
        named = (f"{one.layer} {one.state}{one.reason and f' ({one.reason})'}" for one in others)
        yield _about("other layers", "ok", ", ".join(named))


def _check_layout(config: ModelConfig) -> Iterator[Finding]:
    try:
        config.validate()
    except ConfigError as error:
        for problem in str(error).splitlines():
            yield _about("layout", "error", problem, "", "the training would end at its start")
    else:
        yield _about(
            "layout",
            "ok",
            f"{config.world_size} NPUs = TP {config.tensor_model_parallel_size} x PP "
            f"{config.pipeline_model_parallel_size} x CP {config.context_parallel_size} x DP "
            f"{config.data_parallel_size}",
        )


def _asked(launch: Launch) -> dict[str, bool]:
    """CommFuse's other options, and whether they are given."""
    fuse = launch.fuse
    given = fuse.commfuse_attention, fuse.commfuse_ulysses, fuse.commfuse_dp
    return {name: bool(one) for name, one in zip(launch.judged.flags, given, strict=True)}


def _check_options(launch: Launch) -> Iterator[Finding]:
    config, fuse, judged = launch.config, launch.fuse, launch.judged
    elsewhere = (fuse.commfuse_ulysses or fuse.commfuse_dp) and not fuse.commfuse_attention
    if config.tensor_model_parallel_size == 1 and not elsewhere:
        allowed = fuse.commfuse_allow_nothing and not fuse.commfuse_attention
        yield _about(
            "--tensor-model-parallel-size",
            "warning" if allowed else "error",
            "1",
            "at least 2: a group of one transfers nothing, and --use-commfuse is refused unless "
            "--commfuse-allow-nothing is given",
            "choose TP of at least 2, add --commfuse-dp, which needs none, or leave "
            "--use-commfuse out",
        )
    yield from _check_refused(judged.excluded)
    for name, given in _asked(launch).items():
        if given:
            yield from _check_refused(judged.flags[name].refused)
            yield _check_flag(launch, name, judged.flags[name].lacks)
    if config.tensor_model_parallel_size > 1 and not config.uses_sequence_parallel:
        expected = "the flag: without, column-parallel layers keep Megatron's forward"
        yield _about(
            "--sequence-parallel", "warning", "not given", expected, "add --sequence-parallel"
        )
    elif config.tensor_model_parallel_size > 1:
        yield from _check_rows(launch)


def _check_refused(refused: Sequence[Refused]) -> Iterator[Finding]:
    for refusal, value in refused:
        expected = f"not together with {refusal.ours}, which is refused then: {refusal.why}"
        yield _about(refusal.option.split()[0], "error", value, expected, refusal.way_out)


def _check_flag(launch: Launch, option: str, lacks: str) -> Finding:
    """An option of CommFuse that is given: what it lacks, or what it does."""
    about = partial(_about, option)
    if lacks.startswith(option):
        # It ends the training; it begins with the option and ends with a way out.
        needs, _, way_out = lacks.removeprefix(option).lstrip(": ").partition("; ")
        return about("error", "given", needs, way_out)
    if option == "--commfuse-attention":
        return _check_attention(launch, lacks)
    if lacks:
        expected = "at least 2: a data-parallel group of one transfers nothing"
        advice = "leave --commfuse-dp out, or choose a smaller TP or PP"
        return about("warning", "given, with DP 1", expected, advice)
    return about("note", "given", action=_what_it_does(launch.config, option))


_KEPT = "calls with packed sequences, a bias or a mask that is not causal keep"


def _what_it_does(config: ModelConfig, option: str) -> str:
    tp, cp, groups = (
        config.tensor_model_parallel_size,
        config.context_parallel_size,
        config.num_query_groups,
    )
    if option == "--commfuse-dp":
        replicas = config.data_parallel_size * cp
        return (
            f"{replicas} ranks share a copy of the optimizer's state; parameters of experts keep "
            "Megatron's collectives"
        )
    if tp == 1 and groups % cp == 0:
        return f"all-to-alls hide behind attention and its projections; {_KEPT} their own"
    why = f"at TP {tp} the weights of the projections are not whole"
    if tp == 1:
        why = f"{groups} query groups are not divisible by CP {cp}"
    behind = "attention" if tp > 1 else "attention and its projection"
    return (
        f"the output's all-to-all hides behind {behind}, that of q, k and v does not: {why}; "
        f"{_KEPT} their own"
    )


def _check_attention(launch: Launch, lacks: str) -> Finding:
    about = partial(_about, "--commfuse-attention")
    if "proj" not in launch.fuse.commfuse_layers:
        return about(
            "error",
            f"given, with --commfuse-layers {','.join(launch.fuse.commfuse_layers)}",
            "proj among the layers: attention is fused with the output projection",
            "add proj to --commfuse-layers",
        )
    if not lacks:
        return about("note", "given", action=f"{_KEPT} Megatron's attention")
    advice = "add --sequence-parallel"
    if recomputes_attention(launch.options):
        advice = "leave --recompute-activations and --recompute-granularity selective out"
    said = f"given, but {lacks}"
    return about("warning", said, "attention that can wait for its projection", advice)


def _check_rows(launch: Launch) -> Iterator[Finding]:
    """Where blocks are too short to be fused, or so short that it does not pay."""
    config, limit = launch.config, launch.least_rows
    rows = config.block_rows
    least = least_rows(config.tensor_model_parallel_size, config.hidden_size)
    about = partial(_about, "rows of a block", "warning", f"{rows} (tokens of a micro-batch / TP)")
    if rows < limit:
        auto = launch.fuse.commfuse_min_rows == "auto"
        why = ", whose own order is faster then (simulated)" if auto else ""
        yield about(
            f"{limit} at least: with fewer layers stay Megatron's{why}",
            "fewer TP, longer sequences, or --commfuse-min-rows 0, which fuses them anyway",
        )
    elif rows < least:
        yield about(
            f"{least} at least: with fewer Megatron's own order is faster (simulated)",
            "fewer TP, longer sequences, or --commfuse-min-rows "
            f"{least}, which leaves such layers to Megatron",
        )


def _other_options(launch: Launch) -> Finding:
    """The options of CommFuse that are not given: which would be taken, and why others not."""
    judged = launch.judged
    why_not = {name: why for name, why in judged.why_not.items() if not _asked(launch)[name]}
    if judged.excluded:
        excluded = ", ".join(map(str, judged.excluded))
        why_not = dict.fromkeys(why_not, f"{excluded} excludes --use-commfuse")
    overlap = "--commfuse-fb-overlap"
    if overlap not in launch.options or judged.overlap.obstacle:
        why_not[overlap] = judged.overlap.obstacle
    said = [f"{name} would be taken" for name, why in why_not.items() if not why]
    said += [f"not {name}: {why}" for name, why in why_not.items() if why]
    return _about("other options", "ok", "; ".join(said) or "none")
