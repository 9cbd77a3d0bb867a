"""Ranks start with megatron-core imported; the import takes longer than most of these tests."""

import multiprocessing

import pytest

_context = multiprocessing.get_context("forkserver")
# After tests/distributed/ranks.py, which names torch, and before the first rank is forked.
_context.set_forkserver_preload(
    ["torch", "torch.distributed", "scripts.cpu_pretraining.training_worker"]
)


@pytest.fixture(scope="session", autouse=True)
def _imported() -> None:
    """Imports once, so that no rank spends a test's time limit on the imports."""
    process = _context.Process(target=int)
    process.start()
    process.join()
