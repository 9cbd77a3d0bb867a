"""The launch in question, from a configuration, a command line or a script; its training."""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from commfuse_npu.launch.options import DEFAULTS, add_arguments, schedule_for, unknown_option
from commfuse_npu.plan import Schedule, default_chunks
from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.launch_script.command_line import Launch
from commfuse_npu.tools.launch_script.option_words import Options
from commfuse_npu.tools.launch_script.read_launch import read_launch
from commfuse_npu.tools.model_config import ModelConfig, known_options
from commfuse_npu.tools.simulate.attention_layers import Latent
from commfuse_npu.tools.simulate.experts import Experts
from commfuse_npu.tools.simulate.lora import Lora
from commfuse_npu.tools.simulate.training import Kind, Training, layer_shape
from commfuse_npu.tools.simulate.variants import FORMS, Variant

_ASSUMED_VOCABULARY = 32000
"""Tokenizers are not read here."""
_VOCABULARIES = {
    "llama2": 32000,
    "llama3": 128256,
    "baichuan2": 125696,
    "gpt2bpetokenizer": 50257,
}
"""By model family or kind of tokenizer: ``vocab_size`` in the published ``config.json`` of
meta-llama/Llama-2-7b-hf, meta-llama/Meta-Llama-3-8B, baichuan-inc/Baichuan2-13B-Base and
openai-community/gpt2."""


@dataclass(frozen=True)
class AskedLaunch:
    """A launch in question.

    Attributes:
        name: of the configuration, or the size of the model.
        command: with the options of torchrun and of a configuration among its own, and the
            variables of the shell that it is started in.
        config, fuse: the model configuration, and CommFuse's options.
    """

    name: str
    command: Launch
    config: ModelConfig
    fuse: argparse.Namespace

    @property
    def options(self) -> Options:
        return self.command.options

    @property
    def expert_parallel(self) -> int:
        """Size of the groups among which experts are divided."""
        return self.options.number("--expert-model-parallel-size", 1)

    @property
    def chunks(self) -> int:
        """Model chunks per pipeline stage; 1 without a virtual pipeline."""
        names = "--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"
        stages = self.config.pipeline_model_parallel_size
        for name in names:
            if size := self.options.number(name, 0):
                layers = self.options.number("--num-layers", 0)
                per_stage, remainder = divmod(layers, stages * size)
                if remainder:
                    raise UsageError(
                        f"{name} {size}: {layers} layers are not divisible by it times {stages} "
                        "stages; choose another"
                    )
                return size if name == names[0] else per_stage
        return 1

    @property
    def schedule(self) -> Schedule:
        """The schedule of the tensor-parallel group; a PlanError if the options form none."""
        config = self.config
        size = config.tensor_model_parallel_size
        usual = default_chunks(size, config.block_rows, config.hidden_size)
        chunks = 1 if self.fuse.commfuse_tuning == "on" else usual
        return schedule_for(self.fuse, size, config.npus_per_node, chunks=chunks, linear=True)


def ask_about(
    config: Path | None,
    words: Sequence[str],
    variables: Mapping[str, str],
    per_node: int | None = None,
) -> AskedLaunch:
    """The launch that a configuration, a command line or both describe.

    A configuration represents its launcher in ``scripts``.  A command line can be complete,
    options only, or a launch script with its arguments.

    Args:
        per_node: number of processes on each node, if the launch does not say it.

    Raises:
        ConfigError: they cannot be read.
        UsageError: the script starts no training, depends on a command that is not run, or starts
            another number of processes; or an option looks like CommFuse's but does not exist.
    """
    if words and not words[0].startswith("--"):
        launch = read_launch(words, environ=variables, per_node=per_node)
    else:
        launch = Launch("", Options(words), None, None, Path(), registers=True)
    size, note = _vocabulary(launch.options, words)
    launch = replace(launch, environment={**variables, **launch.environment})
    if per_node is not None and launch.per_node not in (None, per_node):
        raise UsageError(
            f"--nproc-per-node {per_node}: the launch starts {launch.per_node} processes per node; "
            "change it there"
        )
    sizes = {"--nnodes": launch.nodes, "--nproc_per_node": launch.per_node or per_node}
    torchrun = [word for name, size in sizes.items() if size for word in (name, str(size))]
    words = [*torchrun, *launch.options.words]
    if config:
        model = ModelConfig.load(config, words)
        # Of the options that the launcher adds, this one matters here.
        words = [*model.arguments(), "--use-distributed-optimizer", *model.commfuse_options, *words]
        name = config.stem
        launch = replace(launch, registers=True)
    else:
        if {"--vocab-size", "--padded-vocab-size"}.isdisjoint(launch.options.names):
            launch = replace(launch, notes=[*launch.notes, note])
        # The last value counts, so given options come after assumed ones.
        model = ModelConfig.from_options(["--vocab-size", str(size), *words])
        name = f"a model of {model.num_layers} layers of {model.hidden_size}"
    if why := unknown_option(words):
        # The launch refuses it, too.
        raise UsageError(f"the launch is refused: {why}")
    fuse = argparse.Namespace(**DEFAULTS | known_options(words, add_arguments)[0])
    return AskedLaunch(name, replace(launch, options=Options(words)), model, fuse)


def _vocabulary(options: Options, words: Sequence[str]) -> tuple[int, str]:
    """Size by the names of tokenizer, weights or script, and a note on it."""
    names = "--tokenizer-name-or-path", "--tokenizer-model", "--load", "--tokenizer-type"
    scripts = ("/".join(Path(word).parts[-2:]) for word in words[:2])
    for text in (*(options.text(name) or "" for name in names), *scripts):
        plain = re.sub("[-_ ]", "", text.lower())
        for family, size in _VOCABULARIES.items():
            # Models of all families have a Llama2Tokenizer.
            if re.search(f"{family}(?!tokenizer)", plain):
                return size, f"vocabulary {size:,}, that of {family}"
    note = (
        f"no --vocab-size: simulated with {_ASSUMED_VOCABULARY:,} tokens; for its own add "
        "--padded-vocab-size N to a copy of the launch"
    )
    return _ASSUMED_VOCABULARY, note


# ------------------------------------------------------------------ what the simulator gets

_LEFT_OUT = {
    "--tp-2d": "linear layers cut in two dimensions",
    "--moe-fb-overlap": "that overlap",
    "--use-nanopipe": "that schedule",
    "--schedules-method": "that schedule",
    "--enable-dsa-indexer": "sparse attention",
    "--layerwise-disaggregated-training": "that layout",
}
_ROUGH = {
    "--lu-lora-final-layer-index": "as if backpropagation trained all adapters",
    "--no-pad-to-seq-lengths": "as if all samples had --seq-length tokens, as theirs are unknown; "
    "for usual steps plan a copy of the script with their mean length",
    "--mtp-num-layers": "without layers of multi-token prediction",
    "--full-attention-interval": "as if every layer had full attention",
    "--swap-attention": "as if no activation was swapped to the host",
    "--swap-optimizer": "as if no optimizer state was swapped to the host",
    "--moe-zero-memory": "as if no activation of experts was dropped",
    "--moe-expert-capacity-factor": "as if no token was dropped",
    "--qat-scheme": "without quantization",
    "--output-logit-softcapping": "without capping of logits",
    "--attn-logit-softcapping": "without capping of logits",
    "--commfuse-attention": "without splitting attention by queries",
    "--commfuse-ulysses": "with blocking exchanges of heads",
}
"""Options that the simulator does not support, and how a step is simulated instead."""
_BATCH = 13
"""Launches that make a micro-batch of SFT: two broadcasts with their copies, the loss mask, and the
attention mask (counted by hand in MindSpeed-LLM 26.1.0, ``sft_trainer.py``; 10 for packed samples).
The host waits for the first broadcast."""
_STAGES = ("dpo", "rm", "ppo", "simpo", "orm", "prm", "grpo")
_CONTEXT = ("megatron_cp_algo", "ulysses_cp_algo")


def roughly(options: Options) -> list[str]:
    """Approximations in the simulation of a launch; empty if it covers all of its options."""
    return [f"{name}: simulated {how}" for name, how in _ROUGH.items() if name in options]


class NotSimulated(ValueError):
    """The simulator does not support such a launch; the message says why."""


def training_of(launch: AskedLaunch) -> Training:
    """The training of a launch, with every option that affects the step's time or memory.

    :func:`roughly` lists the options that are approximated.

    Raises:
        UsageError: an option has an invalid value.
        NotSimulated: names an option that is not supported.
    """
    options = launch.options
    model = launch.config
    for name, subject in _LEFT_OUT.items():
        if name in options:
            raise NotSimulated(f"{name}: {subject} is not simulated")
    if options.text("--stage") in _STAGES:
        raise NotSimulated(f"--stage {options.text('--stage')}: only pretraining and SFT are")
    if "mamba" in (options.text("--spec") or ""):
        raise NotSimulated("--spec: state-space layers are not simulated")
    if model.context_parallel_size > 1 and model.context_parallel_algo not in _CONTEXT:
        raise NotSimulated(
            f"--context-parallel-algo {model.context_parallel_algo} is not simulated"
        )
    latent = _latent(options, model.num_attention_heads)
    if latent and model.context_parallel_size > 1:
        raise NotSimulated("latent attention with context parallelism is not simulated")
    experts = _experts(launch)
    ranks = model.world_size // model.pipeline_model_parallel_size
    if experts and ranks % (experts.parallel * experts.tensor):
        raise NotSimulated(
            f"EP x expert TP are {experts.parallel * experts.tensor} ranks of experts, which do "
            f"not divide the {ranks} of a pipeline stage"
        )
    kinds = _kinds(options, model.num_layers)
    if set(kinds) == {"none"}:
        raise NotSimulated("--noop-layers leaves no layer")
    granularity = options.text("--recompute-granularity")
    if granularity not in (None, "full", "selective"):
        raise UsageError(f"--recompute-granularity is {granularity!r}; give full or selective")
    shape = layer_shape(
        model,
        head=options.number("--kv-channels", 0),
        latent=latent,
        experts=experts,
        halves=_halves(options),
        causal=options.text("--attention-mask-type") != "general",
        sequence_parallel=model.uses_sequence_parallel,
        lora=_lora(options),
    )
    return Training(
        model,
        shape,
        kinds,
        _recomputed(launch) if granularity == "full" else 0,
        vpp=launch.chunks,
        distributed="--use-distributed-optimizer" in options,
        overlaps=("--overlap-grad-reduce" in options, "--overlap-param-gather" in options),
        reuses="--reuse-fp32-param" in options,
        gradient_bytes=2 if {"--fp16", "--grad-reduce-in-bf16"} & {*options.names} else 4,
        batch_launches=_BATCH if options.text("--stage") == "sft" else 0,
        shapes="--no-pad-to-seq-lengths" in options,
    )


def form_of(options: Options) -> Variant:
    """The form in which a launch runs with its present options."""
    return next(form for form in reversed(FORMS) if in_use(options, form.flags))


def in_use(options: Options, flags: str) -> bool:
    """Whether a launch has all of these flags, with these values."""
    wanted = Options(flags.split())
    return all(
        name in options and options.values(name) == wanted.values(name) for name in wanted.names
    )


def _recomputed(launch: AskedLaunch) -> int:
    """Number of layers per stage whose forward is run again; at most all."""
    options = launch.options
    layers = options.number("--recompute-num-layers", 1)
    if options.text("--recompute-method") != "block":
        return launch.config.num_layers
    return layers if "--enable-recompute-layers-per-pp-rank" in options else layers * launch.chunks


def _kinds(options: Options, layers: int) -> tuple[Kind, ...]:
    """The kind of each layer (MindSpeed-LLM's ``moe_layer_freq``, ``first_k_dense_replace``)."""
    name = "--noop-layers"
    words = (options.text(name) or "").split(",") if name in options else []
    removed = {Options([name, word.strip()]).number(name, 0) for word in words}
    if removed and max(removed) >= layers:
        raise UsageError(f"{name}: {max(removed)} is no layer; give numbers from 0 to {layers - 1}")
    experts = options.number("--num-experts", 0) > 0
    period = max(1, options.number("--moe-layer-freq", -1))
    first = max(0, options.number("--first-k-dense-replace", -1))

    def kind(layer: int) -> Kind:
        if layer in removed:
            return "none"
        return "experts" if experts and layer >= first and layer % period == 0 else "dense"

    return tuple(map(kind, range(layers)))


def _halves(options: Options) -> int:
    return 2 if "--swiglu" in options else 1


def _experts(launch: AskedLaunch) -> Experts | None:
    options = launch.options
    model = launch.config
    number = options.number("--num-experts", 0)
    if not number:
        return None
    each = options.number("--moe-router-topk", 2)
    if each > number:
        raise UsageError(f"--moe-router-topk {each} is more than --num-experts {number}")
    width = options.number("--moe-ffn-hidden-size", model.ffn_hidden_size)
    shared = options.number("--n-shared-experts", 0) * width
    return Experts(
        number,
        each=each,
        width=width,
        shared=options.number("--moe-shared-expert-intermediate-size", shared),
        parallel=launch.expert_parallel,
        tensor=options.number("--expert-tensor-parallel-size", model.tensor_model_parallel_size),
        gathers=options.text("--moe-token-dispatcher-type") in (None, "allgather"),
        grouped="--moe-grouped-gemm" in options,
        halves=_halves(options),
    )


def _lora(options: Options) -> Lora | None:
    if not (targets := options.values("--lora-target-modules")):
        return None
    return Lora(
        options.number("--lora-r", 16),
        frozenset(targets),
        fused="--lora-fusion" in options,
        quantized="--qlora" in options,
    )


def _latent(options: Options, heads: int) -> Latent | None:
    if "--multi-latent-attention" not in options:
        return None
    widths = ("q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim")
    queries, keys, own, rotary, value = (options.number(f"--{name}", 0) for name in widths)
    return Latent(heads, queries, keys, own, rotary, value)
