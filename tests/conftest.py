"""Fixtures: groups of gloo processes, random cases.  Also marks long tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from tests.distributed.ranks import Ranks

_MOST_RANKS = {
    "test_accuracy": 3,
    "test_buckets": 3,
    "test_streams": 3,
}
"""Largest group size in the short tier: 2 ranks, or 3 for tests of the order of additions.

Three ranks show every effect of the order that four show.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--random-cases", type=int, metavar="N",
        help="compare N random cases per test of random cases, instead of its few",
    )  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep one group size of each test in the short tier; mark the others as long."""
    sizes: defaultdict[str, set[int]] = defaultdict(set)
    sized = {
        item: item.callspec.params["size"]
        for item in items
        if item.path.parent.name in ("distributed", "late_transfers")
        and "size" in getattr(getattr(item, "callspec", None), "params", {})
    }
    for item, size in sized.items():
        sizes[f"{item.path}::{item.originalname}"].add(size)
    for item, size in sized.items():
        most = _MOST_RANKS.get(item.path.stem, 2)
        short = [count for count in sizes[f"{item.path}::{item.originalname}"] if count <= most]
        if size != max(short, default=None):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="module")
def kind_of_ranks() -> type[Ranks]:
    """The class that :func:`ranks` creates; test folders may override it."""
    return Ranks


@pytest.fixture(scope="module")
def ranks(kind_of_ranks: type[Ranks]) -> Iterator[Callable[[int], Ranks]]:
    """``ranks(n)``: a group of n processes, shared by the tests of a module.

    The processes end with the module: each process group has a gloo thread that polls a hundred
    times a second, and the threads of a few modules would keep a core busy.
    """
    groups: dict[int, Ranks] = {}

    def of_size(size: int) -> Ranks:
        return groups.setdefault(size, kind_of_ranks(size))

    yield of_size
    for group in groups.values():
        group.kill()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def random_cases(
    ranks: Callable[[int], Ranks], request: pytest.FixtureRequest
) -> Callable[..., None]:
    """``random_cases(size, cases, compare)`` asserts that all cases pass on ``size`` ranks.

    They are the same in every run; ``--hypothesis-seed`` draws others.
    """
    from tests.random_networks.campaign import campaign

    def compared(size: int, cases: int, compare: Callable[..., list[str]]) -> None:
        option = request.config.getoption
        seed = f"{option('--hypothesis-seed')} {request.node.nodeid}"
        campaign(ranks(size), option("--random-cases") or cases, seed, compare)

    return compared
