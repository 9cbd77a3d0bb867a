"""Executes programs: a loop over their instructions that makes no scheduling decisions of its own.

=====================  ==================================  =====================================
                       HCCL                                gloo
=====================  ==================================  =====================================
posted                 one batch {send, receive} per step  each receive as soon as its rows are
                                                           free, each send when its data is ready
matched by             order                               tag
``wait()`` blocks      the stream                          the host
=====================  ==================================  =====================================

On HCCL, unbatched transfers would open a communicator per pair of ranks in the middle of a forward,
and receives posted ahead of sends would hang; one batch per step avoids both.  On gloo, receives
are posted early because the message that a receive is ready shares the socket with bulk data.
:attr:`Program.batched` says for which of the two a program was compiled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._profiler import _RecordFunctionFast

from commfuse_npu.plan.instructions import (
    Add,
    Collective,
    Compute,
    Copy,
    End,
    Post,
    RecordEvent,
    Span,
    Wait,
    WaitEvent,
)
from commfuse_npu.plan.program import Program
from commfuse_npu.runtime.collectives import begin_all_gather, begin_all_to_all
from commfuse_npu.runtime.device_streams import side_stream
from commfuse_npu.runtime.scratch import Arena, view_of

if TYPE_CHECKING:
    from commfuse_npu.runtime.order_log import Entry
    from commfuse_npu.runtime.transport import Transport

__all__ = ["Running", "Work", "post_receive", "post_send"]

_LARGEST_TAG = 0x7FFFFFFF

post_send: Callable[..., Any] = dist.ProcessGroup.send
"""What ``dist.isend`` calls, without its checks: ``(group, tensors, rank in the group, tag)``."""

post_receive: Callable[..., Any] = dist.ProcessGroup.recv
"""What ``dist.irecv`` calls; see :data:`post_send`."""

Work = Callable[..., object]
"""The function that a :class:`~commfuse_npu.plan.instructions.Compute` instruction calls: with its
output tensors, then its input tensors, then its run of rows if it has one."""


class Running:
    """A program in execution, created by :meth:`Transport.begin`.

    Call :meth:`run` until it is :attr:`done`.  An exception in between breaks the transport,
    because the other ranks wait for transfers that this rank no longer posts.

    Attributes:
        name: of the operation, for error messages.
        done: whether every instruction was executed and every transfer waited for.
        before: callbacks by name of a work, called before it.  Before a weight gradient all blocks
            have arrived, and the links are free for another operation.
        transferred: tensors that the program sends or receives, by storage address, if the
            transport has to call ``erase_stream`` on them; else empty.
    """

    done = False
    before: Mapping[str, Callable[[], None]] = {}

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
        self._second = side_stream(device) if program.batched else None
        self._events: dict[int, Any] = {}
        # The works of each post, by its index.
        self._posted: dict[int, Sequence[Any]] = {}
        self._take_scratch(late=False)

    @property
    def all_posted(self) -> bool:
        """Whether the program has posted all its transfers."""
        return self._at > self.program.last_post

    def run(
        self,
        works: Mapping[str, Work | None] | None = None,
        *,
        ahead: bool = False,
        **tensors: torch.Tensor | None,
    ) -> None:
        """Continue to the end of the program, or with ``ahead`` to its :class:`AheadEnd`.

        ``torch.profiler`` shows it as a range with the operation's name.

        Args:
            works: functions by name of the work; ``None`` skips that work.  By default ``gemm`` is
                the GEMM of the device's kernels.
            tensors: the operation's buffers that the remaining instructions use, matrices ``[rows,
                columns]``; ``None`` for a buffer that this program does not have.  A transferred
                tensor is contiguous and has the operation's dtype and device.

        Raises:
            ValueError: a tensor has the wrong shape, dtype, device or strides.
            TransportError: a transfer failed, here or before; or another thread uses the transport.
        """
        transport = self._transport
        program = self.program
        transport.resume(self)
        works = {"gemm": transport.kernels.gemm_into, **(works or {})}
        try:
            if not ahead:
                self._take_scratch(late=True)
            self._bind(tensors)
        except BaseException as error:
            transport.interrupted(self.name, error, self)
            raise
        try:
            with _RecordFunctionFast(f"CommFuse: {self.name}"):
                self._go_on(works, program.ahead_end if ahead else len(program.code))
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
        self.run(dict.fromkeys(names), ahead=False, **tensors)

    # ------------------------------------------------------------------ the loop

    def _go_on(self, works: Mapping[str, Work | None], end: int) -> None:
        """Execute the instructions up to the index ``end``."""
        program = self.program
        views = self._views
        posted = self._posted
        lanes = self._transport.lane_groups
        tag = self._tag
        view = views.__getitem__
        log = self._log
        second = self._second
        before = self.before
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
                    if work in before:
                        before[work]()
                    function = works[work]
                    if function is None:  # in drain(), where some buffers are not bound
                        continue
                    if run is None:
                        function(*map(view, outs + ins))
                    else:
                        function(*map(view, outs + ins), run)
                elif kind is Post:
                    send, receive = instruction
                    if receive is None:
                        (step, lane, _, target, _), span = send
                        number = (tag + step) & _LARGEST_TAG
                        posted[at] = [post_send(lanes[lane], [views[span]], target, number)]
                    elif send is None:
                        (step, lane, source, _, _), span = receive
                        number = (tag + step) & _LARGEST_TAG
                        posted[at] = [post_receive(lanes[lane], [views[span]], source, number)]
                    else:
                        posted[at] = self._batch(send, receive)
                elif kind in _LIGHT:
                    if second is not None and instruction.on_side_stream:
                        second.do(_LIGHT[kind], self, at)
                    else:
                        _LIGHT[kind](self, at)
                elif kind is Collective:
                    posted[at] = self._collective(instruction)
                elif second is not None and kind is RecordEvent:
                    event, on_side = instruction
                    self._events[event] = second.record(on_side_stream=on_side)
                elif second is not None and kind is WaitEvent:
                    event, on_side = instruction
                    start = time.perf_counter()
                    second.wait_event(self._events[event], on_side_stream=on_side)
                    self._transport.blocked_seconds += time.perf_counter() - start
            at = max(end, self._at)
        finally:
            self._at = at

    def _batch(self, send: End, receive: End) -> Sequence[Any]:
        ranks = self._transport.ranks
        group = self._transport.lane_groups[send.transfer.lane]
        out = self._views[send.span]
        into = self._views[receive.span]
        return dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, out, ranks[send.transfer.target], group),
                dist.P2POp(dist.irecv, into, ranks[receive.transfer.source], group),
            ]
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
        posted = self._posted
        ends = self.program.awaited[at]
        timeout = None if transport.batched else transport.timeout
        start = time.perf_counter()
        try:
            for post in ends:
                for work in posted[post]:
                    work.wait() if timeout is None else work.wait(timeout)
                if self._second is None:
                    posted[post] = ()  # waiting for one end of a batch completes both
        except RuntimeError as error:
            way, step = ends[post]
            why = f"{self._what(step, way)}: {error}"
            if timeout is not None:
                # May fail before the timeout: a peer that timed out first closes the connection.
                raise transport.fail_wait(why, self) from error
            transport.fail(why, self)
            raise transport.error() from error
        transport.blocked_seconds += time.perf_counter() - start

    # ------------------------------------------------------------------ memory

    def _bind(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Check tensors of the operation and create the views of the program's spans."""
        program = self.program
        views = self._views
        messages = program.messages
        partitions = program.partitions
        for buffer, tensor in tensors.items():
            if tensor is None:
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
