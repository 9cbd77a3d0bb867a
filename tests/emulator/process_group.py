"""A process group that behaves as one of HCCL's, over CPU tensors.

Transfers posted one by one open a communicator per pair of ranks, which holds the host until the
other one of the pair comes; batches and collectives run on the group's own communicator.  Tags are
taken and ignored, as HCCL does.  No group may be used from a second thread while operations of the
first one are not waited for: the state of a batch that is being made is a member of the group.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.emulator import collectives as of
from tests.emulator import memory, tensor_rules
from tests.emulator.errors import RuleError
from tests.emulator.link import Contribution, Link
from tests.emulator.messages import EVERYONE, Communicator, Data, End
from tests.emulator.work import HcclWork, SeveralWorks


class HcclGroup(dist.ProcessGroup):
    """The ranks ``ranks`` of the job; everything else counts places in the group."""

    def __init__(
        self, link: Link, name: str, rank: int, ranks: Sequence[int], seconds: float, backend: str
    ) -> None:
        super().__init__(rank, len(ranks))
        self._link = link
        self._label = name
        self._place = rank
        self._ranks = tuple(ranks)
        self._seconds = seconds
        self._backend = backend
        self._opened: set[Communicator] = set()
        self._batch: list[tuple[str, torch.Tensor, int]] | None = None
        self._in_flight: dict[int, tuple[int, str]] = {}

    def getBackendName(self) -> str:
        return self._backend

    @property
    def group_name(self) -> str:
        return self._label

    def _get_backend(self, device: torch.device) -> HcclGroup:
        return self

    # ------------------------------------------------------------------ transfers

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> HcclWork | None:
        return self._transfer("send", tensors, to)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> HcclWork | None:
        return self._transfer("receive", tensors, source)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> HcclWork:
        raise RuleError("HCCL cannot receive from any rank; name the source")

    def _start_coalescing(self, device: torch.device) -> None:
        if self._batch is not None:
            raise RuleError(f"group {self._label}: a batch is being made already")
        self._one_thread("a batch")
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> HcclWork:
        """Post what came since the start as one operation with one handle."""
        batch, self._batch = self._batch, None
        if not batch:
            raise RuleError(f"group {self._label}: a batch of nothing")
        if not self._link.settings.repeated_peers:
            for verb in ("send", "receive"):
                peers = [peer for what, _, peer in batch if what == verb]
                if len(peers) > len(set(peers)):
                    raise RuleError(
                        f"group {self._label}: a batch with two {verb}s of one rank (ranks "
                        f"{peers} of the group); older versions of CANN take one each"
                    )
        ends = ", ".join(str(self._end(*one)) for one in batch)
        return self._post_transfers(self._own(), f"batch ({ends})", batch)

    def _transfer(self, verb: str, tensors: list[torch.Tensor], peer: int) -> HcclWork | None:
        (tensor,) = tensors
        tensor_rules.check(verb, tensor)
        if peer == self._place or not 0 <= peer < len(self._ranks):
            raise RuleError(f"{verb}: rank {self._place} of the group has no transfer with {peer}")
        if self._batch is not None:
            self._batch.append((verb, tensor, peer))
            return None
        low, high = sorted((self._ranks[self._place], self._ranks[peer]))
        pair = Communicator(self._label, (low, high), pair=True)
        batch = [(verb, tensor, peer)]
        return self._post_transfers(pair, str(self._end(*batch[0])), batch)

    def _end(self, verb: Any, tensor: torch.Tensor, peer: int) -> End:
        dtype = tensor_rules.short(tensor.dtype)
        return End(verb, self._ranks[peer], tensor.numel(), dtype)

    def _post_transfers(
        self, communicator: Communicator, name: str, batch: list[tuple[str, torch.Tensor, int]]
    ) -> HcclWork:
        sent = {i: tensor for i, (verb, tensor, _) in enumerate(batch) if verb == "send"}
        received = {i: tensor for i, (verb, tensor, _) in enumerate(batch) if verb == "receive"}

        def finish(data: Data) -> None:
            for place, tensor in received.items():
                memory.write(tensor, data[place])

        self._open(name, communicator)
        ends = tuple(self._end(*one) for one in batch)
        if not communicator.pair:
            here = self._ranks[self._place]
            pairs = {(min(here, end.peer), max(here, end.peer)) for end in ends}
            links = [Communicator(self._label, pair, link=True) for pair in sorted(pairs)]
            self._open(name, *links)
        for tensor in received.values():
            memory.poison(tensor)
        contribution = None
        if sent:
            contribution = Contribution(lambda: {i: memory.read(t) for i, t in sent.items()})
        number = self._link.post(communicator, name, contribution, ends=ends)
        return self._posted(number, name, finish)

    # ------------------------------------------------------------------ collectives

    def _collective(self, collective: of.Collective) -> HcclWork:
        own = self._own()
        self._open(collective.name, own)
        collective.poison()
        contribution = None
        if collective.send is not None:
            send, ranks = collective.send, self._ranks

            def read() -> Data:
                return {p if p == EVERYONE else ranks[p]: blob for p, blob in send().items()}

            contribution = Contribution(read)
        number = self._link.post(own, collective.name, contribution, agreed=collective.name)
        here = self._ranks[self._place]

        def finish(data: Data) -> None:
            blobs = {self._ranks.index(rank): blob for rank, blob in data.items()}
            if contribution is not None:
                mine = contribution.data.get(here, contribution.data.get(EVERYONE))
                if mine is not None:
                    blobs[self._place] = mine
            collective.finish(blobs)

        return self._posted(number, collective.name, finish)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> HcclWork:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        return self._collective(of.all_reduce(tensors[0], op, self._place, len(self._ranks)))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> SeveralWorks:
        return SeveralWorks([self.allreduce([tensor], opts) for tensor in tensors])

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> HcclWork:
        return self._collective(of.all_gather(outputs[0], inputs[0]))

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> HcclWork:
        return self._collective(of.all_gather_single(output, tensor, len(self._ranks)))

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> SeveralWorks:
        pairs = zip(outputs, inputs, strict=True)
        return SeveralWorks([self.all_gather_single(*pair, opts) for pair in pairs])

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any
    ) -> HcclWork:
        return self._collective(
            of.reduce_scatter(outputs[0], inputs[0], opts.reduceOp, self._place)
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any
    ) -> HcclWork:
        return self._collective(
            of.reduce_scatter_single(output, tensor, opts.reduceOp, self._place, len(self._ranks))
        )

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> SeveralWorks:
        pairs = zip(outputs, inputs, strict=True)
        return SeveralWorks([self.reduce_scatter_single(*pair, opts) for pair in pairs])

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> HcclWork:
        return self._collective(
            of.all_to_all_single(output, tensor, output_sizes, input_sizes, len(self._ranks))
        )

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> HcclWork:
        return self._collective(of.all_to_all(outputs, inputs))

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> HcclWork:
        return self._collective(of.broadcast(tensors[0], opts.rootRank, self._place))

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> HcclWork:
        return self._collective(of.reduce(tensors[0], opts.reduceOp, opts.rootRank, self._place))

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> HcclWork:
        into = outputs[0] if outputs else []
        return self._collective(of.gather(into, inputs[0], opts.rootRank, self._place))

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any
    ) -> HcclWork:
        parts = inputs[0] if inputs else []
        return self._collective(of.scatter(outputs[0], parts, opts.rootRank, self._place))

    def barrier(self, opts: Any = None) -> HcclWork:
        return self._collective(of.barrier())

    # The names of torch 2.7.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ------------------------------------------------------------------ posting

    def _own(self) -> Communicator:
        return Communicator(self._label, self._ranks)

    def _open(self, name: str, *communicators: Communicator) -> None:
        if self._batch is not None:
            raise RuleError(f"group {self._label}: {name} while a batch is being made")
        self._one_thread(name)
        closed = tuple(one for one in communicators if one not in self._opened)
        if closed:
            self._link.open(closed, self._seconds)
            self._opened.update(closed)

    def _one_thread(self, name: str) -> None:
        thread = threading.get_ident()
        for other, before in self._in_flight.values():
            if other != thread:
                raise RuleError(
                    f"group {self._label}: {name} from a second thread while {before} of the "
                    "first is not waited for; one thread at a time may use a group"
                )

    def _posted(self, number: int, name: str, finish: Any) -> HcclWork:
        self._in_flight[number] = threading.get_ident(), name
        return HcclWork(self._link, number, self._seconds, finish, self._forget)

    def _forget(self, number: int) -> None:
        self._in_flight.pop(number, None)
