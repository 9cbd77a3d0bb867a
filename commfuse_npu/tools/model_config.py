"""A model, its training and its number of NPUs: ``configs/<model>.yaml``, read and checked.

One file per model is the single source of its shape, training options and parallel layout, for the
launchers, for rehearsals and for the simulator.  Keys are the options of MindSpeed-LLM's
``pretrain_gpt.py``: ``num_layers`` is ``--num-layers``.  The launchers read a file with
``python -m commfuse_npu.tools.model_config llama3_8b``, which needs neither torch nor NPUs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from commfuse_npu.launch.did_you_mean import did_you_mean
from commfuse_npu.launch.options import option_name, unknown_option, whole
from commfuse_npu.plan import block_rows
from commfuse_npu.tools.config_file import ConfigError, find_config, read_config

_MODEL_PARALLEL = ("tensor_model", "pipeline_model", "context")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Llama (RMSNorm, SwiGLU, rotary embeddings, no biases), its training and its layout.

    Attributes are Megatron's options of the same name, with the same defaults; a file sets all of
    them.  Its other keys are passed on as ``pretrain_options``.  The exceptions:

    Attributes:
        vocab_size: of the tokenizer, before padding.  Not passed on if the tokenizer defines it.
        num_layer_list: layers per pipeline stage if they differ; ``None``: the same in all.
        npus_per_node, nnodes: torchrun's ``--nproc_per_node`` and ``--nnodes``.
        pretrain_options: further words for ``pretrain_gpt.py``, such as recomputation.
        commfuse_options: ``--use-commfuse`` and its options, which a launch without CommFuse
            omits; empty if the model is not to be trained with it.
    """

    # Model
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    vocab_size: int
    make_vocab_size_divisible_by: int = 128
    seq_length: int
    max_position_embeddings: int
    untie_embeddings_and_output_weights: bool = False
    tokenizer_type: str = "NullTokenizer"
    # Training
    micro_batch_size: int
    global_batch_size: int
    # Parallel layout
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    context_parallel_algo: str = "megatron_cp_algo"
    sequence_parallel: bool = False
    num_layer_list: tuple[int, ...] | None = None
    npus_per_node: int
    nnodes: int = 1
    # Optional
    pretrain_options: tuple[str, ...] = ()
    commfuse_options: tuple[str, ...] = ("--use-commfuse",)

    @classmethod
    def load(cls, path: Path, options: Sequence[str] = ()) -> ModelConfig:
        """Read a file, with values replaced by the options of a command line.

        Raises:
            ConfigError: the file cannot be read, is incomplete, or has an invalid value.
        """
        return cls(**{**_from_yaml(path), **known_options(options, _declare)[0]})

    @classmethod
    def from_options(cls, options: Sequence[str]) -> ModelConfig:
        """The configuration that a ``pretrain_gpt.py`` command line alone describes.

        Missing options get Megatron's defaults; torchrun's options may precede it.

        Raises:
            ConfigError: an option without a default is missing.
        """
        settings, _ = known_options(options, _declare)
        if missing := [option_name(name) for name in _REQUIRED if name not in settings]:
            raise ConfigError(
                f"{', '.join(missing)} not given: without, the layers have no size; add to the "
                "options, or name a configuration"
            )
        ffn = 4 * settings["hidden_size"]
        values = {
            "ffn_hidden_size": ffn * 2 // 3 // 64 * 64 if "--swiglu" in options else ffn,
            "max_position_embeddings": settings["seq_length"],
            **settings,
        }
        if "--group-query-attention" not in options:
            values["num_query_groups"] = values["num_attention_heads"]
        if "--padded-vocab-size" in options:
            values["make_vocab_size_divisible_by"] = 1
        ranks = math.prod(values.get(f"{kind}_parallel_size", 1) for kind in _MODEL_PARALLEL)
        nodes = values.get("nnodes", 1)
        values.setdefault("npus_per_node", max(1, ranks // nodes))
        replicas = values["npus_per_node"] * nodes // ranks
        values.setdefault("global_batch_size", values["micro_batch_size"] * max(1, replicas))
        return cls(**values)

    @property
    def world_size(self) -> int:
        return self.npus_per_node * self.nnodes

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // self.model_parallel_size

    @property
    def model_parallel_size(self) -> int:
        return math.prod(getattr(self, f"{kind}_parallel_size") for kind in _MODEL_PARALLEL)

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step and data-parallel replica, of which there is one at least."""
        return self.global_batch_size // (self.micro_batch_size * max(1, self.data_parallel_size))

    @property
    def block_rows(self) -> int:
        """Rows of a rank's block in a linear layer (:func:`~commfuse_npu.plan.block_rows`)."""
        sizes = self.tensor_model_parallel_size, self.context_parallel_size
        return block_rows(self.seq_length, self.micro_batch_size, *sizes)

    @property
    def uses_sequence_parallel(self) -> bool:
        """Whether activations are split along the sequence; never in a group of one rank."""
        return self.sequence_parallel and self.tensor_model_parallel_size > 1

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding, which Megatron pads to a multiple that TP divides."""
        multiple = self.make_vocab_size_divisible_by * self.tensor_model_parallel_size
        return -(-self.vocab_size // multiple) * multiple

    def validate(self) -> None:
        """Check that layers, sequence and batch can be split as the layout requires.

        Raises:
            ConfigError: one line per mismatch: value, limit and remedy.
        """
        if lines := list(problems(self)):
            raise ConfigError("\n".join(lines))

    def arguments(self) -> list[str]:
        """Model, training and layout as options of ``pretrain_gpt.py``, valid in all versions.

        The launcher adds data, output and the choice of kernels.
        """
        values = {name: value for name, value in vars(self).items() if name not in _NOT_ARGUMENTS}
        # NullTokenizer does not define the vocabulary, and adds an end token.
        null = self.tokenizer_type == "NullTokenizer"
        values["vocab_size"] = self.vocab_size - 1 if null else None
        values["sequence_parallel"] = self.uses_sequence_parallel
        if self.context_parallel_size == 1:
            values |= dict.fromkeys(("context_parallel_size", "context_parallel_algo"))
        words = list(_OF_EVERY_LLAMA)
        if self.num_query_groups == self.num_attention_heads:
            values["num_query_groups"] = None
        else:
            words.append("--group-query-attention")
        for name, value in values.items():
            if value is not False and value is not None:
                words.append(option_name(name))
                if value is not True:
                    several = isinstance(value, tuple)
                    words.append(",".join(map(str, value)) if several else str(value))
        return [*words, *self.pretrain_options]

    def as_yaml(self) -> str:
        """One line per key, as :meth:`load` reads them."""
        values: dict[str, Any] = dict(vars(self))
        for name, kind in _KINDS.items():
            if isinstance(values[name], tuple):
                separator = " " if kind == _WORDS else ","
                values[name] = separator.join(map(str, values[name]))
        return "".join(f"{name}: {json.dumps(value)}\n" for name, value in values.items())


_NOT_ARGUMENTS = "npus_per_node", "nnodes", "pretrain_options", "commfuse_options"
_OF_EVERY_LLAMA = (
    *("--use-mcore-models", "--position-embedding-type", "rope", "--normalization", "RMSNorm"),
    *("--swiglu", "--disable-bias-linear", "--attention-dropout", "0.0", "--hidden-dropout", "0.0"),
    *("--lr-decay-style", "cosine"),
)
_KINDS = {field.name: str(field.type) for field in fields(ModelConfig)}
_WORDS = "tuple[str, ...]"
_NUMBERS = "tuple[int, ...] | None"
_SPELLINGS = {
    # torchrun accepts both of the last two.
    "npus_per_node": ("--npus-per-node", "--nproc-per-node", "--nproc_per_node"),
    "vocab_size": ("--vocab-size", "--padded-vocab-size"),
}
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "seq_length",
             "micro_batch_size")  # fmt: skip
_MOST = {"num_layers": 1 << 16, "global_batch_size": 1 << 16, "pipeline_model_parallel_size": 256}
"""Larger values are unrealistic, and simulating them takes too long."""


def known_options(
    options: Sequence[str], declare: Callable[[argparse.ArgumentParser], object]
) -> tuple[dict[str, Any], list[str]]:
    """The options of a command line that ``declare`` adds to a parser, and the other words.

    Raises:
        ConfigError: a value is missing or refused by its type.
    """
    kept: Any = {"argument_default": argparse.SUPPRESS, "exit_on_error": False}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, **kept)
    declare(parser)
    try:
        known, others = parser.parse_known_args(list(options))
    except argparse.ArgumentError as error:
        raise ConfigError(str(error).removeprefix("argument ")) from error
    return vars(known), others


def _declare(parser: argparse.ArgumentParser) -> None:
    def numbers(text: str) -> tuple[int, ...] | None:
        return None if text == "none" else tuple(map(whole(1, 10**12), text.split(",")))

    types: dict[str, Callable[[str], Any]] = {"str": str, _NUMBERS: numbers}
    for name, kind in _KINDS.items():
        spellings = _SPELLINGS.get(name, (option_name(name),))
        if kind == "bool":
            parser.add_argument(*spellings, dest=name, action="store_true")
        elif kind != _WORDS:
            converter = types.get(kind) or whole(1, _MOST.get(name, 10**12))
            parser.add_argument(*spellings, dest=name, type=converter)


def _from_yaml(path: Path) -> dict[str, Any]:
    """The values of a file, whose keys are read as the options of a command line."""
    content = read_config(path)
    absent = [name for name in _KINDS if content.get(name) is None]
    for key in content:
        # Other options of pretrain_gpt.py, as moe_ffn_hidden_size, are less similar.
        if key not in _KINDS and (near := did_you_mean(str(key), absent, 0.9)):
            raise ConfigError(f"{path}: unknown option {key!r}{near}")
    if missing := [name for name in absent if _KINDS[name] not in (_WORDS, _NUMBERS)]:
        raise ConfigError(f"{path}: {', '.join(missing)} missing; every option has to be there")
    words: list[str] = []
    lines: dict[str, tuple[str, ...]] = {"pretrain_options": ()}
    for name, value in content.items():
        kind = _KINDS.get(name)
        option = option_name(str(name))
        refused = f"{path}: {name}: {value!r:.40} is not"
        if kind == _WORDS:
            lines[name] = tuple(str(value or "").split())
            if lines[name] and not lines[name][0].startswith("--"):
                raise ConfigError(f"{refused} a line of options, as --option value")
        elif kind and isinstance(value, list):
            raise ConfigError(f"{refused} a value")
        elif value is True:
            words.append(option)
        elif value is not None and not (value is False and kind in (None, "bool")):
            # One word, so that the option takes all of it or refuses it.
            parts = value if isinstance(value, list) else [value]
            words += [f"{option}={value}"] if kind else [option, *map(str, parts)]
    try:
        known, others = known_options(words, _declare)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if why := unknown_option(others):
        raise ConfigError(f"{path}: {why}")
    return {**known, **lines, "pretrain_options": (*others, *lines["pretrain_options"])}


# ------------------------------------------------------------------ what does not fit together

_MOST_RANKS = 4096
"""Largest size of a group that is suggested."""


def problems(config: ModelConfig) -> Iterator[str]:
    """All mismatches, each with the value, the limit and the remedy."""
    for row in _divisions(config):
        yield from indivisible(*row)
    if config.max_position_embeddings < config.seq_length:
        yield (
            f"sequence length {config.seq_length} exceeds --max-position-embeddings "
            f"{config.max_position_embeddings}; raise the latter to {config.seq_length}"
        )
    layers = config.num_layer_list
    pp = config.pipeline_model_parallel_size
    if layers and (pp == 1 or len(layers) != pp or sum(layers) != config.num_layers):
        yield (
            f"NUM_LAYER_LIST {','.join(map(str, layers))} does not fit PP {pp} and "
            f"{config.num_layers} layers; give a number for each of 2 or more stages, of sum "
            f"{config.num_layers}, or NUM_LAYER_LIST=none for the same number in each"
        )


def _divisions(config: ModelConfig) -> Iterator[tuple[str, int, str, int, str]]:
    """Arguments of :func:`indivisible`."""
    tp = config.tensor_model_parallel_size
    cp = config.context_parallel_size
    pp = config.pipeline_model_parallel_size
    algorithm = config.context_parallel_algo
    heads = config.num_attention_heads
    groups = config.num_query_groups
    ffn = config.ffn_hidden_size
    yield "hidden size", config.hidden_size, "heads", heads, "--hidden-size"
    yield "number of heads", heads, "query groups", groups, "--num-attention-heads"
    heads_fit = not (heads % tp or groups % tp)
    if heads_fit:
        yield "feed-forward width", ffn, "TP", tp, "--ffn-hidden-size"
    else:
        sizes = f"{heads} attention heads, {groups} query groups and feed-forward width {ffn}"
        yield f"{sizes}: their common divisor", math.gcd(heads, groups, ffn), "TP", tp, "TP"
    if config.num_layer_list is None:
        yield "without NUM_LAYER_LIST the number of layers", config.num_layers, "PP", pp, "PP"
    product = f"TP*PP*CP = {tp}*{pp}*{cp} ="
    change = "another layout, or NNODES * NPUS_PER_NODE"
    yield "number of NPUs", config.world_size, product, config.model_parallel_size, change
    parts = cp
    by = "CP"
    # If the heads do not fit TP, no sequence length would help.
    if config.uses_sequence_parallel and heads_fit:
        parts = tp * cp
        by = f"TP*CP = {tp}*{cp} ="
    if cp > 1 and algorithm == "megatron_cp_algo" and config.seq_length % parts == 0:
        # Each rank gets a part from both ends of the causal triangle.
        parts = 2 * cp
        by = f"2*CP = 2*{cp} ="
    yield "sequence length", config.seq_length, by, parts, "--seq-length"
    if cp > 1 and algorithm == "ulysses_cp_algo" and heads_fit:
        yield "for Ulysses the number of attention heads per TP rank", heads // tp, "CP", cp, "CP"
    if config.world_size % config.model_parallel_size == 0:
        micro = config.micro_batch_size
        replicas = config.data_parallel_size
        by = f"micro-batch size times data-parallel size = {micro}*{replicas} ="
        batch = config.global_batch_size
        yield "global batch size", batch, by, micro * replicas, "--global-batch-size"


def indivisible(what: str, value: int, by: str, divisor: int, option: str = "") -> Iterator[str]:
    """The problem unless ``divisor`` divides ``value``, with the nearest values that fit.

    Args:
        option: what to change: an option that sets the value, or ``by``, to change the divisor.
    """
    if value % divisor == 0:
        return
    below = value // divisor * divisor
    fitting = [below, below + divisor] if below else [divisor]
    if option == by:
        sizes = [n for n in range(1, min(value, _MOST_RANKS) + 1) if value % n == 0]
        smaller = [n for n in sizes if n < divisor]
        fitting = [*smaller[-1:], *sizes[len(smaller) :][:1]]
    choose = " ".join(filter(None, ("choose", option, " or ".join(map(str, fitting)))))
    yield f"{what} {value} is not divisible by {by} {divisor}; {choose}"


# ------------------------------------------------------------------ for the launchers


def main(words: Sequence[str]) -> int:
    """Check a file, or its name in ``configs/``, with options that override it; print its words.

    A line each for ``pretrain_gpt.py``, CommFuse and torchrun, or a line on stderr per problem.
    """
    try:
        config = ModelConfig.load(find_config(words[0]), words[1:])
        config.validate()
    except ConfigError as error:
        for line in str(error).splitlines():
            print(f"{words[0]}: {line}", file=sys.stderr)
        return 2
    sizes = "--nproc_per_node", str(config.npus_per_node), "--nnodes", str(config.nnodes)
    for options in (config.arguments(), config.commfuse_options, sizes):
        print(*options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
