"""Training data: Python's standard library as bytes, in samples that depend only on an index.

A sample is a window of the token stream, at a position drawn from (seed, sample index).
"""

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from commfuse_npu.tools.launch_script import UsageError

VOCABULARY = 257
"""One token per byte, 0 to 255, and 256 for the end of a document."""

_BYTES = 8 << 20
# Generated files, code outside the library itself, or modules that not every installation has.
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"})


class Corpus(NamedTuple):
    """A stream of tokens, ``[T]`` uint16."""

    tokens: npt.NDArray[np.uint16]
    documents: int

    def batch(
        self, samples: Sequence[int], seq_length: int, seed: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels, ``[len(samples), seq_length]`` int64; labels are one token ahead."""
        last = len(self.tokens) - seq_length
        starts = [np.random.default_rng((seed, sample)).integers(last) for sample in samples]
        rows = np.stack([self.tokens[start : start + seq_length + 1] for start in starts])
        tokens = torch.from_numpy(rows.astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def load_corpus(seq_length: int) -> Corpus:
    """Read the first 8 MiB of the standard library's sources, in the order of their paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    documents: list[npt.NDArray[np.uint16]] = []
    tokens = 0
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED.isdisjoint(path.relative_to(root).parts) and (document := path.read_bytes()):
            text = np.frombuffer(document, np.uint8)
            documents.append(np.append(text, VOCABULARY - 1).astype(np.uint16))
            tokens += len(documents[-1])
        if tokens >= _BYTES:
            break
    if tokens < seq_length + 1:
        raise UsageError(
            f"{root} has {tokens} tokens, but one sample needs {seq_length + 1}; choose a shorter "
            "--seq-length, or a Python with the sources of its standard library"
        )
    return Corpus(np.concatenate(documents), len(documents))
