"""Carries plans out over ``torch.distributed``.  The only file that knows how HCCL and gloo differ.

=====================  ==================================  =====================================
                       HCCL                                gloo
=====================  ==================================  =====================================
a lane is              a communicator with a stream        a set of sockets
order on a lane        kept by the stream                  kept by the host, per operation
posted                 one batch {send, receive} per step  each receive as early as possible,
                                                           each send when it is its lane's turn
matched by             order                               tag
``wait()`` holds       the stream                          the host
=====================  ==================================  =====================================

On HCCL unbatched transfers would open a communicator per pair of ranks, in the middle of a forward,
and receives posted ahead of sends would hang; a batch per step does neither.  On gloo receives come
first, because the notice that a receive is ready shares the socket with bulk data.  gloo has no
streams, so the host keeps a lane in order: it posts a send when the one before it on the lane is
done, or goes to the same rank, where the socket keeps the order.

The rules, each enforced here: dedicated lane groups, made and warmed up together and never in a
forward; one issuing thread; data checked before it is posted; each work waited for exactly once; no
buffer let go before; a failure names rank, peer, operation and step, and breaks the transport for
good, because the transfers that are left over can no longer be matched.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from commfuse_npu.plan import Plan, Schedule, Transfer
from commfuse_npu.runtime.order_log import OperationLog, OrderLog, TransportLog
from commfuse_npu.runtime.roll_call import MissingRankError, roll_call
from commfuse_npu.runtime.trace import Trace, clock

__all__ = [
    "BufferPool",
    "Exchange",
    "MismatchError",
    "Transport",
    "TransportError",
]

Check = Literal["first", "always"]

_MOST_AGREED = 4096
"""Combinations of operation, shapes and options that are remembered, about 1 KiB each."""


def _device_backend(backend: str) -> tuple[str, str]:
    """``(device type, name)`` of a group's backend; of ``cpu:gloo,npu:hccl`` the device's is meant.

    What torch.distributed was told about a backend when it was registered says where its tensors
    are.  gloo carries those of CUDA devices too, through the host: its own are on the CPU.

    Raises:
        ValueError: torch.distributed does not know the backend.
    """
    found = []
    for part in backend.split(","):
        device, _, name = part.strip().rpartition(":")
        devices = [device] if device else dist.Backend.backend_capability.get(name, [])
        if not devices:
            known = ", ".join(sorted(dist.Backend.backend_capability))
            raise ValueError(
                f"backend {backend!r} is unknown to torch.distributed, which has {known}; make the "
                "group with hccl or gloo"
            )
        found.append((devices[0], name))
    return next((one for one in found if one[0] != "cpu"), found[0])


class TransportError(RuntimeError):
    """A transfer failed or timed out.  The transport cannot be used any more."""


def _everyone(value: Any, group: dist.ProcessGroup, timeout: timedelta) -> list[Any]:
    """What every rank of the group gives here, by rank; on gloo an error says whose is missing.

    HCCL would open a communicator per pair of ranks for that, in an order that hangs.
    """
    if dist.get_backend(group) == "gloo":
        return roll_call(value, group, timeout)
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, value, group=group)
    return everyone


@contextmanager
def _making(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise TransportError(f"{what}: {error}") from error


class MismatchError(TransportError):
    """The ranks of a group called different operations, or with different shapes or options."""


def _expect_all_made(
    problem: TransportError | None, world: dist.ProcessGroup, timeout: timedelta
) -> None:
    """Raise on every process if one of them could not make its lanes.

    Those that wait in a lane for a process that failed only learn of it at their own time limit;
    the others wait that long for them here.
    """
    try:
        problems = _everyone(None if problem is None else str(problem), world, 2 * timeout)
    except RuntimeError as error:
        here = "" if problem is None else f"{problem}; "
        raise TransportError(f"Transport.create: {here}{error}") from error
    met: defaultdict[str, list[str]] = defaultdict(list)
    for rank, text in enumerate(problems):
        if text is not None:
            met[text].append(str(rank))
    if met:
        # What fewest met is likely the cause; the others waited in vain.
        rarest = sorted(met.items(), key=lambda item: len(item[1]))
        listed = "; ".join(f"peer {', '.join(ranks)}: {text}" for text, ranks in rarest)
        raise TransportError(
            f"Transport.create: no transport, lanes could not be made everywhere ({listed})"
        ) from problem


class BufferPool:
    """Receive and send buffers that are used again.

    Allocating tens of megabytes per operation costs page faults on CPU and fragments the caching
    allocator on a device.  A buffer is lent to one operation and comes back when all its transfers
    have been waited for; one that an error leaves in the air never comes back.

    On a device a buffer is reused in the order of the stream that used it; lend to one stream only.

    Args:
        keep_bytes: how much idle memory is kept; the buffers not used for longest are freed.
    """

    def __init__(self, keep_bytes: int = 512 << 20) -> None:
        self._keep_bytes = keep_bytes
        self._idle: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._parts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A contiguous tensor with undefined contents; perhaps the first rows of a longer one."""
        shape = tuple(shape)
        found: torch.Tensor | None = None
        for buffer in reversed(self._idle.values()):
            alike = (buffer.shape[1:], buffer.dtype, buffer.device) == (shape[1:], dtype, device)
            # One that is much too long is worth more to somebody else.
            if alike and shape[0] <= buffer.shape[0] <= 2 * shape[0]:
                if found is None or buffer.shape[0] < found.shape[0]:
                    found = buffer
                if found.shape[0] == shape[0]:
                    break
        if found is not None:
            del self._idle[id(found)]
            if found.shape[0] == shape[0]:
                return found
            part = found[: shape[0]]
            self._parts[id(part)] = part, found
            return part
        # Never an inference tensor: it will be lent to operations outside inference mode too.
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=dtype, device=device)

    def give_back(self, buffers: Sequence[torch.Tensor]) -> None:
        for given in buffers:
            _, buffer = self._parts.pop(id(given), (given, given))
            self._idle[id(buffer)] = buffer
        idle = self.idle_bytes
        while idle > self._keep_bytes:
            _, buffer = self._idle.popitem(last=False)
            idle -= buffer.nbytes

    @property
    def idle_bytes(self) -> int:
        """What is kept and not lent to anybody."""
        return sum(buffer.nbytes for buffer in self._idle.values())

    def clear(self) -> None:
        """Free all idle buffers."""
        self._idle.clear()

    def __len__(self) -> int:
        return len(self._idle)


class _Handle:
    """A posted operation: waited for once, and its buffer held until then.

    Args:
        messages: ``(row, name, bytes)`` of what it carries, for a trace.
        waiting: called before the wait, for the log of the order.
    """

    __slots__ = (
        "_buffer",
        "_messages",
        "_operation",
        "_posted",
        "_transport",
        "_waiting",
        "_what",
        "_works",
    )

    def __init__(
        self,
        transport: Transport,
        works: Sequence[Any],
        buffer: object,
        what: object,
        operation: str = "",
        messages: Sequence[tuple[str, str, int]] = (),
        waiting: Callable[[], None] | None = None,
    ) -> None:
        self._operation = operation
        self._waiting = waiting
        self._messages = messages
        self._posted = clock() if messages else 0
        self._transport = transport
        self._works: Sequence[Any] | None = works
        self._buffer: object | None = buffer
        self._what = what

    def wait(self) -> None:
        """Wait; a second call returns at once (on gloo a second wait on a work never returns)."""
        if self._works is None:
            return
        works, self._works = self._works, None
        if self._waiting is not None:
            self._waiting()
        trace = self._transport.trace
        began = clock() if trace is not None else 0
        start = time.perf_counter()
        try:
            for work in works:
                self._transport.wait_for(work)
        except RuntimeError as error:
            self._transport.fail(f"{self._what}: {error}", self._buffer)
            raise self._transport.error() from error
        finally:
            self._transport.blocked_seconds += time.perf_counter() - start
        self._buffer = None
        if trace is not None:
            ended = clock()
            for row, name, size in self._messages:
                trace.add_in_order(row, name, self._operation, self._posted, ended, size)
            if self._messages:
                trace.add("waiting", self._messages[-1][1], self._operation, began, ended)


class Transport:
    """Lanes over the ranks of one group.

    Make it with :meth:`create`, which every process of the job calls together.

    Attributes:
        group: the plain group, for the collective form of an op; no transfer of a plan uses it.
        rank, size: place in the group.
        timeout: how long a wait may take on gloo before it becomes an error.
        batched: post a batch per step (HCCL), or single operations (gloo).
        device_type: where tensors have to be, ``cpu`` on gloo and ``npu`` on HCCL.
        blocked_seconds: host time spent in waits since the start.  On HCCL a wait holds the
            stream, not the host, so there this counts next to nothing; profile the device instead.
        operations: how many plans were started.
        remembered: what higher rooms keep per group of ranks; nothing here uses it.
        trace: where to write down what happens; ``None`` for nowhere.
        order_log: where to write down the order of posts and waits; ``None`` for nowhere.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        lanes: Sequence[dist.ProcessGroup],
        control: dist.ProcessGroup,
        *,
        timeout: timedelta,
        batched: bool,
        check: Check = "first",
    ) -> None:
        self.group = group
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(group))
        self.rank = group.rank()
        self.size = group.size()
        self.timeout = timeout
        self.batched = batched
        self.check = check
        self.buffers = BufferPool()
        self.blocked_seconds = 0.0
        self.operations = 0
        self.remembered: dict[Hashable, Any] = {}
        self.trace: Trace | None = None
        self.order_log: TransportLog | None = None
        self.device_type, _ = _device_backend(dist.get_backend(lanes[0]))
        self._lanes = tuple(lanes)
        self._control = control
        self._agreed: OrderedDict[Hashable, int] = OrderedDict()
        self._in_flight: set[Exchange] = set()
        self._thread = threading.get_ident()
        self._broken: str | None = None
        self._left_over: list[object] = []

    @classmethod
    def create(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        lanes: int | None = None,
        timeout: timedelta = timedelta(minutes=5),
        batched: bool | None = None,
        check: Check = "first",
        lane_options: Any = None,
        order_log: OrderLog | None = None,
    ) -> Transport:
        """Make the lanes of every group of the job, and warm them up.

        A collective over **all** processes of the job, each with the group that it belongs to: new
        groups have to be made by everybody, in the same order.  It belongs next to the set-up of
        the other groups, never into a forward.

        Args:
            group: the group of this process, the whole job by default.
            lanes: in-order channels to make; plans may use fewer.  By default as many as the
                default schedule uses in a group of this size.
            timeout: for waits (gloo) and for the lanes' own set-up.
            batched: how to post; by default as the group's backend needs it.  On HCCL it has to
                be True; on gloo True is for tests of what HCCL will see.
            check: compare operation, shapes, dtype and options of the ranks at the ``first`` use of
                each combination, or ``always``.
            lane_options: ``pg_options`` of the lane groups, HCCL's buffer size among them.
            order_log: where to write down the order of posts and waits, on all processes alike.

        Raises:
            PlanError: lanes is not a positive whole number.
            MismatchError: the processes ask for different numbers of lanes.
            TransportError: a process could not make a lane, or did not come; on every process, and
                with what each of them met.  At the latest after three times ``timeout``: one for
                the lane, two for the processes that are still busy with it.
        """
        if lanes is not None:
            Schedule(lanes=lanes)  # raises if it is no number of lanes
        world = dist.group.WORLD
        group = group if group is not None else world
        if group is None or world is None:
            raise RuntimeError(
                "torch.distributed is not initialised; call init_process_group before "
                "Transport.create"
            )
        backend = dist.get_backend(group)
        if batched is None:
            batched = _device_backend(backend)[1] != "gloo"
        mine = (tuple(dist.get_process_group_ranks(group)), lanes)
        with _making("Transport.create, before lane 0: comparing with the other processes"):
            everyone = _everyone(mine, world, timeout)
        if len({count for _, count in everyone}) > 1:
            counts = ", ".join(f"rank {r}: {count}" for r, (_, count) in enumerate(everyone))
            raise MismatchError(
                "Transport.create: the processes ask for different numbers of lanes "
                f"({counts}). None was made; ask for as many on all of them"
            )
        made: dict[tuple[int, ...], tuple[list[Any], Any]] = {}
        problem: TransportError | None = None
        try:
            for ranks in sorted({ranks for ranks, _ in everyone}):
                channels: list[Any] = []
                count = Schedule(lanes=lanes).lanes_for(len(ranks))
                for lane in range(count):
                    with _making(f"lane {lane} of {count}"):
                        channels.append(
                            dist.new_group(
                                list(ranks),
                                timeout=timeout,
                                backend=backend,
                                pg_options=lane_options,
                            )
                        )
                with _making("the group for comparisons"):
                    control = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
                    if control is None:
                        # MindSpeed's --disable-gloo-group makes none; the device's backend
                        # serves as well.
                        control = dist.new_group(list(ranks), timeout=timeout, backend=backend)
                made[ranks] = channels, control
            channels, control = made[mine[0]]
            transport = cls(group, channels, control, timeout=timeout, batched=batched, check=check)
            if order_log is not None:
                transport.order_log = order_log.transport(transport.ranks, transport.lanes, batched)
            transport._warm_up()
        except TransportError as error:
            problem = error
        _expect_all_made(problem, world, timeout)
        return transport

    @property
    def lanes(self) -> int:
        return len(self._lanes)

    def _warm_up(self) -> None:
        """Create now what is created at first use: HCCL's communicators, gloo's connections.

        A batch opens a link to each of its peers at its first use, and no collective opens those of
        batches (read in HCCL).  So each lane carries a rank number over each distance here, in the
        order of a plan.
        """
        for index, lane in enumerate(self._lanes):
            what = f"warming up lane {index} of {len(self._lanes)}"
            mine = torch.full((1,), self.rank, device=self.device_type)
            for distance in range(1, self.size):
                source = (self.rank - distance) % self.size
                theirs = torch.full_like(mine, -1)
                peers = (self.rank + distance) % self.size, source
                with _making(f"{what}, distance {distance}"):
                    self._swap(lane, mine, theirs, *(self.ranks[peer] for peer in peers))
                if int(theirs.item()) != source:
                    raise TransportError(
                        f"{what}: rank {source} of the group says that it is {theirs.item()}: the "
                        "lane's ranks are not those of the group"
                    )

    def _swap(
        self,
        lane: dist.ProcessGroup,
        mine: torch.Tensor,
        theirs: torch.Tensor,
        target: int,
        source: int,
    ) -> None:
        """Send one tensor and receive another, as this transport posts."""
        works: list[Any]
        if self.batched:
            operations = [
                dist.P2POp(dist.isend, mine, target, lane),
                dist.P2POp(dist.irecv, theirs, source, lane),
            ]
            works = dist.batch_isend_irecv(operations)
        else:
            works = [dist.irecv(theirs, source, lane), dist.isend(mine, target, lane)]
        for work in works:
            self.wait_for(work)

    def close(self) -> None:
        """Give the lanes up.  Every process of the group calls it, with nothing under way."""
        for group in (*self._lanes, self._control):
            dist.destroy_process_group(group)
        self._broken = self._broken or f"rank {self.rank}: it was closed"
        if self.order_log is not None:
            self.order_log.close()

    def start(
        self,
        plan: Plan,
        name: str,
        block: torch.Size | Sequence[int],
        like: torch.Tensor,
        options: Hashable = (),
    ) -> Exchange:
        """Begin to carry out ``plan``.

        Args:
            plan: this rank's plan; its size, rank and lanes must fit.
            name: the operation, for errors and for the comparison of the ranks.
            block: shape of one block of the plan, the same on every rank.
            like: a tensor with the dtype and device of what is transferred.
            options: whatever else the ranks have to agree on.

        Raises:
            ValueError: plan or tensor do not fit this transport.
            MismatchError: another rank calls something else.
            TransportError: an earlier failure broke the transport.
        """
        if (plan.rank, plan.size) != (self.rank, self.size):
            raise ValueError(
                f"{name}: the plan is for rank {plan.rank} of {plan.size}, the transport is rank "
                f"{self.rank} of {self.size}"
            )
        if plan.lanes > self.lanes:
            raise ValueError(
                f"{name}: the plan uses {plan.lanes} lanes, the transport has {self.lanes}; create "
                f"it with lanes={plan.lanes} or plan with fewer"
            )
        if like.device.type != self.device_type:
            raise ValueError(
                f"{name}: the tensor is on {like.device}, this group transfers "
                f"{self.device_type} tensors; move it there"
            )
        thread = threading.get_ident()
        if self._in_flight and thread != self._thread:
            raise TransportError(
                f"{name}: called from a second thread while {next(iter(self._in_flight)).name} is "
                "under way; one thread at a time may use a transport"
            )
        self._thread = thread
        self.operations += 1
        identity = self.agree(
            name,
            path=plan.kind,
            own_block=plan.own,
            schedule=plan.schedule,
            block=tuple(block),
            dtype=like.dtype,
            options=options,
        )
        log = None
        if self.order_log is not None:
            log = self.order_log.start(plan, name, block, like.dtype, options)
        exchange = Exchange(self, plan, name, like, identity, log)
        self._in_flight.add(exchange)
        return exchange

    def agree(self, name: str, **facts: Hashable) -> int:
        """Compare an operation with that of the other ranks, before anything is posted.

        The ranks of a group run the same operations in the same order, so that all of them meet a
        combination for the first time together.  One that does not is caught by the tags on gloo
        (nothing matches, the wait times out) and by HCCL's own time limit.

        Returns:
            a number for what was agreed on, to tell operations apart; the same on every rank.

        Raises:
            MismatchError: another rank calls something else.
            TransportError: a rank did not answer in time, or the transport is broken.
        """
        if self._broken is not None:
            raise self.error()
        signature = (("operation", name), *facts.items())
        identity = self._agreed.get(signature)
        if identity is not None and (self.size == 1 or self.check == "first"):
            self._agreed.move_to_end(signature)
            return identity
        if self.size > 1:
            self._compare(name, signature)
        if identity is None:
            identity = self._agreed[signature] = zlib.crc32(repr(signature).encode())
            # The ranks run the same operations, so that they forget the same.
            if len(self._agreed) > _MOST_AGREED:
                self._agreed.popitem(last=False)
        return identity

    def confirm(self, name: str) -> None:
        """Meet the other ranks: it returns only if all of them got here.

        For a place that no rank may pass if one of them failed before it.  Transfers may be under
        way; what was waited for is done.  On a device the host first waits for the current stream,
        where a failed transfer shows; elsewhere it costs two small messages to each other rank.

        Args:
            name: the place, for errors.

        Raises:
            MismatchError: another rank calls something else.
            TransportError: a rank did not come in time, or the transport is broken.
        """
        if self._broken is not None:
            raise self.error()
        self.synchronise()
        if self.size > 1:
            self._compare(name, (("operation", name),))

    def synchronise(self) -> None:
        """Let the host wait for the device's current stream."""
        if self.device_type != "cpu":
            torch.get_device_module(self.device_type).current_stream().synchronize()

    def clock_behind(self, pings: int) -> int:
        """By how many ns the clock of rank 0 is ahead of this rank's, negative if behind.

        A collective of the group.  Every other rank in turn asks rank 0 for its time; the answer
        that came fastest is taken to be of the middle between question and answer.

        Raises:
            TransportError: a rank did not answer in time, or the transport is broken.
        """
        if self._broken is not None:
            raise self.error()
        if self.order_log is not None:
            self.order_log.meet("comparing clocks")
        device, _ = _device_backend(dist.get_backend(self._control))
        token = torch.zeros(1, dtype=torch.int64, device=device)
        fastest: tuple[int, int] | None = None
        try:
            for rank in range(1, self.size):
                for _ in range(pings):
                    if self.rank == rank:
                        asked = clock()
                        dist.send(token, self.ranks[0], self._control)
                        dist.recv(token, self.ranks[0], self._control)
                        there, answered = int(token.item()), clock()
                        took, middle = answered - asked, (asked + answered) // 2
                        fastest = min(fastest or (took, 0), (took, there - middle))
                    elif self.rank == 0:
                        dist.recv(token, self.ranks[rank], self._control)
                        token.fill_(clock())
                        dist.send(token, self.ranks[rank], self._control)
        except RuntimeError as error:
            self.fail(f"comparing clocks: {error}")
            raise self.error() from error
        return 0 if fastest is None else fastest[1]

    def share(self, name: str, value: Any) -> list[Any]:
        """What every rank gives here, in the order of the ranks; small things, by pickle.

        Raises:
            TransportError: a rank did not come in time, or the transport is broken.
        """
        if self._broken is not None:
            raise self.error()
        if self.size == 1:
            return [value]
        if self.order_log is not None:
            self.order_log.meet(name)
        try:
            return _everyone(value, self._control, self.timeout)
        except RuntimeError as error:
            left_over = [error.left_over] if isinstance(error, MissingRankError) else []
            self.fail(f"comparing {name} with the other ranks, before step 0: {error}", *left_over)
            raise self.error() from error

    def wait_for(self, work: Any) -> None:
        """Wait for what torch.distributed began; on gloo for ``timeout``, on HCCL on the stream."""
        if self.batched:
            work.wait()
        else:
            work.wait(self.timeout)

    def all_reduce(self, name: str, tensor: torch.Tensor) -> None:
        """Sum ``tensor`` over the ranks, in place: the group's own collective, within ``timeout``.

        A group made by somebody else has another limit, half an hour unless they chose one.

        Args:
            name: what is summed, for errors.

        Raises:
            TransportError: a rank did not come in time, or the transport is broken.
        """
        if self._broken is not None:
            raise self.error()
        try:
            work = dist.all_reduce(tensor, group=self.group, async_op=True)
            assert work is not None
            self.wait_for(work)
        except RuntimeError as error:
            self.fail(
                f"{name}: not every rank came here: {error}. One of them failed or does something "
                "else; no rank may go on",
                tensor,
            )
            raise self.error() from error

    def _compare(self, name: str, signature: tuple[tuple[str, Hashable], ...]) -> None:
        everyone = self.share(name, signature)
        for rank, other in enumerate(everyone):
            if other != signature:
                mine, theirs = dict(signature), dict(other)
                differing = "; ".join(
                    f"{what}: {mine.get(what)} here, {theirs.get(what)} there"
                    for what in mine | theirs
                    if mine.get(what) != theirs.get(what)
                )
                self.fail(
                    f"{name}: rank {self.rank} and peer {rank} of the group do not call the same: "
                    f"{differing}. Nothing was sent; call it alike on all ranks"
                )
                raise self.error(MismatchError)

    def fail(self, why: str, *left_over: object) -> None:
        """Break the transport: no later operation can be matched with the other ranks' any more."""
        self._left_over += [*left_over, *self._in_flight]
        self._in_flight.clear()
        if self._broken is None:
            self._broken = (
                f"rank {self.rank} of {self.size} (global rank {self.ranks[self.rank]}): {why}"
            )
            if self.order_log is not None:
                self.order_log.fail(why)

    def error(self, kind: type[TransportError] = TransportError) -> TransportError:
        return kind(f"{self._broken}. This transport cannot be used any more")

    def finished(self, exchange: Exchange) -> None:
        self._in_flight.discard(exchange)

    # ------------------------------------------------------------------ posting

    def post_batch(
        self, send: Transfer, out: torch.Tensor, receive: Transfer, into: torch.Tensor, what: str
    ) -> Sequence[Any]:
        lane = self._lanes[send.lane]
        operations = [
            dist.P2POp(dist.isend, out, self.ranks[send.target], lane),
            dist.P2POp(dist.irecv, into, self.ranks[receive.source], lane),
        ]
        return self._posted(what, lambda: dist.batch_isend_irecv(operations))

    def post_send(
        self, transfer: Transfer, tensor: torch.Tensor, tag: int, what: str
    ) -> Sequence[Any]:
        lane, target = self._lanes[transfer.lane], self.ranks[transfer.target]
        return self._posted(what, lambda: [dist.isend(tensor, target, lane, tag)])

    def post_receive(
        self, transfer: Transfer, buffer: torch.Tensor, tag: int, what: str
    ) -> Sequence[Any]:
        lane, source = self._lanes[transfer.lane], self.ranks[transfer.source]
        return self._posted(what, lambda: [dist.irecv(buffer, source, lane, tag)])

    def _posted(self, what: str, post: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Post; a connection that is known to be gone fails here already, not in the wait."""
        try:
            return post()
        except RuntimeError as error:
            self.fail(f"{what}: {error}")
            raise self.error() from error


class Exchange:
    """One plan under way.  Positions count the plan's :attr:`~commfuse_npu.plan.Plan.transfers`.

    The caller registers receives and sends in the order of the plan, each before it waits for it,
    and calls :meth:`finish` at the end.  Buffers may be reused after their wait.
    """

    def __init__(
        self,
        transport: Transport,
        plan: Plan,
        name: str,
        like: torch.Tensor,
        identity: int,
        log: OperationLog | None,
    ) -> None:
        self.name = name
        self.plan = plan
        self._log = log
        self._transport = transport
        self._like = like.dtype, like.device
        # Tags differ with what is sent and with how many operations came before: data for another
        # shape, or left over from a failure, never meets a receive (a short one aborts on gloo).
        self._tag = identity ^ (transport.operations * 0x9E3779B1)
        self._steps = plan.transfers
        self._receives: list[_Handle] = []
        self._sends: dict[int, _Handle] = {}
        self._buffers: list[torch.Tensor] = []
        self._queues: dict[int, deque[tuple[int, torch.Tensor]]] = {}
        self._last_sent: dict[int, int] = {}
        self._registered = 0

    def _what(self, verb: str, transfer: Transfer, tensor: torch.Tensor) -> str:
        peer = transfer.target if verb == "sending" else transfer.source
        return (
            f"{self.name}: {verb} {transfer.piece} ({tensor.numel()} x {tensor.dtype}), peer "
            f"{peer}, step {transfer.step} of {len(self.plan.steps) - 1}, lane {transfer.lane}"
        )

    def _valid(self, verb: str, position: int, tensor: torch.Tensor) -> Transfer:
        step = self._steps[position]
        transfer = step.send if verb == "sending" else step.receive
        assert transfer is not None
        if (tensor.dtype, tensor.device) != self._like or not tensor.is_contiguous():
            raise ValueError(
                f"{self._what(verb, transfer, tensor)}: the tensor is {tensor.dtype} on "
                f"{tensor.device}, {'' if tensor.is_contiguous() else 'not '}contiguous; it has to "
                f"be {self._like[0]} on {self._like[1]}, contiguous"
            )
        return transfer

    def receive(self, position: int, buffer: torch.Tensor) -> None:
        """Let the message of this position arrive in ``buffer``."""
        transfer = self._valid("receiving", position, buffer)
        if position != len(self._buffers):
            raise ValueError(
                f"{self.name}: receive {position} registered after {len(self._buffers) - 1}"
            )
        self._buffers.append(buffer)
        if not self._transport.batched:
            what = self._what("receiving", transfer, buffer)
            waiting = self._logged("receive", (transfer, buffer))
            works = self._transport.post_receive(transfer, buffer, self._tag_of(position), what)
            messages = self._messages(transfer, buffer)
            self._receives.append(
                _Handle(self._transport, works, buffer, what, self.name, messages, waiting)
            )

    def send(self, position: int, tensor: torch.Tensor) -> None:
        """Send ``tensor``, which must not change before :meth:`wait_send`."""
        transfer = self._valid("sending", position, tensor)
        if position != self._registered or position >= len(self._buffers):
            raise ValueError(
                f"{self.name}: send {position} registered after {self._registered - 1} sends and "
                f"{len(self._buffers)} receives; both go in order, the receive first"
            )
        self._registered += 1
        if self._transport.batched:
            receive = self._steps[position].receive
            assert receive is not None
            buffer = self._buffers[position]
            what = (
                f"{self._what('sending', transfer, tensor)} and "
                f"{self._what('receiving', receive, buffer)}"
            )
            waiting = self._logged("batch", (transfer, tensor), (receive, buffer))
            works = self._transport.post_batch(transfer, tensor, receive, buffer, what)
            messages = (*self._messages(transfer, tensor), *self._messages(receive, buffer))
            both = (tensor, buffer)
            handle = _Handle(self._transport, works, both, what, self.name, messages, waiting)
            self._sends[position] = handle
            self._receives.append(handle)
            return
        self._queues.setdefault(transfer.lane, deque()).append((position, tensor))
        self._post_ready(transfer.lane)
        if position not in self._sends:
            self._logged("queue", (transfer, tensor))

    def _post_ready(self, lane: int) -> None:
        """Post the sends whose turn it is: the lane is free, or busy with the same target."""
        queue = self._queues.get(lane)
        while queue:
            position, tensor = queue[0]
            transfer = self._steps[position].send
            assert transfer is not None
            last = self._last_sent.get(lane)
            if last is not None and not self._is_sent(last):
                before = self._steps[last].send
                assert before is not None
                if before.target != transfer.target:
                    return
            queue.popleft()
            self._last_sent[lane] = position
            what = self._what("sending", transfer, tensor)
            waiting = self._logged("send", (transfer, tensor))
            works = self._transport.post_send(transfer, tensor, self._tag_of(position), what)
            messages = self._messages(transfer, tensor)
            self._sends[position] = _Handle(
                self._transport, works, tensor, what, self.name, messages, waiting
            )

    def _logged(
        self, verb: str, *messages: tuple[Transfer, torch.Tensor]
    ) -> Callable[[], None] | None:
        """Log a post, if there is a log; what logs the wait for it."""
        log = self._log
        if log is None:
            return None
        numbers = [log.message(one, tensor.numel(), tensor.dtype) for one, tensor in messages]
        log.post(verb, *numbers)
        return lambda: log.post("wait", numbers[0])

    def _messages(
        self, transfer: Transfer, tensor: torch.Tensor
    ) -> tuple[tuple[str, str, int], ...]:
        """For a trace, if there is one."""
        if self._transport.trace is None:
            return ()
        outward = transfer.source == self.plan.rank
        peer = transfer.target if outward else transfer.source
        row = f"{'link to' if outward else 'from'} rank {peer}"
        return ((row, str(transfer.piece), tensor.nbytes),)

    def _is_sent(self, position: int) -> bool:
        return self._sends[position]._works is None

    def _tag_of(self, position: int) -> int:
        return (self._tag + position) & 0x7FFFFFFF

    @property
    def sends_held_back(self) -> bool:
        """Whether a send waits for its lane; only gloo's host-kept lanes hold back."""
        return any(self._queues.values())

    def wait_receive(self, position: int) -> None:
        """Wait until the message of this position is in its buffer.

        Lanes go on meanwhile: their sends up to this position are waited for first.
        """
        self._free_lanes(position)
        self._receives[position].wait()

    def wait_send(self, position: int) -> None:
        """Wait until the buffer of this send may be used again."""
        self._free_lanes(position)
        self._sends[position].wait()

    def _free_lanes(self, position: int) -> None:
        """Free the lanes that hold sends back behind one that is not later than ``position``.

        Waiting only for steps up to the one that is needed keeps the ranks out of a deadlock: the
        lowest unfinished step never waits (see :mod:`commfuse_npu.proof.verify`).
        """
        for lane, queue in self._queues.items():
            while queue and self._last_sent[lane] <= position:
                self._sends[self._last_sent[lane]].wait()
                self._post_ready(lane)

    def finish(self) -> None:
        """Wait for everything that is still under way."""
        for position in range(len(self._steps)):
            self.wait_receive(position)
            self.wait_send(position)
        if self._log is not None:
            self._log.finish()
        self._transport.finished(self)
