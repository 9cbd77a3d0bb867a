"""Streams of a made up device whose kernels run at once, and are told of if no event orders them.

Every kernel is remembered with its stream and what it reads and writes.  Two of different streams
that touch the same memory, one of them writing, race unless one comes after the other by events
(vector clocks).  Memory that is freed is taken again by what its stream allocates next, as by a
caching allocator: what other streams did with it has to come before.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

Clock = Counter[str]
"""By stream, how many of its kernels have come before."""


class Event:
    def __init__(self, module: Module) -> None:
        self._module = module
        self.clock = Clock()

    def record(self, stream: Stream | None = None) -> None:
        self.clock = (stream or self._module.current).clock.copy()

    def synchronize(self) -> None:
        self._module.main.clock |= self.clock

    def elapsed_time(self, end: Event) -> float:
        return 50.0


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.clock = Clock()

    def wait_event(self, event: Event) -> None:
        self.clock |= event.clock


class Module:
    """Stands in for ``torch.cuda``."""

    def __init__(self) -> None:
        self.main = self.current = Stream("main")
        self._streams = [self.main]

    def Stream(self, device: torch.device | None = None, priority: int = 0) -> Stream:
        self._streams.append(Stream(f"stream {len(self._streams)}"))
        return self._streams[-1]

    def Event(self, enable_timing: bool = False) -> Event:
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

    def _sleep(self, clocks: int) -> None:
        pass

    def synchronize(self) -> None:
        """What any stream is given from now on comes after all."""
        for stream in self._streams:
            self.main.clock |= stream.clock
        for stream in self._streams:
            stream.clock |= self.main.clock


@dataclass
class _Memory:
    """Of a storage.

    Attributes:
        owner: the stream that allocated it.
        addresses: of its elements that were touched.
    """

    alive: StorageWeakRef
    owner: Stream
    addresses: set[int] = field(default_factory=set)


class RaceDetector(TorchDispatchMode):
    """Use it in a ``with`` block.

    Attributes:
        races: found so far, in words.
    """

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.races: list[str] = []
        self._module = module
        self._memory: dict[int, _Memory] = {}
        # By the stream that allocated it: the last use of freed memory on each stream.
        self._freed: defaultdict[str, Clock] = defaultdict(Clock)
        # By the address of an element: who wrote them last, and who read them since.
        self._wrote: dict[int, tuple[str, int]] = {}
        self._read: defaultdict[int, dict[str, int]] = defaultdict(dict)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        self._free()
        result = func(*args, **kwargs)
        if any(one.alias_info and not one.alias_info.is_write for one in func._schema.returns):
            return result  # a view
        self._module.current.clock[self._module.current.name] += 1
        for number, argument in enumerate(func._schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value):
                self._touch(func, tensor, writes)
        if not any(one.alias_info for one in func._schema.returns):
            self._take_again(func)
            for tensor in _tensors(result):
                self._allocated(tensor, self._module.current)
                self._touch(func, tensor, True)
        return result

    def _allocated(self, tensor: torch.Tensor, owner: Stream) -> _Memory:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._memory:
            self._memory[storage._cdata] = _Memory(StorageWeakRef(storage), owner)
        return self._memory[storage._cdata]

    def _free(self) -> None:
        for key, memory in list(self._memory.items()):
            if memory.alive.expired():
                del self._memory[key]
                used = self._freed[memory.owner.name]
                for address in memory.addresses:
                    used |= Clock(self._read.pop(address, {}))
                    if address in self._wrote:
                        name, number = self._wrote.pop(address)
                        used |= Clock({name: number})

    def _take_again(self, func: object) -> None:
        here = self._module.current
        for other, number in self._freed.pop(here.name, Clock()).items():
            if here.clock[other] < number:
                self.races.append(f"{func} on {here.name} gets memory that {other} uses")

    def _touch(self, func: object, tensor: torch.Tensor, writes: bool) -> None:
        name, clock = self._module.current.name, self._module.current.clock
        addresses = _addresses(tensor)
        # What there was before is the first stream's.
        self._allocated(tensor, self._module.main).addresses |= addresses
        for address in addresses:
            before = [("wrote", *self._wrote[address])] if address in self._wrote else []
            if writes:
                before += [("read", *read) for read in self._read[address].items()]
                self._wrote[address], self._read[address] = (name, clock[name]), {}
            else:
                self._read[address][name] = clock[name]
            for did, other, number in before:
                if clock[other] < number:
                    does = "writes" if writes else "reads"
                    self.races.append(f"{func} on {name} {does} what {other} {did}")
                    return


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    found = value if isinstance(value, (list, tuple)) else [value]
    return [one for one in found if isinstance(one, torch.Tensor)]


def _addresses(tensor: torch.Tensor) -> set[int]:
    """Of its elements.  That two dtypes have one memory does not come up."""
    places = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * stride
    start, bytes_each = tensor.data_ptr(), tensor.element_size()
    return {start + place * bytes_each for place in places.flatten().tolist()}
