"""Checks that the ranks of a group run the same operations, and breaks the transport if not.

Every rank runs the same operations in the same order.  The ranks compare a combination of operation
and options before they send anything of its first use.  Before an optimizer changes weights, they
compare all operations begun, with their sizes.  An error names rank, peer, operation and step.  It
is permanent, because the remaining transfers can no longer be matched.

Each operation begun updates a digest, which the ranks compare before that step.  The last
operations are kept in full, for error messages that show the difference.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import count, zip_longest
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from commfuse_npu.runtime.collectives import device_backend
from commfuse_npu.runtime.gather_objects import MissingRankError, gather_objects
from commfuse_npu.runtime.order_log import OrderLog

__all__ = ["Agreement", "MismatchError", "TransportError"]

Signature = tuple[tuple[str, Hashable], ...]
"""An operation: ``("operation", name)``, then ``(fact, value)`` pairs, equal on all ranks."""

_MOST_AGREED = 4096
"""Most combinations of operation and options that are cached, about 1 KiB each."""

_MOST_BEGUN = 512
"""Most programs that are cached; any other is looked up among the combinations."""

_DIAGNOSIS_TIMEOUT = timedelta(seconds=2)
"""After a failed wait: timeout for the other ranks' operations, to report the first difference."""

_HISTORY_LENGTH = 1024
_HISTORIES = 1
"""Message tag of full lists of operations; other comparisons use tag 0."""

_numbers = count()
_unsettled: set[Agreement] = set()
"""Transports with operations that were not compared with the other ranks yet, or that failed and
are not closed: what keeps an optimizer from stepping."""


@cache
def _check_before_steps() -> None:
    """Register a hook that checks all transports before a step of a ``torch.optim`` optimizer."""

    def check_all(*_: object) -> None:
        # Failures first: a rank that steps after a comparison with this one would step alone.
        for transport in _unsettled:
            transport.expect_unbroken()
        # In the same order on all ranks, or they deadlock.
        for transport in sorted(_unsettled, key=lambda transport: transport._number):
            if transport._world is dist.group.WORLD:
                transport.check_digests()
            else:
                _unsettled.discard(transport)  # its groups were destroyed with the old world

    register_optimizer_step_pre_hook(check_all)


class TransportError(RuntimeError):
    """A transfer failed or timed out.  The transport cannot be used any more.

    Until it is closed, no optimizer of ``torch.optim`` steps on this rank.
    """


class MismatchError(TransportError):
    """The ranks of a group called different operations, or with different shapes or options.

    For a combination that was compared before, it is raised after the operation ran: see
    :meth:`Transport.check_digests`.
    """


class Agreement:
    """The base class of a transport: compares operations between the ranks of one group.

    Args:
        group: the process group of the ranks.
        control: a group of the same ranks for comparisons; a gloo group if there is one.
        timeout: for the answers of other ranks.

    Attributes:
        ranks: global rank of each rank of the group.
        rank, size: rank in the group, and its size.
        control: the group for comparisons.
        order_log: records the order of posts and waits; ``None`` for no record.
        log_number: number of this transport in the order log.
        before_comparing: called before a new operation is compared with the other ranks; it
            finishes transfers in flight that they may still need.
    """

    def __init__(
        self, group: dist.ProcessGroup, control: dist.ProcessGroup, timeout: timedelta
    ) -> None:
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(group))
        self.rank = group.rank()
        self.size = group.size()
        self.timeout = timeout
        self.order_log: OrderLog | None = None
        self.log_number = 0
        self.before_comparing: Callable[[], None] = lambda: None
        self.control = control
        self._agreed: set[Hashable] = set()
        # Cache of Transport.begin: the number and the signature that were agreed on.
        self._begun: dict[Hashable, tuple[int, Signature]] = {}
        # Compared later: the number of operations begun, and their digest, below 2^63.
        self._operation_count = self._digest = 0
        self._history: deque[Signature] = deque(maxlen=_HISTORY_LENGTH)
        _check_before_steps()
        self._number = next(_numbers)
        self._world = dist.group.WORLD
        self._broken: str | None = None
        self._left_over: list[object] = []

    @property
    def broken(self) -> bool:
        """Whether a failure broke the transport; :meth:`error` describes it."""
        return self._broken is not None

    def expect_unbroken(self) -> None:
        """Raise :meth:`error` if the transport is broken."""
        if self._broken is not None:
            raise self.error()

    def agree(
        self, name: str, sizes: Mapping[str, Hashable] | None = None, **facts: Hashable
    ) -> None:
        """Agree with the other ranks on an operation, before anything of it is posted.

        All ranks run the same operations in the same order, so a combination of facts is new on all
        of them at once, and they compare it there.  Different sizes of a known combination do not
        block: they are compared later, see :meth:`check_digests`.

        Args:
            sizes: lengths, which may differ between calls.  Whether a size is 0 counts as a fact.

        Raises:
            MismatchError: another rank calls a different operation.
            TransportError: a rank did not answer in time, or the transport is broken.
        """
        self.expect_unbroken()
        sizes = sizes or {}
        self._enter(*self._agreed_on(name, {**facts, **sizes}, sizes))

    def _agreed_on(
        self, name: str, facts: Mapping[str, Hashable], sizes: Mapping[str, Hashable]
    ) -> tuple[int, Signature]:
        """Compare facts, sizes included, with the other ranks if the combination is new.

        Returns:
            A number that identifies the operation with its facts and sizes, equal on every rank;
            and these facts.
        """
        signature = (("operation", name), *facts.items())
        kind = (
            *signature[:1],
            *((fact, bool(value) if fact in sizes else value) for fact, value in facts.items()),
        )
        if self.size > 1 and kind not in self._agreed:
            self.before_comparing()
            self._compare(name, signature)
        if len(self._agreed) >= _MOST_AGREED and kind not in self._agreed:
            # All ranks run the same operations, so they clear their caches at the same one.
            self._agreed.clear()
            self._begun.clear()
        self._agreed.add(kind)
        return zlib.crc32(repr(signature).encode()), signature

    def _enter(self, identity: int, signature: Signature) -> None:
        """Add an operation to the digest."""
        if self.size == 1:
            return
        _unsettled.add(self)
        self._operation_count += 1
        self._digest = (self._digest * 6364136223846793005 + identity) & 0x7FFFFFFFFFFFFFFF
        self._history.append(signature)

    def _remember(self, key: Hashable, agreed: tuple[int, Signature]) -> None:
        if len(self._begun) >= _MOST_BEGUN:
            self._begun.clear()
        self._begun[key] = agreed

    def check_digests(self) -> None:
        """Compare all operations begun, with their sizes and order; return only if they are equal.

        A hook calls it before every step of an optimizer of ``torch.optim`` or a subclass, which
        includes the inner optimizers of Megatron and MindSpeed, so that it raises before weights
        change.  A loop without such an optimizer calls it at a point that all ranks of the group
        reach.  If no operation has begun since the last call, it does nothing.  So call it on all
        ranks before an optimizer that only some of them step.

        Until then, the effect of sizes that differ between ranks depends on the backend.  On gloo
        the transfers do not match and the wait times out with this error.  On HCCL it is not
        documented, and two operations of equal size in a different order deliver wrong data.

        Raises:
            MismatchError: another rank began a different operation.
            TransportError: a rank did not call it in time, or the transport is broken.
        """
        self.expect_unbroken()
        if self not in _unsettled:
            return
        name = "what was begun"
        advice = ". Step the optimizer, or call check_digests before it, on all ranks of the group"
        state = self._operation_count, self._digest
        if any(other != state for other in self.share(name, state, advice)):
            with self._with_others(name, advice):
                difference = self._difference(self.timeout, all_begun=True)
            self.fail(
                difference or "the ranks diverged earlier than the operations that they still hold"
            )
            raise self.error(MismatchError)
        self._history.clear()
        _unsettled.discard(self)

    def fail_wait(self, why: str, *left_over: object) -> TransportError:
        """After a failed wait: break the transport; the error names a difference between ranks.

        They are compared over gloo only, where a timeout limits it.
        """
        difference = None
        if self._broken is None and device_backend(self.control)[1] == "gloo":
            try:
                difference = self._difference(_DIAGNOSIS_TIMEOUT, all_begun=False)
            except MissingRankError as error:
                left_over = *left_over, error.left_over
        self.fail(why if difference is None else f"{why}. {difference}", *left_over)
        return self.error(TransportError if difference is None else MismatchError)

    def _difference(self, timeout: timedelta, *, all_begun: bool) -> str | None:
        """Describe the first operation, among those kept, that differs on another rank.

        Args:
            all_begun: whether a different number of operations counts as a difference.
        """
        history = self._operation_count - len(self._history), list(self._history)
        differences = []
        everyone = gather_objects(history, self.control, timeout, _HISTORIES)
        for peer, peer_history in enumerate(everyone):
            start = max(history[0], peer_history[0])
            here, there = (calls[start - first :] for first, calls in (history, peer_history))
            if not all_begun:
                here, there = here[: len(there)], there[: len(here)]
            pairs = zip_longest(here, there, fillvalue=())
            for number, (call, other) in enumerate(pairs, start):
                if call != other:
                    differences.append((number, peer, _mismatch(self.rank, call, peer, other)))
                    break
        if not differences:
            return None
        number, _, words = min(differences)
        return (
            f"{words}. This was operation {number} of the transport, and results since then "
            "are wrong; call the same operations on all ranks"
        )

    def share(self, name: str, value: Any, advice: str = "") -> list[Any]:
        """All-gather a small picklable object; returns the values in the order of the ranks.

        Args:
            name: what the ranks compare, for errors.
            advice: the end of the error of a rank that did not call it.

        Raises:
            TransportError: a rank did not call it in time, or the transport is broken.
        """
        self.expect_unbroken()
        if self.size == 1:
            return [value]
        if self.order_log is not None:
            self.order_log.write("meet", self.log_number, name)
        with self._with_others(name, advice):
            return gather_objects(value, self.control, self.timeout)

    @contextmanager
    def _with_others(self, name: str, advice: str = "") -> Iterator[None]:
        """A failed exchange with the other ranks in this block breaks the transport."""
        try:
            yield
        except RuntimeError as error:
            left_over = [error.left_over] if isinstance(error, MissingRankError) else []
            why = f"comparing {name} with the other ranks, before step 0: {error}{advice}"
            self.fail(why, *left_over)
            raise self.error() from error

    def _compare(self, name: str, signature: Signature) -> None:
        """Exchange signatures; raise a MismatchError if another rank's differs."""
        everyone = self.share(name, signature)
        for rank, other in enumerate(everyone):
            if other != signature:
                self.fail(
                    f"{_mismatch(self.rank, signature, rank, other)}. Nothing was sent; "
                    "call the same operation on all ranks"
                )
                raise self.error(MismatchError)

    def fail(self, why: str, *left_over: object) -> None:
        """Break the transport for good; ``left_over`` objects are kept alive with it."""
        self._left_over += left_over
        if self._broken is None:
            _unsettled.add(self)
            self._broken = (
                f"rank {self.rank} of {self.size} (global rank {self.ranks[self.rank]}): {why}"
            )
            if self.order_log is not None:
                self.order_log.write("fail", self.log_number, why)

    def interrupted(self, name: str, error: BaseException, *left_over: object) -> None:
        """Break the transport: the other ranks wait for transfers of an operation that ``error``
        ended on this rank."""
        self.fail(f"{name} was interrupted by {error!r}", *left_over)

    def error(self, kind: type[TransportError] = TransportError) -> TransportError:
        """The exception for a broken transport; the caller raises it."""
        return kind(f"{self._broken}. This transport cannot be used any more")

    def _closed(self) -> None:
        """Mark the transport as closed: nothing is compared any more."""
        self._broken = self._broken or f"rank {self.rank}: it was closed"
        _unsettled.discard(self)
        if self.order_log is not None:
            self.order_log.write("close", self.log_number)


def _mismatch(rank: int, here: Signature, peer: int, there: Signature) -> str:
    """Describe the difference between two operations."""
    own = dict(here)
    other = dict(there)
    differing = "; ".join(
        f"{fact}: {own.get(fact)} here, {other.get(fact)} there"
        for fact in own | other
        if own.get(fact) != other.get(fact)
    )
    return (
        f"{(own or other)['operation']}: rank {rank} and peer {peer} of the group call "
        f"different operations: {differing}"
    )
