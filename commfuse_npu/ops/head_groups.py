"""Linear layers into and out of head groups, run of rows by run of rows.

With Ulysses a rank has all heads of some rows of the sequence before an exchange and after it all
rows of some heads.  So a layer next to the exchange is a product with one part of its weight per
rank, the part of that rank's heads.  As for attention, one GEMM runs per run of rows, in the order
of a program, so that a fused op and its plain form add in the same order.

Legend: ``N`` ranks and head groups, ``n`` rows of a block (sequence times batch), ``H`` hidden,
``O``, ``F`` features of a head group, ``R`` rows of a weight.  A run of rows lies in one of the
``N`` blocks of a whole ``[N * n, ...]``; block g belongs to head group g.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commfuse_npu.kernels import gemm_into, kernels_for
from commfuse_npu.ops.options import LinearOptions
from commfuse_npu.ops.weight import WeightGradient

__all__ = ["HeadRows", "LinearOfHeads", "LinearToHeads", "beside"]


class HeadRows:
    """Which rows of a weight ``[R, H]`` make the features of each head group.

    Args:
        name: the operation, for errors.
        weight_rows: ``R``.
        size: ``N``.
        rows: per head group the slices of rows that make its features, one after the other.  They
            may overlap: a key head that several ranks use is in several groups.  By default group
            g has the g-th of ``N`` equal parts.

    Attributes:
        bounds: ``rows`` as numbers.
        features: of a group, ``O``.

    Raises:
        ValueError: the rows are not in the weight, or not as many for every group.
    """

    def __init__(
        self, name: str, weight_rows: int, size: int, rows: Sequence[Sequence[slice]] | None = None
    ) -> None:
        if rows is None:
            if weight_rows % size:
                raise ValueError(
                    f"{name}: {weight_rows} rows of the weight are not divisible by the group size "
                    f"{size}; say with rows which of them each rank gets"
                )
            each = weight_rows // size
            rows = [[slice(group * each, (group + 1) * each)] for group in range(size)]
        if len(rows) != size:
            raise ValueError(
                f"{name}: rows are given for {len(rows)} ranks, the group has {size}; give one "
                "sequence of slices per rank"
            )
        self._weight_rows = weight_rows
        self.bounds = tuple(
            tuple(_bounds(name, part, weight_rows) for part in parts) for parts in rows
        )
        counts = [sum(stop - start for start, stop in parts) for parts in self.bounds]
        if len(set(counts)) != 1:
            raise ValueError(
                f"{name}: the ranks get {counts} rows of the weight; all have to get as many"
            )
        self.features = counts[0]

    def parts(self, group: int) -> list[tuple[slice, slice]]:
        """``(rows, columns)``: rows of the weight, and where they are among the features."""
        found, column = [], 0
        for start, stop in self.bounds[group]:
            found.append((slice(start, stop), slice(column, column + stop - start)))
            column += stop - start
        return found

    def take(self, weight: torch.Tensor, group: int) -> torch.Tensor:
        """The part of a weight or a bias that belongs to a group; a copy only if it must be."""
        parts = [weight[rows] for rows, _ in self.parts(group)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def columns(self, y: torch.Tensor) -> torch.Tensor:
        """``[n, R]``, what the whole weight makes, to ``[N * n, O]``; differentiable."""
        blocks = [
            torch.cat([y[:, rows] for rows, _ in self.parts(group)], dim=1)
            for group in range(len(self.bounds))
        ]
        return torch.cat(blocks)

    def add_up(self, whole: torch.Tensor) -> torch.Tensor:
        """The adjoint of :meth:`columns`: ``[N * n, O]`` to ``[n, R]``, added in fp32."""
        size = len(self.bounds)
        blocks = whole.view(size, whole.shape[0] // size, self.features)
        if size * self.features == self._weight_rows and self._in_order():
            return beside(whole, size)
        wide = torch.promote_types(whole.dtype, torch.float32)
        total = whole.new_zeros((blocks.shape[1], self._weight_rows), dtype=wide)
        for group, block in enumerate(blocks):
            for rows, columns in self.parts(group):
                total[:, rows].add_(block[:, columns])
        return total.to(whole.dtype)

    def _in_order(self) -> bool:
        flat = [bound for parts in self.bounds for bound in parts]
        starts = [0, *(stop for _, stop in flat)]
        return all(start == before for (start, _), before in zip(flat, starts, strict=False))


def _bounds(name: str, part: slice, weight_rows: int) -> tuple[int, int]:
    start = 0 if part.start is None else part.start
    stop = weight_rows if part.stop is None else part.stop
    if part.step not in (None, 1) or not 0 <= start < stop <= weight_rows:
        raise ValueError(
            f"{name}: {part} is no run of the weight's {weight_rows} rows; give slices from 0 to "
            f"{weight_rows} with step 1"
        )
    return start, stop


def beside(whole: torch.Tensor, size: int) -> torch.Tensor:
    """``[N * n, F]``, blocks one below the other, to ``[n, N * F]``, one beside the other."""
    return whole.view(size, whole.shape[0] // size, whole.shape[-1]).transpose(0, 1).flatten(1)


class _Grouped:
    """A weight as a matrix per head group, ``[F, H]``.

    Args:
        weight: what is cut.
        block_rows: ``n``.
    """

    def __init__(self, weight: torch.Tensor, block_rows: int) -> None:
        self._weight = weight
        self._block_rows = block_rows
        self._kernels = kernels_for(weight.device)

    def _matrix(self, group: int) -> torch.Tensor:
        raise NotImplementedError

    def _place(self, run: slice) -> tuple[int, slice]:
        """The head group of a run of rows, and the rows inside its block."""
        group, start = divmod(run.start, self._block_rows)
        return group, slice(start, start + run.stop - run.start)

    def _split(self, x: torch.Tensor, run: slice, out: torch.Tensor) -> int:
        """``[n, H]`` to the features of one group, ``[rows, F]``."""
        group, inside = self._place(run)
        gemm_into(out, x[inside], self._matrix(group).t())
        return group

    def _collect(self, total: torch.Tensor, piece: torch.Tensor, run: slice) -> None:
        """Add what the features of one group, ``[rows, F]``, give to ``[n, H]``."""
        group, inside = self._place(run)
        # total += a @ b is the kernel of the weight gradient with a transposed.
        self._kernels.accumulate_weight_gradient(total[inside], piece.t(), self._matrix(group))

    def _zeros(self, shape: Sequence[int]) -> torch.Tensor:
        wide = torch.promote_types(self._weight.dtype, torch.float32)
        return self._weight.new_zeros(tuple(shape), dtype=wide)


class LinearToHeads(_Grouped):
    """``x @ W_g^T + b_g`` for the rows of every head group g, run by run, and its backward.

    Args:
        weight: ``[R, H]``.
        heads: which of its rows make ``W_g``, ``[O, H]``.
        block_rows: ``n``, rows of ``x``.
    """

    def __init__(self, weight: torch.Tensor, heads: HeadRows, block_rows: int) -> None:
        super().__init__(weight, block_rows)
        self._heads = heads
        # Chunks of a group come one by one; what has to be copied of a weight is copied once per
        # call.  Never longer: the optimizer changes the weight.
        self._matrices: dict[int, torch.Tensor] = {}

    def _matrix(self, group: int) -> torch.Tensor:
        if group not in self._matrices:
            self._matrices[group] = self._heads.take(self._weight, group)
        return self._matrices[group]

    def forward(
        self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, run: slice
    ) -> None:
        """Write the run ``[rows, O]`` of the whole ``[N * n, O]``.

        Args:
            x: ``[n, H]``.
            bias: ``[R]``.
        """
        group = self._split(x, run, out)
        if bias is not None:
            out.add_(self._heads.take(bias, group))

    def begin_backward(
        self, x: torch.Tensor | None, needs: Sequence[bool], options: LinearOptions
    ) -> None:
        """Make room for the gradients; all of them are summed in fp32.

        Args:
            x: ``[n, H]``, for the weight.
            needs: whether ``x``, the weight and the bias need theirs.
        """
        needs_x, needs_weight, needs_bias = needs
        rows, hidden = self._weight.shape
        self._x = x
        self._grad_x = self._zeros((self._block_rows, hidden)) if needs_x else None
        self._grad_bias = self._zeros((rows,)) if needs_bias else None
        self._wgrad = self._blocks = None
        if needs_weight:
            self._wgrad = WeightGradient(self._weight, main_grad=options.main_grad, blocks=False)
            if options.wgrad == "blocks":
                self._blocks = self._zeros((rows, hidden))

    @property
    def needs_whole(self) -> bool:
        """Whether :meth:`gradients` needs the whole gradient ``[N * n, O]``."""
        return self._wgrad is not None and self._blocks is None

    def backward(self, piece: torch.Tensor, run: slice) -> None:
        """Use the gradient of a run, ``[rows, O]``."""
        if self._grad_x is not None:
            self._collect(self._grad_x, piece, run)
        group, inside = self._place(run)
        for rows, columns in self._heads.parts(group):
            if self._blocks is not None:
                assert self._x is not None
                self._kernels.accumulate_weight_gradient(
                    self._blocks[rows], piece[:, columns], self._x[inside]
                )
            if self._grad_bias is not None:
                self._grad_bias[rows] += piece[:, columns].sum(0, dtype=self._grad_bias.dtype)

    def gradients(
        self, whole: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Of x, the weight and the bias, when all runs are through."""
        grad_weight = None
        if self._wgrad is not None:
            if self._blocks is not None:
                self._wgrad.take(self._blocks)
            else:
                assert whole is not None
                assert self._x is not None
                self._wgrad.add(self._heads.add_up(whole), self._x)
            grad_weight = self._wgrad.result()
        dtype = self._weight.dtype
        return _rounded(self._grad_x, dtype), grad_weight, _rounded(self._grad_bias, dtype)


class LinearOfHeads(_Grouped):
    """``sum of x_g @ W_g^T + bias`` over the head groups g, run by run, and its backward.

    Args:
        weight: ``[H, N * F]``; ``W_g`` are its columns ``g * F .. (g + 1) * F``.
        size: ``N``.
        block_rows: ``n``, rows of the result.

    Attributes:
        features: ``F``.
    """

    def __init__(self, weight: torch.Tensor, size: int, block_rows: int) -> None:
        super().__init__(weight, block_rows)
        self._size = size
        self.features = weight.shape[1] // size

    def _matrix(self, group: int) -> torch.Tensor:
        return self._weight.narrow(1, group * self.features, self.features).t()

    def begin_forward(self, bias: torch.Tensor | None) -> None:
        shape = self._block_rows, self._weight.shape[0]
        self._total = self._zeros(shape)
        if bias is not None:
            self._total.add_(bias)

    def forward(self, piece: torch.Tensor, run: slice) -> None:
        """Add what a run ``[rows, F]`` of the whole ``[N * n, F]`` gives."""
        self._collect(self._total, piece, run)

    def output(self) -> torch.Tensor:
        """``[n, H]``, rounded once, when all runs are through."""
        return self._total.to(self._weight.dtype)

    def begin_backward(
        self, grad: torch.Tensor, needs_weight: bool, options: LinearOptions
    ) -> None:
        """Take the gradient of the output, ``[n, H]``."""
        self._grad = grad
        self._by_group = options.wgrad == "blocks"
        self._wgrad = None
        if needs_weight:
            self._wgrad = WeightGradient(self._weight, main_grad=options.main_grad, blocks=False)

    def backward(self, out: torch.Tensor, run: slice) -> None:
        """Write the gradient of a run, ``[rows, F]``."""
        self._split(self._grad, run, out)

    def add_weight_gradient(self, whole: torch.Tensor | None) -> None:
        """Make the gradient of the weight from the whole input, ``[N * n, F]``.

        All of it has been there since the forward, so nothing is won by blocks of rows: ``blocks``
        is a GEMM per head group, as it arrived, ``whole`` one GEMM on a copy like the unfused one.
        """
        if self._wgrad is None:
            return
        assert whole is not None
        if not self._by_group:
            self._wgrad.add(self._grad, beside(whole, self._size))
            return
        total = self._zeros((self._size, self._weight.shape[0], self.features))
        blocks = whole.view(self._size, self._block_rows, self.features)
        for part, block in zip(total, blocks, strict=True):
            self._kernels.accumulate_weight_gradient(part, self._grad, block)
        self._wgrad.take(beside(total.flatten(0, 1), self._size))

    def weight_gradient(self) -> torch.Tensor | None:
        """What the backward returns for the weight."""
        return None if self._wgrad is None else self._wgrad.result()


def _rounded(total: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if total is None else total.to(dtype)
