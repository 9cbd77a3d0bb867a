"""Order logs of real ranks are proved correct; for a run that hangs the fault is named."""

import json
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings

from commfuse_npu import Schedule, Transport, TransportError
from commfuse_npu.ops import LinearOptions, all_gather_linear
from commfuse_npu.plan.instructions import Post
from commfuse_npu.plan.rules import Rule
from commfuse_npu.runtime.order_log import OrderLog
from commfuse_npu.tools.order_log.verify_log import verify_logs
from tests.distributed.programs import watch_calls
from tests.limits import BRIEF, PATIENT
from tests.random_networks.case import LANES, Case, one_layer
from tests.random_networks.compare import quiet, run_case
from tests.random_networks.strategy import cases

Link = Callable[..., Transport]
"""``link(group)`` creates a transport that is recorded."""


def record(rank: int, folder: str, call: Callable[..., Any], *given: Any) -> Any:
    """Call ``call(rank, link, *given)``, with an order log in ``folder``."""
    log, made = OrderLog(Path(folder), rank, dist.get_world_size()), list[Transport]()

    def link(group: Any = None) -> Transport:
        options = {"lanes": LANES, "timeout": PATIENT, "order_log": log}
        made.append(Transport.create(group, **options))
        return made[-1]

    result = call(rank, link, *given)
    for transport in made:
        transport.close()
    log.close()
    return result


def drawn(size: int, many: int) -> list[Case]:
    """Random networks and buckets; every rank waits for the buckets in its own order.

    The first case uses another lane than the first, which no random one may do on two ranks.
    """
    between_nodes = Schedule("two_level", lanes=2, node_size=1)
    examples: list[Case] = [one_layer("all_gather_linear", size, schedule=between_nodes)]
    given(case=cases(size))(
        settings(
            max_examples=many, derandomize=True, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),  # of the speed of the machine
        )(lambda case: examples.append(case))
    )()  # fmt: skip
    return examples


def of_cases(rank: int, link: Link, cases: list[Case]) -> None:
    """Run the cases; torch.distributed gets the posts of their programs and no others."""
    transport, posted, planned = link(), Counter[Any](), Counter[Any]()

    def batch(operations: list[dist.P2POp]) -> None:
        for p2p in operations:
            posted[transport.lane_groups.index(p2p.group), p2p.peer] += 1

    def begun(to: Transport, rule: Rule, _: str, __: object, schedule: Schedule, *___: Any) -> None:
        for post in rule.program(to.spec(schedule)).posts:
            for way, (transfer, _) in post.ends if isinstance(post, Post) else ():
                peer = transfer.target if way == "send" else transfer.source
                planned[transfer.lane, peer] += 1

    with quiet(), pytest.MonkeyPatch.context() as patch:
        watch_calls(patch, dist, "batch_isend_irecv", batch)
        watch_calls(patch, Transport, "begin", begun)
        for case in cases:
            run_case(case, "fused", transport)
    assert posted == planned
    assert len(posted) > transport.size - 1, "on several lanes"


@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.long) for n in (3, 4))])
def test_recorded_runs_are_proved(ranks, tmp_path, size: int) -> None:
    ranks(size).run(record, str(tmp_path), of_cases, drawn(size, 40))
    result = verify_logs([tmp_path])
    assert (result.faults, result.notes) == ([], [])
    assert result.operations >= 40 * size
    assert result.messages > 0


def gather(made: Transport) -> list[list[float]]:
    shard, options = torch.full((1, 2), float(made.rank)), LinearOptions(Schedule(lanes=2))
    gathered = all_gather_linear(shard, torch.eye(2), group=made, options=options)
    return gathered.tolist()


def hangs(rank: int, link: Link) -> None:
    """Rank 1 skips an operation, and rank 0 times out in its wait."""
    transport = link()
    gather(transport)
    if rank == 1:
        transport.order_log = None
        return
    transport.timeout = BRIEF
    with pytest.raises(TransportError):
        gather(transport)


def test_a_run_that_failed_says_who_waits_for_whom(ranks, tmp_path) -> None:
    ranks(2).run(record, str(tmp_path), hangs)
    result = verify_logs([tmp_path])
    assert any("a transport of rank 0 broke" in note for note in result.notes)
    assert re.search("deadlock.*rank 0 waits .*rank 1 has nothing more to do", result.faults[0])
    assert "rank 1 lacks operation 1 (all_gather_linear)" in "".join(result.faults)


def test_slots_and_threads_of_a_log(tmp_path: Path) -> None:
    """A free slot is used again; lines name their thread where it changes, and back again."""
    log = OrderLog(tmp_path, 0, 1)
    for _ in range(2):
        collective = log.collective(log.transport([0]), "all_reduce", "sum", 4, "fp32")
        with ThreadPoolExecutor(1) as other:
            other.submit(collective, "await").result()
    log.close()
    thread, done = 0, []
    for verb, *more in map(json.loads, log.path.read_text().splitlines()):
        thread = more[0] if verb == "thread" else thread
        if verb in ("issue", "await"):
            done.append((verb, more[0], thread > 0))
    assert done == [("issue", 0, False), ("await", 0, True)] * 2


def gathers(rank: int, link: Link) -> list[list[float]]:
    return gather(link())


def test_a_full_disk_ends_the_recording_and_not_the_job(ranks, tmp_path, caplog) -> None:
    for rank in range(2):  # writes to it fail
        (tmp_path / f"rank_{rank:05d}.jsonl").symlink_to("/dev/full")
    OrderLog(tmp_path, 0, 1).write("fail", 0, "another line")
    (warning,) = (r.message for r in caplog.records if "not recorded any more" in r.message)
    assert warning.startswith(f"{tmp_path}/rank_00000.jsonl: [Errno 28] No space left on device")
    gathered = ranks(2).run(record, str(tmp_path), gathers)
    assert gathered == [[[0.0, 0.0], [1.0, 1.0]]] * 2
