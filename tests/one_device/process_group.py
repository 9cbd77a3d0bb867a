"""A process group whose ranks run together over gloo, or one of them alone (:mod:`.device`).

As on HCCL a batch of transfers is one operation, batches and collectives of a group come one after
the other, and several groups are served at once.  Transfers that are posted one by one keep their
order between two ranks only.  A link goes from one rank to one other, in one direction; a
collective uses those to all others at once: a full mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commfuse_npu.runtime.second_stream import SecondStream
from tests.one_device.device import OneDevice
from tests.one_device.recording import Posted
from tests.one_device.streams import Event

__all__ = ["BACKEND", "OneDeviceGroup"]

BACKEND = "one_device"

_Tensors = Sequence[torch.Tensor]

_WAYS = {"send": "send to", "receive": "receive from"}

# torch calls these methods with one form of arguments of the several that it declares.
_ProcessGroup: Any = dist.ProcessGroup


class OneDeviceGroup(_ProcessGroup):  # type: ignore[misc]
    """The ranks ``ranks`` of the job; everything else counts places in the group.

    Args:
        together: what carries their transfers when all of them run.
    """

    def __init__(
        self,
        device: OneDevice,
        name: str,
        place: int,
        ranks: Sequence[int],
        together: Any,
    ) -> None:
        super().__init__(place, len(ranks))
        self._device = device
        self._label = name
        self._place = place
        self._ranks = tuple(ranks)
        self._together = together

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return self._label

    def second_stream(self, device: torch.device) -> SecondStream | None:
        """For the sums and copies of what is run alone; together the host does them in order."""
        if self._device.replayed is None and device.type == "cpu":
            return None
        return self._device.streams.second(device)

    # ------------------------------------------------------------------ transfers

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> dist.Work:
        return self._transfer("send", tensors, to, tag)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> dist.Work:
        return self._transfer("receive", tensors, source, tag)

    def _transfer(self, verb: str, tensors: _Tensors, peer: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        return self._post((self._label, verb, peer), [(verb, tensor, peer, tag)])

    def post_batch(self, operations: Sequence[dist.P2POp]) -> dist.Work:
        """Post them as one."""
        ends = [
            ("send" if one.op is dist.isend else "receive", one.tensor, one.group_peer, one.tag)
            for one in operations
        ]
        return self._post(self._label, ends)

    def _post(
        self, stream: Hashable, ends: Sequence[tuple[str, torch.Tensor, int, int]]
    ) -> dist.Work:
        sent = [tensor for verb, tensor, _, _ in ends if verb == "send"]
        received = [tensor for verb, tensor, _, _ in ends if verb == "receive"]
        what = ", ".join(f"{_WAYS[verb]} {self._ranks[peer]}" for verb, _, peer, _ in ends)
        if self._device.replayed is not None:
            links = [(verb, self._ranks[peer]) for verb, _, peer, _ in ends]
            over = self._device.begin(self._label, stream, what, sent, received, links)
            return _Alone(over, (*sent, *received))
        staged, works = [], []
        # On a device all are copied, which holds the host until its stream has come to here.
        for verb, tensor, peer, tag in ends:
            there = tensor if tensor.device.type == "cpu" else tensor.cpu()
            if verb == "send":
                works.append(self._together.send([there], peer, tag))
            else:
                staged.append(there)
                works.append(self._together.recv([there], peer, tag))
        return _Together(works, self._recorded(what, sent), received, staged)

    def _recorded(self, what: str, sent: _Tensors) -> Posted | None:
        recording = self._device.recorded
        if recording is None:
            return None
        with torch.inference_mode():
            copies = [tensor.data.clone() for tensor in sent]
        return recording.add(self._label, Posted(what, copies))

    # ------------------------------------------------------------------ collectives

    def _collective(
        self,
        name: str,
        sent: _Tensors,
        received: _Tensors,
        call: Callable[[list[torch.Tensor], list[torch.Tensor]], Any],
    ) -> dist.Work:
        """``call`` is gloo's, with what it sends and receives on the CPU."""
        device = self._device
        if device.replayed is not None:
            others = [rank for place, rank in enumerate(self._ranks) if place != self._place]
            links = [(verb, rank) for verb in ("send", "receive") for rank in others]
            over = device.begin(self._label, self._label, name, sent, received, links)
            return _Alone(over, (*sent, *received))
        posted = self._recorded(name, sent)
        there = {id(t): t if t.device.type == "cpu" else t.cpu() for t in (*sent, *received)}
        staged = [there[id(tensor)] for tensor in received]
        work = call([there[id(tensor)] for tensor in sent], staged)
        return _Together([work], posted, received, staged)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        return self._collective(
            "all-reduce", tensors, tensors, lambda _, out: self._together.allreduce(out, opts)
        )

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        return self._collective(
            "all-gather",
            inputs,
            outputs[0],
            lambda mine, out: self._together.allgather([out], mine),
        )

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        return self._collective(
            "all-gather",
            [tensor],
            [output],
            lambda mine, out: self._together._allgather_base(out[0], mine[0]),
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any
    ) -> dist.Work:
        return self._collective(
            "reduce-scatter",
            [tensor],
            [output],
            lambda mine, out: self._together._reduce_scatter_base(out[0], mine[0], opts),
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> dist.Work:
        return self._collective(
            "all-to-all",
            [tensor],
            [output],
            lambda mine, out: self._together.alltoall_base(
                out[0], mine[0], output_sizes, input_sizes
            ),
        )

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        return self._collective(
            "broadcast", tensors, tensors, lambda _, out: self._together.broadcast(out, opts)
        )

    def barrier(self, opts: Any = None) -> dist.Work:
        """Alone there is nobody to wait for but the own streams."""
        if self._device.replayed is not None:
            self._device.streams.synchronise()
            return _Alone(self._device.streams.here())
        return self._together.barrier()

    # The names of torch 2.7.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


class _Alone(dist.Work):
    """Of an operation on a stream of its own.

    Args:
        over: when it is over.
        kept: tensors that it reads and writes: held until it is waited for, as the allocator knows
            nothing of that stream.
    """

    def __init__(self, over: Event, kept: _Tensors = ()) -> None:
        super().__init__()
        self._over, self._kept = over, kept

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._over.wait()
        self._kept = ()
        return True


class _Together(dist.Work):
    """Of an operation that gloo carries.

    Args:
        posted: where what was received is written down.
        received, staged: where it is wanted, and where gloo puts it.
    """

    def __init__(
        self, works: Sequence[Any], posted: Posted | None, received: _Tensors, staged: _Tensors
    ) -> None:
        super().__init__()
        self._works = works
        self._posted, self._received, self._staged = posted, received, staged

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(*([] if timeout is None else [timeout]))
        with torch.inference_mode():
            for tensor, data in zip(self._received, self._staged, strict=True):
                if tensor is not data:
                    tensor.data.copy_(data)
            if self._posted is not None:
                self._posted.received = [tensor.data.clone() for tensor in self._received]
        self._works, self._posted, self._received, self._staged = [], None, [], []
        return True
