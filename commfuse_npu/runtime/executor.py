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

__all__ = ["Running", "Work"]

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
        before_last: callbacks by name of a work, called before the program's last call of that
            work: its inputs have arrived, and the links are free for another operation.
        transferred: tensors that the program sends or receives, by storage address, if the
            transport has to call ``erase_stream`` on them; else empty.
    """

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
        self.done = False
        self.before_last: Mapping[str, Callable[[], None]] = {}
        self._transport = transport
        self._dtype = dtype
        self._device = device
        self._tag = tag
        self._log = log
        self._sum_dtype = None if sum_dtype == dtype else sum_dtype
        self._kernels = transport.kernels
        self._at = 0
        self._views: dict[Span, torch.Tensor] = {}
        self._arenas: list[Arena] = []
        self.transferred: dict[int, torch.Tensor] = {}
        self._second = side_stream(device)
        self._events: dict[int, Any] = {}
        # ``(id of the entry, side stream?)``; a batch is one entry in both dictionaries below.
        self._waited: set[tuple[int, bool]] = set()
        # By step: [works, tensors...] until waited for, then [()].
        self._receives: dict[int, list[Any]] = {}
        self._sends: dict[int, list[Any]] = {}
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
        self._transport.resume(self)
        works = {"gemm": self._kernels.gemm_into, **(works or {})}
        try:
            if not ahead:
                self._take_scratch(late=True)
            self._bind(tensors)
        except BaseException as error:
            self._failed(error)
            raise
        try:
            with _RecordFunctionFast(f"CommFuse: {self.name}"):
                self._go_on(works, self.program.ahead_end if ahead else len(self.program.code))
        except BaseException as error:
            post = self.program.code[self._at] if self._at < len(self.program.code) else None
            if isinstance(post, Post | Collective) and isinstance(error, RuntimeError):
                # A connection known to be closed fails when posting, not only in the wait.
                self._transport.fail(f"{self._what(post.transfer.step)}: {error}", self)
                raise self._transport.error() from error
            self._failed(error)
            raise
        if self._at == len(self.program.code) and not self.done:
            self._finish()
        else:
            self._transport.suspend(self)

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
        ranks, lanes = self._transport.ranks, self._transport.lane_groups
        batch, operation, isend, irecv = dist.batch_isend_irecv, dist.P2POp, dist.isend, dist.irecv
        views, sends, receives = self._views, self._sends, self._receives
        view, second, log = views.__getitem__, self._second, self._log
        # Instructions that may run on the side stream.
        light: dict[type, Callable[..., None]] = {
            Wait: self._wait,
            Add: self._add,
            Copy: self._copy,
        }
        code: Sequence[Any] = self.program.code
        for at in range(self._at, end):
            self._at = at
            instruction = code[at]
            kind = type(instruction)
            if log is not None and kind in (Post, Collective, Wait):
                log("at", at)
            if kind is Post:
                send, receive = instruction
                (step, lane, *_), _ = send or receive
                group, tag = lanes[lane], (self._tag + step) & 0x7FFFFFFF
                if receive is None:
                    out = views[send.span]
                    sends[step] = [[isend(out, ranks[send.transfer.target], group, tag)], out]
                elif send is None:
                    into = views[receive.span]
                    work = irecv(into, ranks[receive.transfer.source], group, tag)
                    receives[step] = [[work], into]
                else:
                    out, into = views[send.span], views[receive.span]
                    posted = batch(
                        [
                            operation(isend, out, ranks[send.transfer.target], group),
                            operation(irecv, into, ranks[receive.transfer.source], group),
                        ]
                    )
                    sends[step] = receives[step] = [posted, out, into]
            elif kind is Collective:
                self._begin_collective(instruction, lanes[instruction.sends[0].lane])
            elif kind is Compute:
                work, outs, ins, run = instruction
                if work in self.before_last and self.program.last_of[work] == at:
                    self.before_last[work]()
                function = works[work]
                if function is not None:  # None in drain(), where some buffers are not bound
                    rows = () if run is None else (run,)
                    function(*map(view, outs), *map(view, ins), *rows)
            elif kind in light:
                if instruction.on_side_stream and second is not None:
                    second.do(light[kind], *instruction)
                else:
                    light[kind](*instruction[:2])
            elif second is not None and kind is RecordEvent:
                self._events[instruction.event] = second.record(
                    on_side_stream=instruction.on_side_stream
                )
            elif second is not None and kind is WaitEvent:
                start = time.perf_counter()
                second.wait_event(
                    self._events[instruction.event], on_side_stream=instruction.on_side_stream
                )
                self._transport.blocked_seconds += time.perf_counter() - start
        self._at = max(self._at, end)

    def _begin_collective(self, instruction: Collective, group: dist.ProcessGroup) -> None:
        source, out = self._views[instruction.source], self._views[instruction.out]
        if instruction.kind == "all_gather":
            _, work = begin_all_gather(source, group, out)
        else:
            own = len(instruction.sends) == self.program.size
            _, work = begin_all_to_all(source, group, out, own)
        posted = [[work], source, out]
        self._sends |= dict.fromkeys((sent.step for sent in instruction.sends), posted)
        self._receives |= dict.fromkeys(
            (received.step for received in instruction.receives), posted
        )

    def _add(self, out: Span, terms: Sequence[tuple[Span, int]], on_side: bool = False) -> None:
        parts = [(self._views[span], parts) for span, parts in terms]
        self._kernels.sum_parts(self._views[out], parts, dtype=self._sum_dtype)

    def _copy(self, out: Span, source: Span, on_side: bool = False) -> None:
        """``out = source``, either of which may be several runs of rows (a 3-D view).

        Such a view is not contiguous, and MindSpeed's ``Tensor.view`` copies a tensor that is not
        (``ensure_contiguous_wrapper``).  So only the 2-D tensor is reshaped.
        """
        into, data = self._views[out], self._views[source]
        if data.dim() < into.dim():
            data = data.view(into.shape)
        elif into.dim() < data.dim():
            into = into.view(data.shape)
        into.copy_(data)

    def _wait(self, receives: Sequence[int], sends: Sequence[int], on_side: bool = False) -> None:
        """Wait for each transfer once; waiting for one end of a batch completes both.

        On a device with two streams, each stream waits by itself.
        """
        transport = self._transport
        timeout = None if transport.batched else transport.timeout
        start = time.perf_counter()
        try:
            for steps, posted in ((receives, self._receives), (sends, self._sends)):
                for step in steps:
                    entry = posted[step]
                    if len(entry) == 1 or (self._waited and (id(entry), on_side) in self._waited):
                        continue
                    for work in entry[0]:
                        work.wait() if timeout is None else work.wait(timeout)
                    if self._second is not None:
                        self._waited.add((id(entry), on_side))
                    else:
                        # Drop the tensors; in place, because a batch is in both dictionaries.
                        entry[:] = [()]
        except RuntimeError as error:
            way = "receiving" if posted is self._receives else "sending"
            why = f"{self._what(step, way)}: {error}"
            if timeout is not None:
                # May fail before the timeout: a peer that timed out first closes the connection.
                raise transport.fail_wait(why, self) from error
            transport.fail(why, self)
            raise transport.error() from error
        finally:
            if not on_side:
                transport.blocked_seconds += time.perf_counter() - start

    def _failed(self, error: BaseException) -> None:
        self._transport.fail(f"{self.name} was interrupted by {error!r}", self)

    # ------------------------------------------------------------------ memory

    def _bind(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Check tensors of the operation and create the views of the program's spans."""
        program = self.program
        for buffer, tensor in tensors.items():
            if tensor is None:
                continue
            if tensor.dim() != 2:
                raise ValueError(
                    f"{self.name}: {buffer} has shape {tuple(tensor.shape)}; it has to be a matrix"
                )
            if buffer in program.messages:
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
            whole = 0, tensor.shape[0], None, 1
            for span in program.spans.get(buffer, ()):
                self._views[span] = tensor if span[1:5] == whole else view_of(tensor, span)

    def _take_scratch(self, *, late: bool) -> None:
        """Take arenas from the pool for the scratch memory of the start, or of ``late`` parts."""
        for region, elements in self.program.regions.items():
            if region.late == late:
                dtype = (self._sum_dtype or self._dtype) if region.wide else self._dtype
                arena = self._transport.scratch.take(elements, dtype, self._device)
                self._arenas.append(arena)
                views = arena.known.get((self.program, region))
                if views is None:
                    views = arena.views(self.program, region)
                self._views.update(views)

    def _finish(self) -> None:
        """Return the arenas and drop all tensors; every transfer has been waited for."""
        self.done = True
        for arena in self._arenas:
            self._transport.scratch.give_back(arena)
        self._arenas, self._views, self._events = [], {}, {}
        self._receives, self._sends = {}, {}
        if self._log is not None:
            self._log("finish")
        self._transport.finished(self)
        self.transferred = {}

    # ------------------------------------------------------------------ words

    def _what(self, step: int, way: str | None = None) -> str:
        """Describe a step for an error message."""
        parts = []
        for post in self.program.posts:
            for kind, (transfer, span) in post.ends:
                verb = {"send": "sending", "receive": "receiving"}[kind]
                if transfer.step != step or way not in (None, verb):
                    continue
                peer = transfer.target if verb == "sending" else transfer.source
                columns = next(
                    view.shape[-1] for key, view in self._views.items() if key.buffer == span.buffer
                )
                parts.append(
                    f"{verb} {transfer.piece} ({span.rows * columns} x {self._dtype}), "
                    f"peer {peer}, step {step} of {self.program.steps - 1}, "
                    f"lane {transfer.lane}"
                )
        return f"{self.name}: {' and '.join(parts)}"
