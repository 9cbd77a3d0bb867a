"""Options of the ops."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, fields, replace
from types import NoneType, UnionType

import torch

from commfuse_npu.ops.tuning import Tuning
from commfuse_npu.plan import Schedule

__all__ = ["LinearOptions", "check_type"]


def check_type(where: str, name: str, value: object, kind: type | UnionType, expected: str) -> None:
    """Raise a TypeError if the argument ``name`` is not a ``kind``.

    Args:
        where: the op, or the class, that is called.
        expected: what to pass.
    """
    if not isinstance(value, kind):
        given = "None" if value is None else f"a {type(value).__name__}"
        raise TypeError(f"{where}: {name} is {given}; pass {expected}")


@dataclass(frozen=True, repr=False)
class LinearOptions:
    """Options of an op; equal on every rank of the group.

    Buckets use ``schedule`` and ``reduce_dtype`` alone.

    Args:
        schedule: order of the peers, lanes and chunks.
        chunks: number of pieces in which a block is sent; short for a schedule with so many.
        reduce_dtype: add partial sums in this dtype and round once; by default in their own, as
            the collective does.
        main_grad: accumulate the weight gradient into ``weight.main_grad``, Megatron's
            ``gradient_accumulation_fusion``.
        collectives_from: column-parallel layers with at least this many outputs per rank run their
            backward with torch's collectives in Megatron's order, because their GEMMs hide them.
        tuning: at the first call with a shape, find the fastest chunks and number of lanes, or that
            collectives are faster; see :mod:`commfuse_npu.ops.tuning`.  Used by
            :func:`all_gather_linear` and :func:`linear_reduce_scatter`.  With it attention is cut
            into 4 chunks; the other ops ignore it.
    """

    schedule: Schedule = Schedule()
    reduce_dtype: torch.dtype | None = None
    main_grad: bool = False
    collectives_from: int | None = None
    tuning: Tuning | None = None
    chunks: InitVar[int | None] = None

    def __post_init__(self, chunks: int | None) -> None:
        name = "LinearOptions"
        check_type(name, "schedule", self.schedule, Schedule, "Schedule(...)")
        dtypes = "a dtype, as torch.float32, or None"
        check_type(name, "reduce_dtype", self.reduce_dtype, torch.dtype | NoneType, dtypes)
        check_type(name, "tuning", self.tuning, Tuning | NoneType, "Tuning(...) or None")
        if chunks is not None:
            object.__setattr__(self, "schedule", replace(self.schedule, chunks=chunks))
        if self.reduce_dtype is not None and not self.reduce_dtype.is_floating_point:
            raise ValueError(
                f"reduce_dtype is {self.reduce_dtype}; partial sums need a floating-point dtype"
            )

    def __repr__(self) -> str:
        """The options that are not the default, so that signatures can be read."""
        values = ((field, getattr(self, field.name)) for field in fields(self))
        given = (f"{field.name}={value!r}" for field, value in values if value != field.default)
        return f"LinearOptions({', '.join(given)})"
