"""What the ranks of a group agree on, and what becomes of them when they do not.

Every rank runs the same operations in the same order.  A combination of operation and options is
compared before anything of its first use is sent; all that was begun, with its sizes, before an
optimizer changes weights.  A failure names rank, peer, operation and step, and it is for good: the
transfers that are left over can no longer be matched.

What is begun enters a digest.  On gloo the digest of every stretch of operations is sent to the
other ranks, and looked at when the next stretch is over, so that it has arrived long before.  While
transfers are under way it is not looked at: another rank may need them before it sends its own::

    begun    | stretch 0      | stretch 1      | stretch 2      | step of the optimizer
    sent     |                | 0              | 1              | 2, and the last operations
    compared |                |                | 0              | 1, 2, and the last operations

The last operations are kept in full, to say in what the ranks differ.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import count, zip_longest
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from commfuse_npu.runtime.gather_objects import MissingRankError, Swap, gather_objects
from commfuse_npu.runtime.order_log import OrderLog

__all__ = ["Agreement", "Check", "MismatchError", "TransportError"]

Check = Literal["first", "always"]

Signature = tuple[tuple[str, Hashable], ...]
"""An operation: ``("operation", name)``, then whatever else has to be the same on all ranks."""

_MOST_AGREED = 4096
"""Combinations of operation and options, about 1 KiB each, that are remembered."""

_MOST_BEGUN = 512
"""Programs that are remembered; one that was forgotten is looked up among the combinations."""

_EXPLAINING = timedelta(seconds=2)
"""How long others whose wait failed as well are waited for, to say in what they differ."""

_STRETCH = 256
_KEPT = 4 * _STRETCH
_DIGESTS, _HISTORIES = 1, 2
"""Tags of digests, and of what was begun, in full; other comparisons have 0."""

_numbers = count()
_unsettled: set[Agreement] = set()
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


def expect_check(check: str) -> None:
    """Raise a ValueError unless ``check`` is one of :data:`Check`."""
    if check not in get_args(Check):
        raise ValueError(f"check {check!r} is unknown; choose {' or '.join(get_args(Check))}")


class TransportError(RuntimeError):
    """A transfer failed or timed out.  The transport cannot be used any more."""


class MismatchError(TransportError):
    """The ranks of a group called different operations, or with different shapes or options.

    What is known to all ranks is compared when it was carried out already: see
    :meth:`Transport.settle`.
    """


class Agreement:
    """What the ranks of one group have agreed on, and whether they still can.

    Args:
        group: whose ranks agree.
        control: a group of the same ranks, for comparisons; gloo's where there is one.
        timeout: how long another rank is waited for.
        check: compare what is new at its ``first`` use and the rest when the ranks :meth:`settle`;
            or everything ``always``, before it is sent.

    Attributes:
        ranks: of the whole job, by place in the group.
        rank, size: place in the group.
        order_log: where to write down the order of posts and waits; ``None`` for nowhere.
        log_number: of this transport in it.
        before_comparing: called before an operation that is new waits for the other ranks to call
            it too; it finishes what is under way that they may need of this rank.
    """

    def __init__(
        self, group: dist.ProcessGroup, control: dist.ProcessGroup, timeout: timedelta, check: Check
    ) -> None:
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(group))
        self.rank = group.rank()
        self.size = group.size()
        self.timeout = timeout
        self.check = check
        self.order_log: OrderLog | None = None
        self.log_number = 0
        self.before_comparing: Callable[[], None] = lambda: None
        self._control = control
        self._agreed: set[Hashable] = set()
        # What Transport.begin agreed on, so that it is not put together anew: to number and words.
        self._begun: dict[Hashable, tuple[int, Signature]] = {}
        # What is begun is compared later: how many operations, and all of them, below 2^63.
        self._keeps = self.size > 1 and check == "first"
        self._entered = self._digest = 0
        self._kept: deque[Signature] = deque(maxlen=_KEPT)
        # Single messages of HCCL open communicators of their own, in the middle of a forward.
        self._sends = dist.get_backend(control) == "gloo"
        self._sent: deque[Swap] = deque()
        if self._keeps:
            _settle_before_steps()
        self._number, self._world = next(_numbers), dist.group.WORLD
        self._broken: str | None = None
        self._left_over: list[object] = []

    @property
    def broken(self) -> bool:
        """Whether a failure made it useless; :meth:`error` says which."""
        return self._broken is not None

    def expect_unbroken(self) -> None:
        """Raise the :meth:`error` of the failure that made it useless, if one did."""
        if self._broken is not None:
            raise self.error()

    @property
    def under_way(self) -> bool:
        """Whether other ranks may wait for transfers of this one."""
        return False

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
        self.expect_unbroken()
        sizes = sizes or {}
        identity, signature = self._agreed_on(name, {**facts, **sizes}, sizes)
        if self._keeps:
            self._enter(identity, signature)
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
            self.before_comparing()
            self._compare(name, signature)
        if len(self._agreed) >= _MOST_AGREED and kind not in self._agreed:
            # The ranks run the same operations, so that they forget the same.
            self._agreed.clear()
            self._begun.clear()
        self._agreed.add(kind)
        return zlib.crc32(repr(signature).encode()), signature

    def _enter(self, identity: int, signature: Signature) -> None:
        """Write down what is begun, to be compared later."""
        _unsettled.add(self)
        self._entered += 1
        self._digest = (self._digest * 6364136223846793005 + identity) & 0x7FFFFFFFFFFFFFFF
        self._kept.append(signature)
        is_over = not self._entered % _STRETCH
        if not self._sends or not (is_over or len(self._sent) > 1):
            return
        with self._with_others("what was begun"):
            if is_over:
                mine = torch.tensor([self._entered, self._digest])
                peers = (peer for peer in range(self.size) if peer != self.rank)
                theirs = {peer: torch.empty_like(mine) for peer in peers}
                self._sent.append(Swap(mine, theirs, self._control, _DIGESTS))
            # A rank that needs what is under way here may not have sent its digest.
            same = self.under_way or self._same_digests(but=1)
        if not same:
            self._diverged()

    def _same_digests(self, but: int = 0) -> bool:
        """Wait for the other ranks' digests, ``but`` those sent last; whether all are the same."""
        end = time.monotonic() + self.timeout.total_seconds()
        while len(self._sent) > but:
            sent = self._sent.popleft()
            if any(not torch.equal(sent.mine, other) for other in sent.wait(end).values()):
                return False
        return True

    def _remember(self, key: Hashable, agreed: tuple[int, Signature]) -> None:
        if len(self._begun) >= _MOST_BEGUN:
            self._begun.clear()
        self._begun[key] = agreed

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
        self.expect_unbroken()
        if self not in _unsettled:
            return
        state = self._entered, self._digest
        if any(other != state for other in self.share("what was begun", state)):
            self._diverged()
        with self._with_others("what was begun"):
            self._same_digests()
        self._kept.clear()
        _unsettled.discard(self)

    def _diverged(self) -> None:
        """Raise, with the first operation that is not the same on all ranks."""
        with self._with_others("what was begun"):
            difference = self._difference(self.timeout, all_begun=True)
        self.fail(
            difference or "the ranks began different operations, longer ago than they keep them"
        )
        raise self.error(MismatchError)

    def gave_up(self, why: str, *left_over: object) -> TransportError:
        """A wait failed: break the transport, and say so if the ranks differ."""
        difference = None
        if self._keeps and self._broken is None:
            try:
                difference = self._difference(_EXPLAINING, all_begun=False)
            except MissingRankError as error:
                left_over = *left_over, error.left_over
        self.fail(why if difference is None else f"{why}. {difference}", *left_over)
        return self.error(TransportError if difference is None else MismatchError)

    def _difference(self, timeout: timedelta, *, all_begun: bool) -> str | None:
        """The first operation that is another one on another rank, as far as they are kept.

        Args:
            all_begun: whether a rank that began less than another differs from it.
        """
        mine = self._entered - len(self._kept), list(self._kept)
        found = []
        everyone = gather_objects(mine, self._control, timeout, _HISTORIES)
        for peer, theirs in enumerate(everyone):
            start = max(mine[0], theirs[0])
            here, there = (kept[start - first :] for first, kept in (mine, theirs))
            if not all_begun:
                here, there = here[: len(there)], there[: len(here)]
            pairs = zip_longest(here, there, fillvalue=())
            for number, (one, other) in enumerate(pairs, start):
                if one != other:
                    found.append((number, peer, _mismatch(self.rank, one, peer, other)))
                    break
        if not found:
            return None
        number, _, words = min(found)
        return (
            f"{words}. This was operation {number} of the transport, and what came since then is "
            "wrong; call it alike on all ranks"
        )

    def share(self, name: str, value: Any) -> list[Any]:
        """What every rank gives here, in the order of the ranks; small things, by pickle.

        Raises:
            TransportError: a rank did not come in time, or the transport is broken.
        """
        self.expect_unbroken()
        if self.size == 1:
            return [value]
        if self.order_log is not None:
            self.order_log.write("meet", self.log_number, name)
        with self._with_others(name):
            return gather_objects(value, self._control, self.timeout)

    @contextmanager
    def _with_others(self, name: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            left_over = [error.left_over] if isinstance(error, MissingRankError) else []
            self.fail(f"comparing {name} with the other ranks, before step 0: {error}", *left_over)
            raise self.error() from error

    def _compare(self, name: str, signature: Signature) -> None:
        everyone = self.share(name, signature)
        for rank, other in enumerate(everyone):
            if other != signature:
                self.fail(
                    f"{_mismatch(self.rank, signature, rank, other)}. Nothing was sent; call it "
                    "alike on all ranks"
                )
                raise self.error(MismatchError)

    def fail(self, why: str, *left_over: object) -> None:
        """Break the transport: no later operation can be matched with the other ranks' any more."""
        self._left_over += left_over
        _unsettled.discard(self)
        if self._broken is None:
            self._broken = (
                f"rank {self.rank} of {self.size} (global rank {self.ranks[self.rank]}): {why}"
            )
            if self.order_log is not None:
                self.order_log.write("fail", self.log_number, why)

    def error(self, kind: type[TransportError] = TransportError) -> TransportError:
        return kind(f"{self._broken}. This transport cannot be used any more")

    def _closed(self) -> None:
        """Nothing is compared any more."""
        self._broken = self._broken or f"rank {self.rank}: it was closed"
        _unsettled.discard(self)
        if self.order_log is not None:
            self.order_log.write("close", self.log_number)


def _mismatch(rank: int, here: Signature, peer: int, there: Signature) -> str:
    """In what two operations differ."""
    mine, theirs = dict(here), dict(there)
    differing = "; ".join(
        f"{what}: {mine.get(what)} here, {theirs.get(what)} there"
        for what in mine | theirs
        if mine.get(what) != theirs.get(what)
    )
    return (
        f"{(mine or theirs)['operation']}: rank {rank} and peer {peer} of the group do not call "
        f"the same: {differing}"
    )
