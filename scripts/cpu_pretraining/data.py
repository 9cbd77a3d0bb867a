"""Training data: files as bytes, held-out documents, samples that depend on nothing but an index.

A sample is a window of the token stream whose position is drawn from (seed, split, sample index).
There is no iterator state: whoever knows the index of the next sample can go on, which is what
makes a resumed run read exactly what the uninterrupted one would have read.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import torch

from .usage_error import UsageError

__all__ = ["VOCABULARY", "Corpus", "global_batch_samples", "load_corpus", "tokens_of"]

Tokens = npt.NDArray[np.uint16]

STANDARD_LIBRARY_BYTES = 8 << 20
# Not written by hand, not code of the library itself, or not there on every installation.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
)
_SPLIT_NUMBER = {"train": 0, "valid": 1}


VOCABULARY = 257
"""One token per byte, 0 to 255, and 256 for the end of a document."""


def tokens_of(document: bytes) -> Tokens:
    """``[len(document) + 1]`` uint16, the last one the end of the document."""
    tokens = np.empty(len(document) + 1, dtype=np.uint16)
    tokens[:-1] = np.frombuffer(document, dtype=np.uint8)
    tokens[-1] = VOCABULARY - 1
    return tokens


@dataclass(frozen=True)
class Corpus:
    """Two token streams, `train` and `valid`, `[T]` uint16 each; `valid` may be empty."""

    train: Tokens
    valid: Tokens
    documents: int
    source: str

    def fingerprint(self) -> str:
        """SHA-256 of both streams, to notice that a resumed run reads other data."""
        digest = hashlib.sha256(self.train.tobytes())
        digest.update(b"|")
        digest.update(self.valid.tobytes())
        return digest.hexdigest()

    def batch(
        self, split: str, samples: Sequence[int], seq_length: int, seed: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels, `[len(samples), seq_length]` int64 each; labels are one token ahead.

        Sample i is the same for every rank, layout and history: it depends on (seed, split, i).
        """
        stream = self.train if split == "train" else self.valid
        rows = []
        for sample in samples:
            draw = np.random.default_rng((seed, _SPLIT_NUMBER[split], sample))
            start = int(draw.integers(0, len(stream) - seq_length))
            rows.append(stream[start : start + seq_length + 1])
        tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def global_batch_samples(
    first: int, num_microbatches: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> Iterator[range]:
    """Sample indices of each micro-batch of one data-parallel rank.

    The global batch is `first .. first + num_microbatches * micro_batch_size * dp_size - 1`
    whatever the layout; data-parallel ranks take disjoint parts of it. Tensor-parallel ranks pass
    the same `dp_rank` and read the same samples.
    """
    for microbatch in range(num_microbatches):
        start = first + (microbatch * dp_size + dp_rank) * micro_batch_size
        yield range(start, start + micro_batch_size)


def load_corpus(
    data_path: str | None, *, valid_fraction: float, seq_length: int, need_valid: bool
) -> Corpus:
    """Read and split the data of `--data-path`; None is Python's standard library.

    Every k-th document, k = 1 / `valid_fraction`, is held out; with fewer than k documents the
    tail of the stream is, so that a single file works too.

    Raises `UsageError` if the path is missing, unreadable, empty or too short for one window.
    """
    if data_path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        documents = _read_documents(_standard_library(root), STANDARD_LIBRARY_BYTES)
        source = "the Python standard library"
    else:
        root = Path(data_path)
        documents = _read_documents(_files_below(root), None)
        source = data_path
    documents = [document for document in documents if document]
    if not documents:
        raise UsageError(f"{source} holds no data; give a file or folder with text to --data-path")

    train, valid = _hold_out([tokens_of(document) for document in documents], valid_fraction)
    _check_length(train, "training", source, seq_length)
    if need_valid:
        _check_length(valid, "validation", source, seq_length)
    return Corpus(train, valid, len(documents), source)


def _standard_library(root: Path) -> list[Path]:
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
    ]


def _files_below(root: Path) -> list[Path]:
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise UsageError(f"--data-path {root} does not exist; give a file or a folder")
    found = []
    # Not rglob: it passes silently over folders that it may not read.
    for folder, folders, names in os.walk(root, onerror=_unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(path for path in found if path.is_file())


def _unreadable(error: OSError) -> NoReturn:
    raise UsageError(f"cannot read {error.filename}: {error.strerror}; check its permissions")


def _read_documents(paths: Sequence[Path], limit: int | None) -> list[bytes]:
    documents: list[bytes] = []
    total = 0
    for path in paths:
        try:
            document = path.read_bytes()
        except OSError as error:
            _unreadable(error)
        documents.append(document)
        total += len(document)
        if limit is not None and total >= limit:
            break
    return documents


def _hold_out(encoded: list[Tokens], valid_fraction: float) -> tuple[Tokens, Tokens]:
    empty = np.empty(0, dtype=np.uint16)
    if valid_fraction == 0.0:
        return np.concatenate(encoded), empty
    every = round(1.0 / valid_fraction)
    if len(encoded) < every:
        stream = np.concatenate(encoded)
        cut = len(stream) - int(len(stream) * valid_fraction)
        return stream[:cut], stream[cut:]
    held_out = [d for i, d in enumerate(encoded) if i % every == every - 1]
    kept = [d for i, d in enumerate(encoded) if i % every != every - 1]
    return np.concatenate(kept), np.concatenate(held_out)


def _check_length(stream: Tokens, split: str, source: str, seq_length: int) -> None:
    if len(stream) < seq_length + 1:
        raise UsageError(
            f"the {split} part of {source} has {len(stream)} tokens, but one sample needs "
            f"{seq_length + 1}; give more data, a shorter --seq-length or another --valid-fraction"
        )
