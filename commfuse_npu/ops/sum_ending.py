"""The end of a sum over the ranks whose result may be an average."""

from __future__ import annotations

import torch

from commfuse_npu.kernels import kernels_for
from commfuse_npu.runtime.executor import Work

__all__ = ["sum_ending"]


def sum_ending(divisor: int) -> Work:
    """``finish(out, total, own)``: ``out = (total + own) / divisor``.

    Sum and quotient have the dtype of ``total``; if ``out`` has another one they are rounded to it
    together.  ``total`` is used up.  Nothing fails once ``out`` is written.
    """

    def finish(out: torch.Tensor, total: torch.Tensor, own: torch.Tensor) -> None:
        terms = [(total, 1), (own, 1)]
        if divisor == 1:
            kernels_for(out.device).sum_parts(out, terms)
        else:
            kernels_for(out.device).sum_parts(total, terms)
            torch.div(total, divisor, out=out)

    return finish
