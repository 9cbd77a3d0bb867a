"""A small instruction data set and a tokenizer with padding, for fine-tuning launches.

Mock data and the null tokenizer suffice for pretraining only: fine-tuning reads token ids, masks
and labels from separate files and asks the tokenizer how to pad.  The files have the format of
MindSpeed-LLM's preprocessing and Hugging Face's tokenizers.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from commfuse_npu.tools.launch_script.option_words import Options
from commfuse_npu.tools.launch_script.short_run import drop_data_and_tokenizer, missing_tokenizer

INSTRUCTIONS = "--is-instruction-dataset"
PAIRS = "--is-pairwise-dataset"
"""The options of fine-tuning and of preference training, which mock data cannot replace."""

_ROWS = 64
_WORDS = 1000
_VOCABULARY = 1024
"""Words, special tokens and those that a prompt template adds, padded for TP."""
_IGNORED = -100
"""The label of prompt tokens."""


def replace_missing_instructions(options: Options, folder: Path, target: Path) -> None:
    """Write stand-ins into ``target`` and set their options, if files of fine-tuning are missing.

    ``folder`` is the base of the launch's relative paths.
    """
    prefix = folder / (options.text("--data-path") or "")
    has_data = any(prefix.parent.glob(f"{prefix.name}_packed_*_document.idx"))
    pairs = PAIRS in options
    needed = pairs or INSTRUCTIONS in options
    if not needed or (has_data and not missing_tokenizer(options, folder)):
        return
    drop_data_and_tokenizer(options, why="data or tokenizer are not on this machine")
    _write_tokenizer(target / "tokenizer")
    length = options.number("--seq-length", 64)
    rows = _pairs(length) if pairs else _rows(length, "--neat-pack" in options)
    fields: defaultdict[str, list[np.ndarray]] = defaultdict(list)
    for row in rows:
        for name, values in row.items():
            fields[name].append(values)
    for name, documents in fields.items():
        _write_indexed(target / f"instructions_packed_{name}_document", documents)
    options.set("--data-path", str(target / "instructions"))
    options.set("--tokenizer-type", "PretrainedFromHF")
    options.set("--tokenizer-name-or-path", str(target / "tokenizer"))
    options.set("--padded-vocab-size", _VOCABULARY)


def _write_tokenizer(folder: Path) -> None:
    words = ["<pad>", "<eos>", "<unk>", *(f"word{number}" for number in range(3, _WORDS))]
    files = {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {
                "type": "WordLevel",
                "vocab": {word: number for number, word in enumerate(words)},
                "unk_token": "<unk>",
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{name}_token": f"<{name}>" for name in ("pad", "eos", "unk")},
        },
    }
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), "utf-8")


def _rows(length: int, packed: bool) -> Iterator[dict[str, np.ndarray]]:
    """Token ids, masks and labels; packed rows are full, and their mask numbers two documents."""
    random = np.random.default_rng(1234)
    for first in random.integers(length // 2, length, _ROWS):
        tokens = random.integers(3, _WORDS, length if packed else first)
        place = np.arange(tokens.size)
        second = place >= first
        prompt = np.where(second, place - first, place) < length // 8
        labels = np.where(prompt, _IGNORED, tokens)
        yield {"input_ids": tokens, "attention_mask": 1 + second, "labels": labels}


def _pairs(length: int) -> Iterator[dict[str, np.ndarray]]:
    """Token ids and labels of a chosen and a rejected answer to the same prompt."""
    random = np.random.default_rng(1234)
    for _ in range(_ROWS):
        prompt = random.integers(3, _WORDS, length // 8)
        row = {}
        for answer in ("chosen", "rejected"):
            words = random.integers(3, _WORDS, random.integers(length // 4, length // 2))
            row[f"{answer}_input_ids"] = np.append(prompt, words)
            row[f"{answer}_labels"] = np.append(np.full_like(prompt, _IGNORED), words)
        yield row


def _write_indexed(prefix: Path, rows: list[np.ndarray]) -> None:
    """Megatron's indexed data set, one document per row."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int64)
    for row in rows:
        builder.add_document(row, [row.size])
    builder.finalize(f"{prefix}.idx")
