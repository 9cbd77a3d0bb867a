"""Lanes over the ranks of a group, on which programs run (:mod:`commfuse_npu.runtime.executor`).

This module enforces three rules: lanes are dedicated groups, created (:mod:`.lanes`) and warmed up
together, never in a forward; one thread at a time issues transfers; and the ranks agree on the
operations that they run (:mod:`.agreement`).
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from commfuse_npu.kernels import kernels_for
from commfuse_npu.plan import RankSpec, Schedule
from commfuse_npu.plan.rules import Rule
from commfuse_npu.plan.schedule import Shape
from commfuse_npu.runtime.agreement import Agreement, TransportError
from commfuse_npu.runtime.collective_transport import CollectiveTransport
from commfuse_npu.runtime.collectives import (
    begin_all_gather,
    begin_all_to_all,
    device_backend,
)
from commfuse_npu.runtime.device_streams import LaneStreams
from commfuse_npu.runtime.executor import Running
from commfuse_npu.runtime.lanes import agreed_groups, all_or_none, make_lanes, making, post_swap
from commfuse_npu.runtime.order_log import OrderLog
from commfuse_npu.runtime.scratch import ScratchPool

__all__ = ["Transport"]

_of_groups: WeakValueDictionary[dist.ProcessGroup, Transport] = WeakValueDictionary()


class Transport(Agreement):
    """Lanes over the ranks of one group.

    Create it with :meth:`create`, which every process of the job calls together.

    Attributes:
        group: the original process group, for collectives; transfers of programs do not use it.
        lanes: number of in-order channels.
        lane_groups: the process group of each lane.
        device_type: device of the tensors: ``cpu`` on gloo, ``npu`` on HCCL.
        kernels: the kernel module of that device.
        blocked_seconds: host time spent in waits so far.  On HCCL a wait blocks the stream, not the
            host, so this stays close to 0; profile the device instead.
        operations: number of programs begun.
        lane_streams: streams of the lanes, to erase tensors from; ``None`` if not supported.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        lanes: Sequence[dist.ProcessGroup],
        control: dist.ProcessGroup,
        *,
        timeout: timedelta,
    ) -> None:
        self.group = group
        super().__init__(group, control, timeout)
        self.scratch = ScratchPool()
        self.blocked_seconds = 0.0
        self.operations = 0
        self.lane_streams: LaneStreams | None = None
        self.device_type, _ = device_backend(lanes[0])
        self.lanes = len(lanes)
        self.lane_groups = tuple(lanes)
        self.kernels = kernels_for(torch.device(self.device_type))
        self._specs: dict[Schedule, RankSpec] = {}
        self._in_flight: set[Running] = set()
        # The programs that ``_thread`` is executing.
        self._active: set[Running] = set()
        self._thread = threading.get_ident()

    def __deepcopy__(self, memo: object) -> Transport:
        """Return itself, so that the copy of a module uses the same lanes."""
        return self

    @classmethod
    def create(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        lanes: int | None = None,
        shape: Shape = "shifted",
        timeout: timedelta = timedelta(minutes=5),
        lane_options: Any = None,
        order_log: OrderLog | None = None,
    ) -> Transport:
        """Create the lanes of every group of the job, and warm them up.

        **All** processes of the job call it, each with its own group, because ``new_group`` has to
        be called by all of them in the same order.  Call it where the other groups are created,
        never in a forward.

        Args:
            group: the group of this process; by default the whole job.
            lanes: in-order channels to create; programs may use fewer.  By default as many as the
                default schedule uses in a group of this size.
            shape: of the schedules that will run: what they post is warmed up, collectives for
                ``collective`` and batches to every peer for the others.
            timeout: for waits (gloo) and for creating the lanes.
            lane_options: ``pg_options`` of the lane groups, such as HCCL's buffer size.
            order_log: records the order of posts and waits; on all processes or on none.

        Raises:
            PlanError: lanes is not a positive whole number.
            TypeError: a process has no group; raised on all of them.
            MismatchError: the processes ask for different numbers of lanes.
            TransportError: a process failed to create a lane, or did not call this.  Raised on
                every process, with the errors of all, after at most three times ``timeout``: one
                for the lane, two for the processes that still wait in it.
        """
        if shape == "collective":
            lanes = Schedule(shape, lanes).lanes_for(2)
        elif lanes is not None:
            Schedule(lanes=lanes)  # raises if it is not a valid number
        world = dist.group.WORLD
        if world is None:
            raise RuntimeError(
                "torch.distributed is not initialized; call init_process_group before "
                "Transport.create"
            )
        group = group if group is not None else world
        groups = agreed_groups(group, world, lanes, timeout)
        with all_or_none(world, timeout):
            channels, control = make_lanes(group, groups, lanes, timeout, lane_options)
            transport = cls(group, channels, control, timeout=timeout)
            if order_log is not None:
                transport.order_log = order_log
                transport.log_number = order_log.transport(transport.ranks)
            transport._warm_up(shape)
        _of_groups[group] = transport
        return transport

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> Transport | None:
        """The newest lanes of a group, by default the whole job, while somebody keeps them."""
        found = dist.group.WORLD if group is None else group
        return None if found is None else _of_groups.get(found)

    def _warm_up(self, shape: Shape) -> None:
        """Open HCCL's links and gloo's connections now instead of at their first use.

        The first batch to a peer opens a link to it, and no collective opens the links of batches
        (read in HCCL).  So each lane sends a rank number as programs of the shape do: over each
        distance, or in an all-gather and an all-to-all.
        """
        for index, lane in enumerate(self.lane_groups):
            task = f"warming up lane {index} of {len(self.lane_groups)}"
            number = torch.full((1,), self.rank, device=self.device_type)
            numbers = number.repeat(self.size)
            if shape == "collective" and self.size > 1:
                with making(task):
                    begin_all_gather(number, lane, numbers)[1].wait()
                    begin_all_to_all(numbers, lane, numbers.clone())[1].wait()
            else:
                for distance in range(1, self.size):
                    source = (self.rank - distance) % self.size
                    peers = self.ranks[(self.rank + distance) % self.size], self.ranks[source]
                    received = numbers[source : source + 1]
                    with making(f"{task}, distance {distance}"):
                        for work in post_swap(lane, number, received, *peers):
                            work.wait()
            if numbers.tolist() != list(range(self.size)):
                raise TransportError(
                    f"{task}: the ranks of the group say that they are {numbers.tolist()}: the "
                    "lane's ranks are not those of the group"
                )
        self.lane_streams = LaneStreams.of(self.lane_groups, number.device)

    def close(self) -> None:
        """Destroy the lanes, at the first call.

        Every process of the group calls it, with no program in flight or after a failure.
        """
        if not self.lane_groups:
            return
        if self._world is dist.group.WORLD:  # else they were destroyed with the old world
            for group in (*self.lane_groups, self.control):
                dist.destroy_process_group(group)
        # Drop the last references: gloo may abort a process that exits while its groups exist.
        self.lane_groups = ()
        if _of_groups.get(self.group) is self:
            del _of_groups[self.group]
        del self.control
        self._closed()

    def begin(
        self,
        rule: Rule,
        name: str,
        like: torch.Tensor,
        schedule: Schedule = Schedule(),
        options: Hashable = (),
        sum_dtype: torch.dtype | None = None,
    ) -> Running:
        """Begin an operation: the ranks agree on its program, and nothing is posted yet.

        Args:
            rule: what compiles the program.
            name: name of the operation, for errors and for the comparison between ranks.
            like: a tensor with the dtype and device of the transferred tensors.
            schedule: order of the peers, lanes and chunks.
            options: anything else that the ranks have to agree on.
            sum_dtype: dtype in which partials are added; by default their own.

        Raises:
            ValueError: program or tensor do not fit this transport.
            MismatchError: another rank calls a different operation.
            TransportError: an earlier failure broke the transport, or another thread uses it.
        """
        if self._broken is not None:
            raise self.error()
        if self._active:
            self.expect_one_thread(name)
        dtype = like.dtype
        device = like.device
        if device.type != self.device_type:
            raise ValueError(
                f"{name}: the tensor is on {device}, this group transfers "
                f"{self.device_type} tensors; move it there"
            )
        program = rule.program(self.spec(schedule))
        self.operations += 1
        key = program, name, dtype, sum_dtype, options
        agreed = self._begun.get(key)
        if agreed is None:
            if program.lanes > self.lanes:
                raise ValueError(
                    f"{name}: the program uses {program.lanes} lanes, the transport has "
                    f"{self.lanes}; create it with lanes={program.lanes} or plan with fewer"
                )
            sizes = {fact: value for fact, value in vars(rule).items() if type(value) is int}
            facts = {
                "path": type(rule).__name__,
                "schedule": program.spec.schedule,
                "dtype": dtype,
                "sum_dtype": sum_dtype,
                "options": options,
                **vars(rule),
            }
            agreed = self._agreed_on(name, facts, sizes)
            self._remember(key, agreed)
        self._enter(*agreed)
        log = None
        if self.order_log is not None:
            details = name, dtype, sum_dtype, options
            log = self.order_log.program(self.log_number, program, *details)
        # The tag depends on the operation and on its number: data of another shape, or left over
        # from a failure, matches no receive (gloo aborts on a receive that is too short).
        tag = agreed[0] ^ (self.operations * 0x9E3779B1)
        running = Running(self, program, name, dtype, device, tag, log, sum_dtype)
        self._in_flight.add(running)
        return running

    @property
    def in_flight(self) -> list[str]:
        """Names of the operations that have begun and not finished."""
        return [running.name for running in self._in_flight]

    def expect_one_thread(self, name: str) -> None:
        """Raise a TransportError if another thread is executing a program.

        Args:
            name: the operation that needs the transport, for the error message.
        """
        if self._active and threading.get_ident() != self._thread:
            raise TransportError(
                f"{name}: called from a second thread while {next(iter(self._active)).name} is "
                "under way; one thread at a time may use a transport"
            )

    def resume(self, running: Running) -> None:
        """Register this thread as the one that executes ``running``, until it suspends or finishes.

        A program begun ahead in one thread may finish in another, because autograd runs the
        backward of device tensors in its own threads.

        Raises:
            TransportError: an earlier failure broke the transport, or another thread uses it.
        """
        # A work whose wait failed returns at once when waited for again, as if data had arrived.
        if self._broken is not None:
            raise self.error()
        if self._active:
            self.expect_one_thread(running.name)
        self._thread = threading.get_ident()
        self._active.add(running)

    def suspend(self, running: Running) -> None:
        """A program has reached its ``ahead_end``; any thread may continue it."""
        self._active.discard(running)

    def spec(self, schedule: Schedule) -> RankSpec:
        """What this rank's programs are compiled for; default lanes are limited to these lanes."""
        if schedule not in self._specs:
            lanes = schedule.lanes or min(schedule.lanes_for(self.size), self.lanes)
            limited = replace(schedule, lanes=lanes)
            self._specs[schedule] = RankSpec(limited, self.rank, self.size)
        return self._specs[schedule]

    @cached_property
    def by_collectives(self) -> CollectiveTransport:
        """A transport of the same ranks that runs operations with torch.distributed collectives."""
        return CollectiveTransport(self.group, lanes=self)

    def wait_for(self, work: Any) -> None:
        """Wait for a ``Work``: on gloo the host, at most :attr:`timeout`; on HCCL the stream."""
        work.wait(self.timeout) if self.device_type == "cpu" else work.wait()

    @contextmanager
    def collectives(self, name: str) -> Iterator[None]:
        """A block of collectives of :attr:`group`; a RuntimeError in it breaks the transport.

        Args:
            name: of the operation, for errors.

        Raises:
            TransportError: a collective failed or timed out, or the transport is broken.
        """
        self.expect_unbroken()
        try:
            yield
        except RuntimeError as error:
            self.fail(
                f"{name}: not every rank called it: {error}. A rank failed or runs another "
                "operation; no rank may continue"
            )
            raise self.error() from error

    def confirm(self, name: str) -> None:
        """A barrier: it returns only if every rank has called it with the same ``name``.

        Use it where no rank may continue if another one failed before.  Transfers may be in flight.
        On a device the host first waits for the current stream, which reports failed transfers.
        Besides, it costs two small messages to each other rank.

        Args:
            name: of the barrier, for errors.

        Raises:
            MismatchError: another rank calls a different operation.
            TransportError: a rank did not call it in time, or the transport is broken.
        """
        self.expect_unbroken()
        self.synchronize()
        if self.size > 1:
            self._compare(name, (("operation", name),))

    def synchronize(self) -> None:
        """Block the host until the device's current stream is idle; nothing on a CPU."""
        if self.device_type != "cpu":
            torch.get_device_module(self.device_type).current_stream().synchronize()

    def fail(self, why: str, *left_over: object) -> None:
        """See :meth:`Agreement.fail`; programs in flight are kept alive with the transport."""
        super().fail(why, *left_over, *self._in_flight)
        self._in_flight.clear()
        self._active.clear()

    def finished(self, running: Running) -> None:
        """Forget a finished program, and erase its tensors from the streams of the lanes."""
        self._in_flight.discard(running)
        self._active.discard(running)
        if self.lane_streams is not None:
            # Skip memory that another program in flight transfers too, such as a bucket's buffer.
            busy = {address for other in self._in_flight for address in other.transferred}
            tensors = (tensor for at, tensor in running.transferred.items() if at not in busy)
            self.lane_streams.erase(tensors, running.program.lanes)
