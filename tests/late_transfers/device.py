"""A mock device over gloo whose kernels run synchronously; reports accesses that no event orders.

Every kernel is recorded with its stream and the memory that it reads and writes; each lane of
transfers has a stream, too.  Kernels of two streams that access the same memory, one of them
writing, race unless events order them (vector clocks).  Freed memory is reused by the next
allocation of its stream, as in a caching allocator: that allocation has to come after the accesses
of other streams.

A transfer reads its message when it is posted and writes it into the receiver's memory in its
``wait()``, the first time on any stream, as late as a device may.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from commfuse_npu.runtime import collectives, executor
from commfuse_npu.runtime.device_streams import SideStream

Clock = Counter[str]
"""Per stream, the number of its kernels that happened before."""

Tensors = Sequence[torch.Tensor]


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.clock = Clock()

    def wait_event(self, event: Event) -> None:
        self.clock |= event.clock


class Event:
    def record(self, stream: Stream) -> None:
        self.clock = stream.clock.copy()


class _Memory:
    """The accesses to a storage.

    Attributes:
        alive: weak reference to the storage.
        owner: the stream that allocated it.
        last: by ``(stream, "wrote" or "read")`` and first byte of an element, the number of the
            last such kernel.
    """

    def __init__(self, storage: torch.UntypedStorage, owner: Stream) -> None:
        size = storage.nbytes()
        self.alive, self.owner = StorageWeakRef(storage), owner
        self.last: defaultdict[tuple[str, str], torch.Tensor] = defaultdict(
            lambda: torch.zeros(size, dtype=torch.int32)
        )

    def used(self) -> Clock:
        """The last kernel of each stream that accessed the storage."""
        clock = Clock()
        for (name, _), numbers in self.last.items():
            clock |= Clock({name: int(numbers.max())})
        return clock


class Device(TorchDispatchMode):
    """Replaces ``torch.cuda``, and records kernels in a ``with`` block.

    Attributes:
        races: descriptions of the races found so far.
    """

    Event = Event

    def __init__(self) -> None:
        super().__init__()
        self.main = self.current = Stream("main")
        self.races: list[str] = []
        self.transfers: list[_Transfer] = []
        self._lanes: dict[object, Stream] = {}
        self._memory: dict[int, _Memory] = {}
        # Last accesses to freed memory, by the stream that allocated it.
        self._free: defaultdict[str, Clock] = defaultdict(Clock)

    def Stream(self, device: torch.device) -> Stream:
        return Stream("side stream")

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def lane(self, group: object) -> Stream:
        """The stream of a lane."""
        return self._lanes.setdefault(group, Stream(f"lane {len(self._lanes)}"))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs, here, schema = kwargs or {}, self.current, func._schema
        self._find_free()
        result = func(*args, **kwargs)
        if any(out.alias_info and not out.alias_info.is_write for out in schema.returns):
            return result  # a view
        here.clock[here.name] += 1
        for number, argument in enumerate(schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value):
                # Memory that was allocated before belongs to the main stream.
                self._touch(func, tensor, writes, self.main)
        if not any(out.alias_info for out in schema.returns):
            for other, number in self._free.pop(here.name, Clock()).items():
                if here.clock[other] < number:
                    self.races.append(f"{func} on {here.name} gets memory that {other} uses")
            for tensor in _tensors(result):
                self._touch(func, tensor, True, here)
        return result

    def _find_free(self) -> None:
        for key, memory in list(self._memory.items()):
            if memory.alive.expired():
                self._free[memory.owner.name] |= self._memory.pop(key).used()

    def _touch(self, func: object, tensor: torch.Tensor, writes: bool, owner: Stream) -> None:
        if not tensor.numel():
            return
        name, clock = self.current.name, self.current.clock
        storage, places = tensor.untyped_storage(), _places(tensor)
        last = self._memory.setdefault(storage._cdata, _Memory(storage, owner)).last
        for (other, did), numbers in last.items():
            if (writes or did == "wrote") and (numbers[places] > clock[other]).any():
                does = "writes" if writes else "reads"
                self.races.append(f"{func} on {name} {does} what {other} {did}")
        last[name, "wrote" if writes else "read"][places] = clock[name]


def _tensors(value: Any) -> Tensors:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in values if isinstance(item, torch.Tensor)]


def _places(tensor: torch.Tensor) -> torch.Tensor:
    """Offsets of the first bytes of all elements in the storage.  Views of two dtypes may overlap
    without a common offset, which does not occur here."""
    places = torch.tensor(tensor.storage_offset())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * stride
    return places.flatten() * tensor.element_size()


class _Transfer:
    """The handle of transfers that were posted together, as torch_npu returns one for a batch.

    Args:
        post: posts the transfers with copies of the caller's tensors.
        sent, received: the caller's tensors, of which only those received are kept alive.
    """

    def __init__(
        self,
        device: Device,
        lane: object,
        sent: Tensors,
        received: Tensors,
        post: Callable[[Tensors, Tensors], Sequence[Any]],
    ) -> None:
        self._device, self._lane, self._received = device, device.lane(lane), received
        begun = Event()
        begun.record(device.current)
        self._lane.wait_event(begun)
        with device.stream(self._lane):
            messages = [tensor.detach().clone() for tensor in sent]
        with _disable_current_modes():
            self._arrived = [torch.empty_like(tensor) for tensor in received]
            self.works = post(messages, self._arrived)
        device.transfers.append(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        works, self.works = self.works, []
        with _disable_current_modes():
            for work in works:
                work.wait()
        if works:
            with self._device.stream(self._lane), torch.no_grad():
                for tensor, arrived in zip(self._received, self._arrived, strict=True):
                    tensor.data.copy_(arrived)
            self._over = self._lane.clock.copy()
        self._device.current.clock |= self._over
        return True


def _batch(device: Device, post: Callable[..., Any], operations: list[dist.P2POp]) -> list[Any]:
    """Replaces ``dist.batch_isend_irecv``."""
    sends, receives = (
        [p2p for p2p in operations if p2p.op is op] for op in (dist.isend, dist.irecv)
    )
    for half in (sends, receives):  # older versions of CANN take one of each for a pair of ranks
        assert len({p2p.peer for p2p in half}) == len(half), half
    assert all(p2p.tensor.is_contiguous() for p2p in operations)

    def posted(messages: Tensors, arrived: Tensors) -> Sequence[Any]:
        tensors = zip([*sends, *receives], [*messages, *arrived], strict=True)
        return post([dist.P2POp(p2p.op, buffer, p2p.peer, p2p.group) for p2p, buffer in tensors])

    sent, received = ([p2p.tensor for p2p in half] for half in (sends, receives))
    return [_Transfer(device, operations[0].group, sent, received, posted)]


def _collective(device: Device, call: Callable[..., Any]) -> Callable[..., Any]:
    def late(
        out: torch.Tensor, given: torch.Tensor, *splits: Any, group: Any, async_op: bool = False
    ) -> Any:
        work = _Transfer(
            device, group, [given], [out],
            lambda read, arrived: [call(arrived[0], read[0], *splits, group=group, async_op=True)],
        )  # fmt: skip
        return work if async_op else work.wait()

    return late


@contextmanager
def device() -> Iterator[Device]:
    """Run the block with the streams and transfers of a :class:`Device`."""
    mock = Device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "side_stream", partial(SideStream, mock))
        patch.setattr(dist, "batch_isend_irecv", partial(_batch, mock, dist.batch_isend_irecv))
        for name in ("_all_gather", "_reduce_scatter", "_all_to_all"):
            patch.setattr(collectives, name, _collective(mock, getattr(collectives, name)))
        for name in ("backward", "grad"):  # modes are of one thread
            patch.setattr(torch.autograd, name, getattr(torch.autograd, name).__wrapped__)
        # MindSpeed patches it to copy tensors that are not contiguous.
        view = torch.Tensor.view
        patch.setattr(torch.Tensor, "view", lambda x, *shape: view(x.contiguous(), *shape))
        with mock:
            yield mock
        for transfer in mock.transfers:
            if transfer.works:
                mock.races.append("a transfer was never waited for")
                transfer.wait()
