"""Which keys a query sees, of the whole sequence and of a run of queries.

Legend: ``S`` queries and keys, ``B`` batch, ``q_SBAD`` a tensor of that shape.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from commfuse_npu.layers.documents import Documents

__all__ = ["AttentionMask"]


class AttentionMask(NamedTuple):
    """The arguments of an op with attention that say what a query sees.

    Attributes:
        causal: a query sees the keys up to its own position; else all of them.
        documents: packed ones; a query sees keys of its own only.  They need ``causal``.
        hidden: bool, ``[B, 1, S, S]`` or ``[1, 1, S, S]``, True where a query (third dimension)
            does not see a key (fourth); not with documents.
    """

    causal: bool
    documents: Documents | None = None
    hidden: torch.Tensor | None = None

    def checked(self, name: str, q: torch.Tensor) -> AttentionMask:
        """This mask, as it is for ``q_SBAD``; one document per sample is causal and no more.

        Raises:
            ValueError: it does not fit.
        """
        documents, hidden = self.documents, self.hidden
        length, batch = q.shape[:2]
        if documents is not None:
            if not self.causal or hidden is not None:
                raise ValueError(
                    f"{name}: documents are causal, and have no other mask; pass causal=True and "
                    "no hidden, or leave the documents out and put their ends into hidden"
                )
            if (documents.length, documents.batch) != (length, batch):
                raise ValueError(
                    f"{name}: documents of {documents.batch} samples of {documents.length} are "
                    f"given for {batch} of {length}; make them for those"
                )
            return self._replace(documents=None) if documents.whole else self
        shapes = [(b, 1, length, length) for b in (batch, 1)]
        if hidden is not None and (
            hidden.dtype != torch.bool or hidden.shape not in shapes or hidden.device != q.device
        ):
            raise ValueError(
                f"{name}: hidden is {hidden.dtype} {tuple(hidden.shape)} on {hidden.device}; it "
                f"has to be torch.bool {shapes[0]} or {shapes[1]} on {q.device}"
            )
        return self

    @property
    def costs_rise(self) -> bool:
        """Whether later queries see more keys; documents make it about the same for all."""
        return self.causal and self.documents is None

    def keys(self, run: slice) -> slice:
        """The keys that any of these queries may see."""
        if self.documents is not None:
            return self.documents.pieces(run)[0]
        return slice(0, run.stop) if self.causal else slice(None)

    def keywords(self, run: slice) -> dict[str, Any]:
        """What a kernel is told, of these queries and :meth:`keys` of them."""
        told: dict[str, Any] = {"causal": self.causal}
        if self.documents is not None:
            told["pieces"] = self.documents.pieces(run)[1]
        if self.hidden is not None:
            told["hidden"] = self.hidden[:, :, run, self.keys(run)]
        return told
