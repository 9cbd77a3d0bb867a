"""Training data: files as bytes, and samples that depend only on an index.

A sample is a window of the token stream, at a position drawn from (seed, sample index).
There is no iterator state, so a resumed run reads exactly what the uninterrupted one would have.
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

__all__ = ["VOCABULARY", "Corpus", "load_corpus"]

VOCABULARY = 257
"""One token per byte, 0 to 255, and 256 for the end of a document."""

_STANDARD_LIBRARY_BYTES = 8 << 20
# Generated files, code outside the library itself, or modules that not every installation has.
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"})


@dataclass(frozen=True)
class Corpus:
    """A stream of tokens, ``[T]`` uint16."""

    tokens: npt.NDArray[np.uint16]
    documents: int
    source: str

    def fingerprint(self) -> str:
        """SHA-256 of the stream, to detect that a resumed run reads other data."""
        return hashlib.sha256(self.tokens.tobytes()).hexdigest()

    def batch(
        self, samples: Sequence[int], seq_length: int, seed: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels, ``[len(samples), seq_length]`` int64; labels are one token ahead.

        Sample i is the same for every rank, layout and history: it depends only on (seed, i).
        """
        rows = []
        for sample in samples:
            draw = np.random.default_rng((seed, 0, sample))
            start = int(draw.integers(0, len(self.tokens) - seq_length))
            rows.append(self.tokens[start : start + seq_length + 1])
        tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def load_corpus(data_path: Path | None, seq_length: int) -> Corpus:
    """Read the data of ``--data-path``; None is Python's standard library.

    Raises:
        UsageError: the path is unreadable, empty or too short for one window.
    """
    source = str(data_path or "the Python standard library")
    documents: list[npt.NDArray[np.uint16]] = []
    tokens = 0
    try:
        for path in _files(data_path or Path(sysconfig.get_paths()["stdlib"]), data_path is None):
            if document := path.read_bytes():
                characters = np.frombuffer(document, np.uint8).astype(np.uint16)
                documents.append(np.append(characters, np.uint16(VOCABULARY - 1)))
                tokens += len(documents[-1])
            if data_path is None and tokens >= _STANDARD_LIBRARY_BYTES:
                break
    except OSError as error:
        _unreadable(error)
    if tokens < seq_length + 1:
        raise UsageError(
            f"{source} has {tokens} tokens, but one sample needs {seq_length + 1}; give a file or "
            "folder with more text to --data-path, or a shorter --seq-length"
        )
    return Corpus(np.concatenate(documents), len(documents), source)


def _files(root: Path, standard_library: bool) -> Iterator[Path]:
    """All files below ``root`` in order of their paths, without hidden ones."""
    if root.is_file():
        yield root
        return
    paths: list[Path] = []
    # Not rglob, which silently skips unreadable folders.
    for folder, folders, names in os.walk(root, onerror=_unreadable):
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
        paths += [Path(folder, name) for name in names if not name.startswith(".")]
    for path in sorted(paths):
        included = path.suffix == ".py" and _SKIPPED.isdisjoint(path.relative_to(root).parts)
        if path.is_file() and (included or not standard_library):
            yield path


def _unreadable(error: OSError) -> NoReturn:
    raise UsageError(f"cannot read {error.filename}: {error.strerror}; check its permissions")
