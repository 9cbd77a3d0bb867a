"""Groups of gloo processes, and the number of random cases."""

from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from tests.distributed.ranks import Ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--random-cases", type=int, metavar="N",
        help="compare N random cases per test of random cases, instead of its few",
    )  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """``ranks(n)``: a group of n processes, shared by the tests of a module.

    The processes end with the module: each process group has a gloo thread that polls a hundred
    times a second, and the threads of a few modules would keep a core busy.
    """
    groups: dict[int, Ranks] = {}

    def of_size(size: int) -> Ranks:
        return groups.setdefault(size, Ranks(size))

    yield of_size
    for group in groups.values():
        group.kill()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
