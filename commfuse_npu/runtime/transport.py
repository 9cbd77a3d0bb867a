"""Lanes over the ranks of a group, on which programs run (:mod:`commfuse_npu.runtime.executor`).

The rules, each enforced here: dedicated lane groups, made (:mod:`.lanes`) and warmed up together
and never in a forward; one issuing thread at a time; what the ranks have to agree on
(:mod:`.agreement`).
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.kernels import kernels_for
from commfuse_npu.plan import Place, Schedule
from commfuse_npu.plan.program import Program
from commfuse_npu.plan.rules.rule import MOST_COMPILED, Rule
from commfuse_npu.runtime.agreement import Agreement, Check, TransportError, expect_check
from commfuse_npu.runtime.collective_transport import CollectiveTransport
from commfuse_npu.runtime.collectives import device_backend
from commfuse_npu.runtime.device_streams import LaneStreams
from commfuse_npu.runtime.executor import Running
from commfuse_npu.runtime.lanes import agreed_groups, all_or_none, make_lanes, making, post_swap
from commfuse_npu.runtime.order_log import OrderLog
from commfuse_npu.runtime.scratch import ScratchPool

__all__ = ["Transport"]


class Transport(Agreement):
    """Lanes over the ranks of one group.

    Make it with :meth:`create`, which every process of the job calls together.

    Attributes:
        group: the plain group, for the collective form of an op; no transfer of a program uses it.
        lanes: how many in-order channels there are.
        lane_groups: the group of each.
        batched: post a batch per step (HCCL), or single operations (gloo).
        device_type: where tensors have to be, ``cpu`` on gloo and ``npu`` on HCCL.
        kernels: of its device.
        blocked_seconds: host time spent in waits since the start.  On HCCL a wait holds the
            stream, not the host, so there this counts next to nothing; profile the device instead.
        operations: how many programs were begun.
        remembered: caches that other modules attach to a group; nothing here uses them.
        lane_streams: where what was transferred is erased from; ``None`` for nowhere.
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
        super().__init__(group, control, timeout, check)
        self.batched = batched
        self.scratch = ScratchPool()
        self.blocked_seconds = 0.0
        self.operations = 0
        self.remembered: dict[Hashable, Any] = {}
        self.lane_streams: LaneStreams | None = None
        self.device_type, _ = device_backend(dist.get_backend(lanes[0]))
        self.lanes = len(lanes)
        self.lane_groups = tuple(lanes)
        self.kernels = kernels_for(torch.device(self.device_type))
        self._programs: dict[tuple[Rule, Schedule, tuple[Any, ...]], Program] = {}
        self._in_flight: set[Running] = set()
        # Those that a thread is executing, and which thread that is.
        self._active: set[Running] = set()
        self._thread = threading.get_ident()

    def __deepcopy__(self, memo: object) -> Transport:
        """Itself: a copy of a module transfers over the same lanes."""
        return self

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
            check: when the ranks compare what they call, see :class:`.agreement.Agreement`.
            lane_options: ``pg_options`` of the lane groups, HCCL's buffer size among them.
            order_log: where to write down the order of posts and waits, on all processes alike.

        Raises:
            PlanError: lanes is not a positive whole number.
            ValueError: another ``check``.
            MismatchError: the processes ask for different numbers of lanes.
            TransportError: a process could not make a lane, or did not come; on every process, and
                with what each of them met.  At the latest after three times ``timeout``: one for
                the lane, two for the processes that are still busy with it.
        """
        expect_check(check)
        if lanes is not None:
            Schedule(lanes=lanes)  # raises if it is no number of lanes
        world = dist.group.WORLD
        group = group if group is not None else world
        if group is None or world is None:
            raise RuntimeError(
                "torch.distributed is not initialised; call init_process_group before "
                "Transport.create"
            )
        if batched is None:
            batched = device_backend(dist.get_backend(group))[1] != "gloo"
        groups = agreed_groups(group, world, lanes, timeout)
        with all_or_none(world, timeout):
            channels, control = make_lanes(group, groups, lanes, timeout, lane_options)
            transport = cls(group, channels, control, timeout=timeout, batched=batched, check=check)
            if order_log is not None:
                transport.order_log = order_log
                transport.log_number = order_log.transport(transport.ranks, len(channels), batched)
            transport._warm_up()
        return transport

    def _warm_up(self) -> None:
        """Create now what is created at first use: HCCL's communicators, gloo's connections.

        A batch opens a link to each of its peers at its first use, and no collective opens those of
        batches (read in HCCL).  So each lane carries a rank number over each distance here, in the
        order of a program.
        """
        for index, lane in enumerate(self.lane_groups):
            what = f"warming up lane {index} of {len(self.lane_groups)}"
            mine = torch.full((1,), self.rank, device=self.device_type)
            for distance in range(1, self.size):
                source = (self.rank - distance) % self.size
                theirs = torch.full_like(mine, -1)
                peers = (self.rank + distance) % self.size, source
                with making(f"{what}, distance {distance}"):
                    target, origin = (self.ranks[peer] for peer in peers)
                    swap = post_swap(lane, mine, theirs, target, origin, batched=self.batched)
                    for work in swap:
                        self.wait_for(work)
                if int(theirs.item()) != source:
                    raise TransportError(
                        f"{what}: rank {source} of the group says that it is {theirs.item()}: the "
                        "lane's ranks are not those of the group"
                    )
        self.lane_streams = LaneStreams.of(self.lane_groups, mine.device)

    def close(self) -> None:
        """Give the lanes up.  Every process of the group calls it, with nothing under way."""
        for group in (*self.lane_groups, self._control):
            dist.destroy_process_group(group)
        # The last references to them: gloo may abort a process that ends while its groups live.
        del group, self._control
        self.lane_groups = ()
        self._closed()

    def begin(
        self,
        program: Program,
        name: str,
        like: torch.Tensor,
        options: Hashable = (),
        sum_dtype: torch.dtype | None = None,
    ) -> Running:
        """Begin ``program``.

        Args:
            program: this rank's program; its size, rank and lanes must fit.
            name: the operation, for errors and for the comparison of the ranks.
            like: a tensor with the dtype and device of what is transferred.
            options: whatever else the ranks have to agree on.
            sum_dtype: in which partials are added, by default their own.

        Raises:
            ValueError: program or tensor do not fit this transport.
            MismatchError: another rank calls something else.
            TransportError: an earlier failure broke the transport, or another thread uses it.
        """
        if self._broken is not None:
            raise self.error()
        if self._active:
            self.expect_one_thread(name)
        if like.device.type != self.device_type:
            raise ValueError(
                f"{name}: the tensor is on {like.device}, this group transfers "
                f"{self.device_type} tensors; move it there"
            )
        self.operations += 1
        key = program, name, like.dtype, sum_dtype, options
        known = self._begun.get(key) if self.check == "first" else None
        if known is None:
            self._fits(program, name)
            sizes = {what: value for what, value in program.arguments.items() if type(value) is int}
            facts = {
                "path": program.rule[0],
                "schedule": program.rule[1],
                "dtype": like.dtype,
                "sum_dtype": sum_dtype,
                "options": options,
                **program.arguments,
            }
            known = self._agreed_on(name, facts, sizes)
            self._remember(key, known)
        identity, signature = known
        if self._keeps:
            self._enter(identity, signature)
        log = None
        if self.order_log is not None:
            about = name, like.dtype, sum_dtype, options
            log = self.order_log.program(self.log_number, program, *about)
        # Tags differ with what is sent and with how many operations came before: data for another
        # shape, or left over from a failure, never meets a receive (a short one aborts on gloo).
        tag = identity ^ (self.operations * 0x9E3779B1)
        running = Running(self, program, name, like.dtype, like.device, tag, log, sum_dtype)
        self._in_flight.add(running)
        return running

    @property
    def under_way(self) -> bool:
        """Whether a program was begun that is not finished."""
        return bool(self._in_flight)

    def expect_one_thread(self, name: str) -> None:
        """Raise a TransportError if another thread is executing a program.

        Args:
            name: the operation that is to use the transport, for the error.
        """
        if self._active and threading.get_ident() != self._thread:
            raise TransportError(
                f"{name}: called from a second thread while {next(iter(self._active)).name} is "
                "under way; one thread at a time may use a transport"
            )

    def resume(self, running: Running) -> None:
        """This thread carries a program out, until it is suspended or finished.

        A program that was begun ahead in one thread may be finished in another: autograd has
        threads of its own on a device.

        Raises:
            TransportError: an earlier failure broke the transport, or another thread uses it.
        """
        # A wait that failed once would return at once, as if its data were there.
        if self._broken is not None:
            raise self.error()
        if self._active:
            self.expect_one_thread(running.name)
        self._thread = threading.get_ident()
        self._active.add(running)

    def suspend(self, running: Running) -> None:
        """A program has come to its mark; any thread may go on with it."""
        self._active.discard(running)

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
        if schedule.lanes is None:
            lanes = min(schedule.lanes_for(self.size), self.lanes)
            schedule = replace(schedule, lanes=lanes)
        return Place(schedule, self.rank, self.size, self.batched)

    def program(self, rule: Rule, schedule: Schedule, *arguments: Any) -> Program:
        """This rank's program, for :meth:`begin`."""
        key = rule, schedule, arguments
        program = self._programs.get(key)
        if program is None:
            if len(self._programs) >= MOST_COMPILED:
                self._programs.clear()
            program = self._programs[key] = rule(self.place(schedule), *arguments)
        return program

    @cached_property
    def by_collectives(self) -> CollectiveTransport:
        """The same ranks, for operations that are carried out by torch's collectives."""
        return CollectiveTransport(self.group, lanes=self)

    def wait_for(self, work: Any) -> None:
        """Wait for what torch.distributed began; on gloo for ``timeout``, on HCCL on the stream."""
        work.wait() if self.batched else work.wait(self.timeout)

    def all_reduce(self, name: str, tensor: torch.Tensor) -> None:
        """Sum ``tensor`` over the ranks, in place: the group's own collective, within ``timeout``.

        A group made by somebody else has another limit, half an hour unless they chose one.

        Args:
            name: what is summed, for errors.

        Raises:
            TransportError: a rank did not come in time, or the transport is broken.
        """
        with self.collectives(name, tensor):
            work = dist.all_reduce(tensor, group=self.group, async_op=True)
            assert work is not None
            self.wait_for(work)

    @contextmanager
    def collectives(self, name: str, *tensors: torch.Tensor) -> Iterator[None]:
        """Whatever fails in this block breaks the transport: collectives of :attr:`group`.

        Args:
            name: the operation, for errors.
            tensors: those of the collectives, held if they fail.

        Raises:
            TransportError: a rank did not come in time, or the transport is broken.
        """
        self.expect_unbroken()
        try:
            yield
        except RuntimeError as error:
            self.fail(
                f"{name}: not every rank came here: {error}. One of them failed or does something "
                "else; no rank may go on",
                *tensors,
            )
            raise self.error() from error

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
        self.expect_unbroken()
        self.synchronise()
        if self.size > 1:
            self._compare(name, (("operation", name),))

    def synchronise(self) -> None:
        """Let the host wait for the device's current stream."""
        if self.device_type != "cpu":
            torch.get_device_module(self.device_type).current_stream().synchronize()

    def fail(self, why: str, *left_over: object) -> None:
        """See :meth:`Agreement.fail`; what is under way is held as long as the transport lives."""
        super().fail(why, *left_over, *self._in_flight)
        self._in_flight.clear()
        self._active.clear()

    def finished(self, running: Running) -> None:
        """A program has come to its end."""
        self._in_flight.discard(running)
        self._active.discard(running)
        if self.lane_streams is not None:
            # Memory that another program transfers too, such as a buffer of buckets, is left to it.
            busy = {address for other in self._in_flight for address in other.transferred}
            done = (one for at, one in running.transferred.items() if at not in busy)
            self.lane_streams.erase(done, running.program.lanes)
