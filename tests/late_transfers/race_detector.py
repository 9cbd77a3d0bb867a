"""A mock device whose kernels run synchronously; reports kernels that no event orders.

Every kernel is recorded with its stream and the memory that it reads and writes.  Kernels of two
streams that access the same memory, one of them writing, race unless events order them (vector
clocks).  Freed memory is reused by the next allocation of its stream, as in a caching allocator:
that allocation has to come after the accesses of other streams.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

Clock = Counter[str]
"""Per stream, the number of its kernels that happened before."""


class Event:
    def __init__(self, module: Module) -> None:
        self._module = module
        self.clock = Clock()

    def record(self, stream: Stream | None = None) -> None:
        self.clock = (stream or self._module.current).clock.copy()


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.clock = Clock()

    def wait_event(self, event: Event) -> None:
        self.clock |= event.clock


class Module:
    """Replaces ``torch.cuda``."""

    def __init__(self) -> None:
        self.main = self.current = Stream("main")
        self._made = 0
        self._lanes: dict[object, Stream] = {}

    def Stream(self, device: torch.device | None = None) -> Stream:
        self._made += 1
        return Stream(f"stream {self._made}")

    def Event(self) -> Event:
        return Event(self)

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def lane(self, lane: object) -> Stream:
        """The stream of a lane."""
        return self._lanes.setdefault(lane, Stream(f"lane {len(self._lanes)}"))

    def recorded(self) -> Event:
        """An event of the current stream."""
        event = Event(self)
        event.record()
        return event


class _Memory:
    """The accesses to a storage.

    Attributes:
        alive: weak reference to the storage.
        owner: the stream that allocated it.
        wrote, read: per stream and first byte of an element, the number of the last such kernel.
    """

    def __init__(self, storage: torch.UntypedStorage, owner: Stream) -> None:
        def nobody() -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32)

        size = storage.nbytes()
        self.alive, self.owner = StorageWeakRef(storage), owner
        self.wrote: defaultdict[str, torch.Tensor] = defaultdict(nobody)
        self.read: defaultdict[str, torch.Tensor] = defaultdict(nobody)

    def used(self) -> Clock:
        """The last kernel of each stream that accessed the storage."""
        clock = Clock()
        for last in (self.wrote, self.read):
            clock |= Clock({name: int(numbers.max()) for name, numbers in last.items()})
        return clock


class RaceDetector(TorchDispatchMode):
    """Records kernels and reports races; used in a ``with`` block.

    Attributes:
        races: descriptions of the races found so far.
    """

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.races: list[str] = []
        self._module = module
        self._memory: dict[int, _Memory] = {}
        # Last accesses to freed memory, by the stream that allocated it.
        self._free: defaultdict[str, Clock] = defaultdict(Clock)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs, here = kwargs or {}, self._module.current
        self._find_free()
        result = func(*args, **kwargs)
        if any(out.alias_info and not out.alias_info.is_write for out in func._schema.returns):
            return result  # a view
        here.clock[here.name] += 1
        for number, argument in enumerate(func._schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value):
                # Memory that was allocated before belongs to the main stream.
                self._touch(func, tensor, writes, self._module.main)
        if not any(out.alias_info for out in func._schema.returns):
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
        name, clock = self._module.current.name, self._module.current.clock
        storage, places = tensor.untyped_storage(), _places(tensor)
        if storage._cdata not in self._memory:
            self._memory[storage._cdata] = _Memory(storage, owner)
        memory = self._memory[storage._cdata]
        for did, last in (("wrote", memory.wrote), ("read", memory.read))[: 1 + writes]:
            for other, numbers in last.items():
                if (numbers[places] > clock[other]).any():
                    does = "writes" if writes else "reads"
                    self.races.append(f"{func} on {name} {does} what {other} {did}")
        (memory.wrote if writes else memory.read)[name][places] = clock[name]


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in values if isinstance(item, torch.Tensor)]


def _places(tensor: torch.Tensor) -> torch.Tensor:
    """Offsets of the first bytes of all elements in the storage.  Views of two dtypes may overlap
    without a common offset, which does not occur here."""
    places = torch.tensor(tensor.storage_offset())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * stride
    return places.flatten() * tensor.element_size()
