"""The device of this process: whether ranks run together or one alone, and its links."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from tests.one_device.recording import Posted, Recording, ReplayError
from tests.one_device.streams import Event, Streams

__all__ = ["Link", "OneDevice"]

Link = tuple[str, int]
"""In which direction, and the rank at its other end."""


class OneDevice:
    """One per process.

    Attributes:
        new_streams: makes those of a run.
        streams: of links, and the second one of operations.
        recorded: where what is posted is written down, if it is.
        replayed: what is run alone right now, if something is.
    """

    def __init__(self, new_streams: Callable[[], Streams]) -> None:
        self.new_streams = new_streams
        self.streams = new_streams()
        self.recorded: Recording | None = None
        self.replayed: Recording | None = None
        self._checked = False
        self._links: dict[Link, Event] = {}
        # What was sent, and what it was when it was read.
        self._read: list[tuple[Posted, list[torch.Tensor]]] = []

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Write down what is posted in this block, which all ranks run together."""
        self.recorded = Recording()
        try:
            yield self.recorded
        finally:
            self.recorded = None

    @contextmanager
    def replaying(self, recording: Recording, *, checked: bool = True) -> Iterator[None]:
        """Run what was recorded again; nobody else has to.

        Args:
            checked: put NaN into what is not received yet, and compare what is sent with what was.

        Raises:
            ReplayError: what is posted, or what is sent, is not what was recorded.
        """
        recording.rewind()
        self.replayed, self.streams = recording, self.new_streams()
        self._checked = checked
        self._links, self._read = {}, []
        try:
            yield
            self.streams.synchronise()
            self._expect_the_same()
        except BaseException:
            # What it left to the streams still reads and writes its tensors; why is raised below.
            with suppress(RuntimeError):
                self.streams.synchronise()
            raise
        finally:
            self.replayed = None

    def begin(
        self,
        group: str,
        stream: Hashable,
        what: str,
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
        links: Iterable[Link],
    ) -> Event:
        """A transfer, or this rank's part in a collective, of what is run alone.

        Args:
            stream: whose order it keeps.
            sent, received: what it reads and writes; where they overlap it changes them in place.
            links: that it uses; each carries one thing after the other.
        """
        assert self.replayed is not None
        posted = self.replayed.next(group, what, received)
        reads, checked = self._read, self._checked
        if checked and not any(_overlap(tensor, other) for tensor in received for other in sent):
            for tensor in received:
                _poison(tensor)

        def carry() -> None:
            with torch.inference_mode():
                if checked:
                    reads.append((posted, [tensor.data.clone() for tensor in sent]))
                for tensor, data in zip(received, posted.received, strict=True):
                    tensor.data.copy_(data)

        after = [self.streams.here(), *(self._links[link] for link in links if link in self._links)]
        over = self.streams.give(stream, after, carry)
        self._links.update(dict.fromkeys(links, over))
        return over

    def _expect_the_same(self) -> None:
        assert self.replayed is not None
        left = self.replayed.left()
        if left:
            raise ReplayError(f"recorded and not run again: {'; '.join(left[:4])}")
        for posted, read in self._read:
            if not all(_same_bits(*pair) for pair in zip(read, posted.sent, strict=True)):
                raise ReplayError(
                    f"{posted.what}: what was read is not what was sent when the ranks ran "
                    "together: it was not written yet, or written over before it was sent"
                )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    start, of_other = one.data_ptr(), other.data_ptr()
    return start < of_other + other.nbytes and of_other < start + one.nbytes


def _poison(tensor: torch.Tensor) -> None:
    value = float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
    with torch.inference_mode():
        tensor.data.fill_(value)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_floating_point():
        # What is not a number is the same as itself here.
        return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    return torch.equal(one, other)
