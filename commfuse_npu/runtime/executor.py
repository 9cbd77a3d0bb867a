"""Executes programs: a loop over their instructions that makes no scheduling decisions of its own.

A step is posted as one batch {receive, send}.  On HCCL single transfers would open a communicator
per pair of ranks in the middle of a forward, and receives posted ahead of sends would hang.  HCCL
matches messages by order, gloo by tag.  A wait blocks the stream on HCCL, and the host on gloo.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C._profiler import _RecordFunctionFast

from commfuse_npu.plan.instructions import (
    Add,
    Collective,
    Compute,
    Copy,
    Post,
    RecordEvent,
    Span,
    Wait,
    WaitEvent,
)
from commfuse_npu.plan.program import Program
from commfuse_npu.runtime.collectives import begin_all_gather, begin_all_to_all
from commfuse_npu.runtime.device_streams import side_stream
from commfuse_npu.runtime.lanes import post_swap
from commfuse_npu.runtime.scratch import Arena, view_of

if TYPE_CHECKING:
    from commfuse_npu.runtime.order_log import Entry
    from commfuse_npu.runtime.transport import Transport

__all__ = ["Running", "Work"]

_LARGEST_TAG = 0x7FFFFFFF

Work = Callable[..., object]
"""The function that a :class:`~commfuse_npu.plan.instructions.Compute` instruction calls: with its
output tensors, then its input tensors, then its run of rows if it has one."""

Given = torch.Tensor | Work | None
"""What a program gets by name: one of its buffers or works; ``None`` if it has no such buffer."""


class Running:
    """A program in execution, created by :meth:`Transport.begin`.

    Call :meth:`run` until it is :attr:`done`.  An exception in between breaks the transport,
    because the other ranks wait for transfers that this rank no longer posts.

    Attributes:
        name: of the operation, for error messages.
        done: whether every instruction was executed and every transfer waited for.
        transferred: tensors that the program sends or receives, by storage address, if the
            transport has to call ``erase_stream`` on them; else empty.
    """

    done = False

    def __init__(
        self,
        transport: Transport,
        program: Program,
        name: str,
        dtype: torch.dtype,
        device: torch.device,
        tag: int,
        log: Entry | None,
        sum_dtype: torch.dtype | None,
    ) -> None:
        self.name = name
        self.program = program
        self._transport = transport
        self._tag = tag
        self._log = log
        self._dtype = dtype
        self._device = device
        self._sum_dtype = None if sum_dtype == dtype else sum_dtype
        self._at = 0
        self._views: dict[Span, torch.Tensor] = {}
        self._arenas: list[Arena] = []
        self.transferred: dict[int, torch.Tensor] = {}
        self._side = side_stream(device)
        self._events: dict[int, Any] = {}
        # The works of each post, by its step.
        self._posted: dict[int, Sequence[Any]] = {}
        self._take_scratch(late=False)

    @property
    def all_posted(self) -> bool:
        """Whether the program has posted all its transfers."""
        return self._at > self.program.last_post

    def run(self, *, ahead: bool = False, **given: Given) -> None:
        """Continue to the end of the program, or with ``ahead`` to its :class:`AheadEnd`.

        ``torch.profiler`` shows it as a range with the operation's name.

        Args:
            given: the works and buffers that the remaining instructions use, by their names in the
                rule.  ``gemm`` is by default the GEMM of the device's kernels.  A buffer is a
                matrix ``[rows, columns]``; if it is transferred, it is contiguous and has the
                operation's dtype and device.

        Raises:
            ValueError: a tensor has the wrong shape, dtype, device or strides.
            TransportError: a transfer failed, here or before; or another thread uses the transport.
        """
        transport = self._transport
        program = self.program
        transport.resume(self)
        given = {"gemm": transport.kernels.gemm_into, **given}
        try:
            if not ahead:
                self._take_scratch(late=True)
            self._bind(given)
        except BaseException as error:
            transport.interrupted(self.name, error, self)
            raise
        try:
            with _RecordFunctionFast(f"CommFuse: {self.name}"):
                self._go_on(given, program.ahead_end if ahead else len(program.code))
        except BaseException as error:
            post = program.code[self._at] if self._at < len(program.code) else None
            if isinstance(post, Post | Collective) and isinstance(error, RuntimeError):
                # A connection known to be closed fails when posting, not only in the wait.
                transport.fail(f"{self._what(post.transfer.step)}: {error}", self)
                raise transport.error() from error
            transport.interrupted(self.name, error, self)
            raise
        if self._at == len(program.code) and not self.done:
            self._finish()
        else:
            transport.suspend(self)

    def drain(self, **tensors: torch.Tensor) -> None:
        """Complete the transfers of an abandoned operation and skip its work; called on all ranks.

        Args:
            tensors: see :meth:`run`; contents of the output tensors are undefined afterwards.
        """
        names = (compute.work for compute in self.program.code if isinstance(compute, Compute))
        given: dict[str, Any] = {**dict.fromkeys(names), **tensors}
        self.run(**given)

    # ------------------------------------------------------------------ the loop

    def _go_on(self, given: Mapping[str, Any], end: int) -> None:
        """Execute the instructions up to the index ``end``."""
        program = self.program
        views = self._views
        posted = self._posted
        view = views.__getitem__
        log = self._log
        side = self._side
        code: Sequence[Any] = program.code
        at = self._at
        try:
            for at in range(self._at, end):
                instruction = code[at]
                kind = type(instruction)
                if log is not None and kind in (Post, Collective, Wait):
                    log("at", at)
                if kind is Compute:
                    work, outs, ins, run = instruction
                    function = given[work]
                    if function is None:  # in drain(), where some buffers are not bound
                        continue
                    if run is None:
                        function(*map(view, outs + ins))
                    else:
                        function(*map(view, outs + ins), run)
                elif kind is Post:
                    posted[instruction.transfer.step] = self._batch(instruction)
                elif kind in _LIGHT:
                    if side is not None and instruction.on_side_stream:
                        side.do(_LIGHT[kind], self, at)
                    else:
                        _LIGHT[kind](self, at)
                elif kind is Collective:
                    posted[instruction.transfer.step] = self._collective(instruction)
                elif side is not None and kind is RecordEvent:
                    event, on_side = instruction
                    self._events[event] = side.record(on_side_stream=on_side)
                elif side is not None and kind is WaitEvent:
                    event, on_side = instruction
                    start = time.perf_counter()
                    side.wait_event(self._events[event], on_side_stream=on_side)
                    self._transport.blocked_seconds += time.perf_counter() - start
            at = max(end, self._at)
        finally:
            self._at = at

    def _batch(self, post: Post) -> Sequence[Any]:
        (step, lane, _, target, _), sent = post.send
        transfer, received = post.receive
        transport = self._transport
        return post_swap(
            transport.lane_groups[lane],
            self._views[sent],
            self._views[received],
            transport.ranks[target],
            transport.ranks[transfer.source],
            (self._tag + step) & _LARGEST_TAG,
        )

    def _collective(self, instruction: Collective) -> Sequence[Any]:
        group = self._transport.lane_groups[instruction.sends[0].lane]
        source = self._views[instruction.source]
        out = self._views[instruction.out]
        if instruction.kind == "all_gather":
            return [begin_all_gather(source, group, out)[1]]
        own = len(instruction.sends) == self.program.size
        return [begin_all_to_all(source, group, out, own)[1]]

    def _add(self, at: int) -> None:
        add: Any = self.program.code[at]
        terms = [(self._views[span], parts) for span, parts in add.terms]
        self._transport.kernels.sum_parts(self._views[add.out], terms, dtype=self._sum_dtype)

    def _copy(self, at: int) -> None:
        """``out = source``; ``out`` may be several runs of rows (a 3-D view).

        Such a view is not contiguous, and MindSpeed's ``Tensor.view`` copies a tensor that is not
        (``ensure_contiguous_wrapper``).  So only the 2-D tensor is reshaped.
        """
        copy: Any = self.program.code[at]
        into = self._views[copy.out]
        data = self._views[copy.source]
        into.copy_(data.view(into.shape))

    def _wait(self, at: int) -> None:
        """Wait for posts; on a device with two streams, each stream waits by itself."""
        transport = self._transport
        wait: Any = self.program.code[at]
        start = time.perf_counter()
        for step in wait.steps:
            works = self._posted[step]
            # On gloo, a work for the receive and one for the send; else one for both.
            ways = ("receive", "send") if len(works) == 2 else (None,) * len(works)
            for way, work in zip(ways, works, strict=True):
                try:
                    transport.wait_for(work)
                except RuntimeError as error:
                    # May be before the timeout: a peer that timed out first closes the connection.
                    why = f"{self._what(step, way)}: {error}"
                    raise transport.fail_wait(why, self) from error
            if self._side is None:
                self._posted[step] = ()
        transport.blocked_seconds += time.perf_counter() - start

    # ------------------------------------------------------------------ memory

    def _bind(self, given: Mapping[str, Given]) -> None:
        """Check tensors of the operation and create the views of the program's spans."""
        program = self.program
        views = self._views
        messages = program.messages
        partitions = program.partitions
        for buffer, tensor in given.items():
            if not isinstance(tensor, torch.Tensor):
                continue
            if tensor.dim() != 2:
                raise ValueError(
                    f"{self.name}: {buffer} has shape {tuple(tensor.shape)}; it has to be a matrix"
                )
            if buffer in messages:
                if tensor.dtype != self._dtype or tensor.device != self._device:
                    raise ValueError(
                        f"{self.name}: {buffer} is {tensor.dtype} on {tensor.device}; what is "
                        f"transferred has to be {self._dtype} on {self._device}"
                    )
                if not tensor.is_contiguous():
                    raise ValueError(
                        f"{self.name}: {buffer} of shape {tuple(tensor.shape)} is not contiguous"
                    )
                if self._transport.lane_streams is not None:
                    self.transferred[tensor.untyped_storage().data_ptr()] = tensor
            rows = tensor.shape[0]
            spans = program.spans.get(buffer, ())
            if buffer in partitions:
                parts, sizes, others = partitions[buffer]
                if parts[-1].stop == rows:
                    views.update(zip(parts, tensor.split_with_sizes(sizes), strict=True))
                    spans = others
            whole = 0, rows, None, 1
            for span in spans:
                views[span] = tensor if span[1:5] == whole else view_of(tensor, span)

    def _take_scratch(self, *, late: bool) -> None:
        """Take arenas from the pool for the scratch memory of the start, or of ``late`` parts."""
        program = self.program
        pool = self._transport.scratch
        for region, elements in program.regions.items():
            if region.late == late:
                dtype = self._sum_dtype if region.wide and self._sum_dtype else self._dtype
                arena = pool.take(elements, dtype, self._device)
                self._arenas.append(arena)
                self._views |= arena.known.get((program, region)) or arena.views(program, region)

    def _finish(self) -> None:
        """Return the arenas and drop all tensors; every transfer has been waited for."""
        self.done = True
        for arena in self._arenas:
            self._transport.scratch.give_back(arena)
        self._arenas = []
        self._views = {}
        self._events = {}
        self._posted = {}
        if self._log is not None:
            self._log("finish")
        self._transport.finished(self)
        self.transferred = {}

    # ------------------------------------------------------------------ words

    def _what(self, step: int, only: str | None = None) -> str:
        """Describe a step, or only its ``send`` or ``receive``, for an error message."""
        parts = []
        for post in self.program.posts:
            for way, (transfer, span) in post.ends:
                if transfer.step != step or only not in (None, way):
                    continue
                verb = {"send": "sending", "receive": "receiving"}[way]
                peer = transfer.target if way == "send" else transfer.source
                columns = next(
                    view.shape[-1] for key, view in self._views.items() if key.buffer == span.buffer
                )
                parts.append(
                    f"{verb} {transfer.piece} ({span.rows * columns} x {self._dtype}), "
                    f"peer {peer}, step {step} of {self.program.steps - 1}, "
                    f"lane {transfer.lane}"
                )
        return f"{self.name}: {' and '.join(parts)}"


_LIGHT = {Wait: Running._wait, Add: Running._add, Copy: Running._copy}
"""Instructions that may run on the side stream; each function takes the index of its own."""
