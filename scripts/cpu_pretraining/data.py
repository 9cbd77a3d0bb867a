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

from .arguments import UsageError

__all__ = ["VOCABULARY", "Corpus", "global_batch_samples", "load_corpus", "tokens_of"]

Tokens = npt.NDArray[np.uint16]

VOCABULARY = 257
"""One token per byte, 0 to 255, and 256 for the end of a document."""

_HELD_OUT = 20
"""One document of so many is for validation; of fewer documents, that part of the tokens."""
_STANDARD_LIBRARY_BYTES = 8 << 20
# Not written by hand, not code of the library itself, or not there on every installation.
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"})


def tokens_of(document: bytes) -> Tokens:
    """``[len(document) + 1]`` uint16, the last one the end of the document."""
    return np.append(np.frombuffer(document, np.uint8).astype(np.uint16), np.uint16(VOCABULARY - 1))


@dataclass(frozen=True)
class Corpus:
    """Two token streams, ``train`` and ``valid``, ``[T]`` uint16 each; ``valid`` may be empty."""

    train: Tokens
    valid: Tokens
    documents: int
    source: str

    def fingerprint(self) -> str:
        """SHA-256 of both streams, to notice that a resumed run reads other data."""
        return hashlib.sha256(self.train.tobytes() + b"|" + self.valid.tobytes()).hexdigest()

    def batch(
        self, split: str, samples: Sequence[int], seq_length: int, seed: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels, ``[len(samples), seq_length]`` int64; labels are one token ahead.

        Sample i is the same for every rank, layout and history: it depends on (seed, split, i).
        """
        stream = self.train if split == "train" else self.valid
        rows = []
        for sample in samples:
            draw = np.random.default_rng((seed, int(split != "train"), sample))
            start = int(draw.integers(0, len(stream) - seq_length))
            rows.append(stream[start : start + seq_length + 1])
        tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def global_batch_samples(
    first: int, num_microbatches: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> Iterator[range]:
    """Sample indices of each micro-batch of one data-parallel rank.

    The global batch is ``first .. first + num_microbatches * micro_batch_size * dp_size - 1``
    whatever the layout; data-parallel ranks take disjoint parts of it. Tensor-parallel ranks pass
    the same ``dp_rank`` and read the same samples.
    """
    for microbatch in range(num_microbatches):
        start = first + (microbatch * dp_size + dp_rank) * micro_batch_size
        yield range(start, start + micro_batch_size)


def load_corpus(data_path: Path | None, seq_length: int, *, need_valid: bool) -> Corpus:
    """Read and split the data of ``--data-path``; None is Python's standard library.

    Raises:
        UsageError: the path is unreadable, empty or too short for one window.
    """
    source = str(data_path or "the Python standard library")
    documents: list[Tokens] = []
    try:
        for path in _standard_library() if data_path is None else _files_below(data_path):
            if document := path.read_bytes():
                documents.append(tokens_of(document))
            if data_path is None and sum(map(len, documents)) >= _STANDARD_LIBRARY_BYTES:
                break
    except OSError as error:
        _unreadable(error)
    if not documents:
        raise UsageError(f"{source} holds no data; give a file or folder with text to --data-path")
    if len(documents) < _HELD_OUT:
        stream = np.concatenate(documents)
        train, valid = np.split(stream, [len(stream) - len(stream) // _HELD_OUT])
    else:
        valid = np.concatenate(documents[_HELD_OUT - 1 :: _HELD_OUT])
        train = np.concatenate([x for i, x in enumerate(documents, 1) if i % _HELD_OUT])
    for split, stream in (("training", train), ("validation", valid))[: 1 + need_valid]:
        if len(stream) < seq_length + 1:
            raise UsageError(
                f"the {split} part of {source} has {len(stream)} tokens, but one sample needs "
                f"{seq_length + 1}; give more data or a shorter --seq-length, or leave validation "
                "out (--eval-interval 0)"
            )
    return Corpus(train, valid, len(documents), source)


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(root.rglob("*.py"))
    return [path for path in paths if not _SKIPPED.intersection(path.relative_to(root).parts)]


def _files_below(root: Path) -> list[Path]:
    if root.is_file():
        return [root]
    found = []
    # Not rglob: it passes silently over folders that it may not read.
    for folder, folders, names in os.walk(root, onerror=_unreadable):
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(path for path in found if path.is_file())


def _unreadable(error: OSError) -> NoReturn:
    raise UsageError(f"cannot read {error.filename}: {error.strerror}; check its permissions")
