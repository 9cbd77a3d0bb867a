"""Lanes over the ranks of a group, and what the ranks have to agree on before they use them.

A lane is a group of its own: on HCCL a communicator with a stream, which keeps its transfers in
order; on gloo a set of sockets.  Programs run on them (:mod:`commfuse_npu.runtime.executor`).

The rules, each enforced here: dedicated lane groups, made and warmed up together and never in a
forward; one issuing thread; a comparison of the ranks at the first use of a combination of
operation and options, and of all that was begun, with its sizes, before an optimizer changes
weights; a failure names rank, peer, operation and step, and breaks the transport for good, because
the transfers that are left over can no longer be matched.
"""

from __future__ import annotations

import threading
import zlib
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from commfuse_npu.plan import Place, Schedule
from commfuse_npu.plan.program import Program
from commfuse_npu.runtime.executor import Running
from commfuse_npu.runtime.ledger import Ledger, Signature, mismatch
from commfuse_npu.runtime.order_log import OrderLog, TransportLog
from commfuse_npu.runtime.roll_call import MissingRankError, roll_call
from commfuse_npu.runtime.scratch import ScratchPool
from commfuse_npu.runtime.trace import Trace, clock

__all__ = [
    "MismatchError",
    "Transport",
    "TransportError",
]

Check = Literal["first", "always"]

_MOST_AGREED = 4096
"""Combinations of operation and options, and programs, that are remembered, about 1 KiB each."""

_EXPLAINING = timedelta(seconds=2)
"""How long others whose wait took too long as well are waited for, to say in what they differ."""

_HISTORIES = 2
"""The tag of what was begun, in full."""

_numbers = count()
_unsettled: set[Transport] = set()
"""On which something was begun that was not compared with the other ranks."""


@cache
def _settle_before_steps() -> None:
    """Have all transports settled before a step of any optimizer of torch.optim, or of its kind."""

    def settle(*_: object) -> None:
        # In one order on all ranks, or they wait for each other.
        for transport in sorted(_unsettled, key=lambda one: one._number):
            if transport._world is dist.group.WORLD:
                transport.settle()
            else:
                _unsettled.discard(transport)  # its groups were destroyed with all others

    register_optimizer_step_pre_hook(settle)


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


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class TransportError(RuntimeError):
    """A transfer failed or timed out.  The transport cannot be used any more."""


def _everyone(value: Any, group: dist.ProcessGroup, timeout: timedelta, tag: int = 0) -> list[Any]:
    """What every rank of the group gives here, by rank; on gloo an error says whose is missing.

    HCCL would open a communicator per pair of ranks for that, in an order that hangs.
    """
    if dist.get_backend(group) == "gloo":
        return roll_call(value, group, timeout, tag)
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
    """The ranks of a group called different operations, or with different shapes or options.

    What is known to all ranks is compared when it was carried out already: see
    :meth:`Transport.settle`.
    """


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


class Transport:
    """Lanes over the ranks of one group.

    Make it with :meth:`create`, which every process of the job calls together.

    Attributes:
        group: the plain group, for the collective form of an op; no transfer of a program uses it.
        rank, size: place in the group.
        lanes: how many in-order channels there are.
        timeout: how long a wait may take on gloo before it becomes an error.
        batched: post a batch per step (HCCL), or single operations (gloo).
        device_type: where tensors have to be, ``cpu`` on gloo and ``npu`` on HCCL.
        blocked_seconds: host time spent in waits since the start.  On HCCL a wait holds the
            stream, not the host, so there this counts next to nothing; profile the device instead.
        operations: how many programs were begun.
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
        self.scratch = ScratchPool()
        self.blocked_seconds = 0.0
        self.operations = 0
        self.remembered: dict[Hashable, Any] = {}
        self.trace: Trace | None = None
        self.order_log: TransportLog | None = None
        self.device_type, _ = _device_backend(dist.get_backend(lanes[0]))
        self.lanes = len(lanes)
        self._lanes = tuple(lanes)
        self._control = control
        self._agreed: set[Hashable] = set()
        self._begun: dict[Hashable, tuple[int, Signature, object]] = {}
        self._ledger: Ledger | None = None
        if self.size > 1 and check == "first":
            self._ledger = Ledger(control)
            _settle_before_steps()
        self._number, self._world = next(_numbers), dist.group.WORLD
        self._places: dict[Schedule, Place] = {}
        self._in_flight: set[Running] = set()
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
            lanes: in-order channels to make; programs may use fewer.  By default as many as the
                default schedule uses in a group of this size.
            timeout: for waits (gloo) and for the lanes' own set-up.
            batched: how to post; by default as the group's backend needs it.  On HCCL it has to
                be True; on gloo True is for tests of what HCCL will see.
            check: compare operation, dtype and options of the ranks at their ``first`` use, and
                what comes up again, with its sizes, when they :meth:`settle`; or everything
                ``always``, before it is sent.
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
    def broken(self) -> bool:
        """Whether a failure made it useless; :meth:`error` says which."""
        return self._broken is not None

    def _warm_up(self) -> None:
        """Create now what is created at first use: HCCL's communicators, gloo's connections.

        A batch opens a link to each of its peers at its first use, and no collective opens those of
        batches (read in HCCL).  So each lane carries a rank number over each distance here, in the
        order of a program.
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
        # The last references to them: gloo may abort a process that ends while its groups live.
        del group, self._control
        self._lanes = ()
        self._broken = self._broken or f"rank {self.rank}: it was closed"
        _unsettled.discard(self)
        if self.order_log is not None:
            self.order_log.close()

    def begin(
        self,
        program: Program,
        name: str,
        like: torch.Tensor,
        options: Hashable = (),
        sum_dtype: torch.dtype | None = None,
    ) -> Running:
        """Begin to carry out ``program``.

        Args:
            program: this rank's program; its size, rank and lanes must fit.
            name: the operation, for errors and for the comparison of the ranks.
            like: a tensor with the dtype and device of what is transferred.
            options: whatever else the ranks have to agree on.
            sum_dtype: in which partials are added, by default their own.

        Raises:
            ValueError: program or tensor do not fit this transport.
            MismatchError: another rank calls something else.
            TransportError: an earlier failure broke the transport.
        """
        if self._broken is not None:
            raise self.error()
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
        # By identity: hashing all that is in them takes longer than posting a transfer.
        key = program, name, like.dtype, sum_dtype, id(options)
        known = self._begun.get(key) if self.check == "first" else None
        if known is None:
            self._fits(program, name)
            sizes = {what: value for what, value in program.arguments.items() if _is_size(value)}
            facts = {
                "path": program.rule[0],
                "schedule": program.rule[1],
                "dtype": like.dtype,
                "sum_dtype": sum_dtype,
                "options": options,
                **program.arguments,
            }
            known = *self._agreed_on(name, facts, sizes), options
            if len(self._begun) >= _MOST_AGREED:
                self._begun.clear()
            self._begun[key] = known
        identity, signature, _ = known
        if self._ledger is not None:
            self._enter(self._ledger, identity, signature)
        log = None
        if self.order_log is not None:
            log = self.order_log.begin(program, name, like.dtype, sum_dtype, options)
        # Tags differ with what is sent and with how many operations came before: data for another
        # shape, or left over from a failure, never meets a receive (a short one aborts on gloo).
        tag = identity ^ (self.operations * 0x9E3779B1)
        running = Running(self, program, name, like.dtype, like.device, tag, log, sum_dtype)
        self._in_flight.add(running)
        return running

    def _fits(self, program: Program, name: str) -> None:
        if (program.rank, program.size) != (self.rank, self.size):
            raise ValueError(
                f"{name}: the program is for rank {program.rank} of {program.size}, the transport "
                f"is rank {self.rank} of {self.size}"
            )
        if program.lanes > self.lanes:
            raise ValueError(
                f"{name}: the program uses {program.lanes} lanes, the transport has {self.lanes}; "
                f"create it with lanes={program.lanes} or plan with fewer"
            )
        if program.batched != self.batched:
            raise ValueError(
                f"{name}: the program is made for {'batches' if program.batched else 'gloo'}, the "
                "transport posts the other way; compile it for Transport.place"
            )

    def place(self, schedule: Schedule) -> Place:
        """For whom programs are compiled here; a schedule that leaves lanes open takes these."""
        place = self._places.get(schedule)
        if place is None:
            lanes = schedule.lanes
            if lanes is None:
                lanes = min(schedule.lanes_for(self.size), self.lanes)
            place = Place(replace(schedule, lanes=lanes), self.rank, self.size, self.batched)
            self._places[schedule] = place
        return place

    @property
    def lane_groups(self) -> Sequence[dist.ProcessGroup]:
        """The group of each lane."""
        return self._lanes

    def agree(
        self, name: str, sizes: Mapping[str, Hashable] | None = None, **facts: Hashable
    ) -> int:
        """Agree with the other ranks on an operation, before anything of it is posted.

        The ranks of a group run the same operations in the same order, so that all of them meet a
        combination of facts for the first time together, and wait for each other there.  Sizes of
        what is known are compared later, see :meth:`settle`: a new length holds nobody up.

        Args:
            sizes: lengths, which come and go; zero is not a length, but a fact.

        Returns:
            a number for what was agreed on, to tell operations apart; the same on every rank.

        Raises:
            MismatchError: another rank calls something else.
            TransportError: a rank did not answer in time, or the transport is broken.
        """
        if self._broken is not None:
            raise self.error()
        sizes = sizes or {}
        identity, signature = self._agreed_on(name, {**facts, **sizes}, sizes)
        if self._ledger is not None:
            self._enter(self._ledger, identity, signature)
        return identity

    def _agreed_on(
        self, name: str, facts: Mapping[str, Hashable], sizes: Mapping[str, Hashable]
    ) -> tuple[int, Signature]:
        """Compare the facts, if they are new, and with them those that are sizes."""
        signature = (("operation", name), *facts.items())
        kind = (
            *signature[:1],
            *((what, bool(value) if what in sizes else value) for what, value in facts.items()),
        )
        if self.size > 1 and (kind not in self._agreed or self.check == "always"):
            self._compare(name, signature)
        if len(self._agreed) >= _MOST_AGREED and kind not in self._agreed:
            # The ranks run the same operations, so that they forget the same; and what is begun
            # by identity, which is not the same on all of them, is forgotten with it.
            self._agreed.clear()
            self._begun.clear()
        self._agreed.add(kind)
        return zlib.crc32(repr(signature).encode()), signature

    def _enter(self, ledger: Ledger, identity: int, signature: Signature) -> None:
        """Write down what is begun, to be compared later."""
        _unsettled.add(self)
        if ledger.enter(identity, signature):
            with self._with_others("what was begun"):
                same = ledger.send(self.timeout)
            if not same:
                self._went_apart(ledger)

    def settle(self) -> None:
        """Compare what was begun with the other ranks: it returns only if it was the same.

        It runs by itself before every step of an optimizer of torch.optim and of its subclasses,
        the inner optimizers of Megatron and MindSpeed among them, and raises there, before weights
        change.  A loop that changes weights in another way, or has none to change, calls it where
        all ranks of the group come.  Where nothing was begun since the last time it does nothing.

        What was begun are the operations with all their sizes, in order.  Until then a size that
        is not the same on all ranks does what the backend does: gloo matches nothing, and the wait
        times out with this error; of HCCL it is not documented, and two operations of equal size
        in another order deliver wrong data.

        Raises:
            MismatchError: another rank began something else.
            TransportError: a rank did not come in time, or the transport is broken.
        """
        if self._broken is not None:
            raise self.error()
        ledger = self._ledger
        if ledger is None or self not in _unsettled:
            return
        state = ledger.entered, ledger.digest
        if any(other != state for other in self.share("what was begun", state)):
            self._went_apart(ledger)
        with self._with_others("what was begun"):
            ledger.arrived(self.timeout)
        ledger.settled()
        _unsettled.discard(self)

    def _went_apart(self, ledger: Ledger) -> None:
        """Raise, with the first operation that is not the same on all ranks."""
        with self._with_others("what was begun"):
            everyone = _everyone(ledger.kept, self._control, self.timeout, _HISTORIES)
        self.fail(
            ledger.difference(everyone, all_begun=True)
            or "the ranks began different operations, longer ago than they keep them"
        )
        raise self.error(MismatchError)

    def gave_up(self, why: str, *left_over: object) -> TransportError:
        """A wait took as long as it may: break the transport, and say so if the ranks differ."""
        difference = None
        if self._ledger is not None and self._broken is None:
            try:
                everyone = _everyone(self._ledger.kept, self._control, _EXPLAINING, _HISTORIES)
                difference = self._ledger.difference(everyone, all_begun=False)
            except MissingRankError as error:
                left_over = *left_over, error.left_over
        self.fail(why if difference is None else f"{why}. {difference}", *left_over)
        return self.error(TransportError if difference is None else MismatchError)

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
        with self._with_others(name):
            return _everyone(value, self._control, self.timeout)

    @contextmanager
    def _with_others(self, name: str) -> Iterator[None]:
        try:
            yield
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

    def _compare(self, name: str, signature: Signature) -> None:
        everyone = self.share(name, signature)
        for rank, other in enumerate(everyone):
            if other != signature:
                self.fail(
                    f"{mismatch(self.rank, signature, rank, other)}. Nothing was sent; call it "
                    "alike on all ranks"
                )
                raise self.error(MismatchError)

    def fail(self, why: str, *left_over: object) -> None:
        """Break the transport: no later operation can be matched with the other ranks' any more."""
        self._left_over += [*left_over, *self._in_flight]
        self._in_flight.clear()
        _unsettled.discard(self)
        if self._broken is None:
            self._broken = (
                f"rank {self.rank} of {self.size} (global rank {self.ranks[self.rank]}): {why}"
            )
            if self.order_log is not None:
                self.order_log.fail(why)

    def error(self, kind: type[TransportError] = TransportError) -> TransportError:
        return kind(f"{self._broken}. This transport cannot be used any more")

    def finished(self, running: Running) -> None:
        """A program has come to its end."""
        self._in_flight.discard(running)
