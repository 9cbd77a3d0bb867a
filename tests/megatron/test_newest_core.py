"""Trainings on the newest Megatron core, which needs Python 3.12, in an environment of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import LIMIT
from tests.megatron.cores import KINDS

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = Path(f"{sys.prefix}-core")
"""Environment that scripts/environment.sh creates beside that of the tests."""
SHORT = "TP 2, SP, recomputed, dropout", "EP 2, recomputed, distributed optimizer"


def ran(*kinds: str) -> list[tuple[int, ...]]:
    """Pairs, recomputations ahead and weight gradients of trainings whose bits were the same."""
    command = [str(ENVIRONMENT / "bin/python"), "-m", "tests.megatron.cores", *kinds]
    settings = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"same bits, (\d+) pairs, (\d+) ahead, (\d+) weight", done.stdout)
    assert len(found) == len(kinds), done.stdout
    return [tuple(map(int, numbers)) for numbers in found]


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    lacking = [
        path for path in (".installed-core", "bin/python") if not (ENVIRONMENT / path).exists()
    ]
    if lacking:
        install = "`bash scripts/test.sh` creates it if it finds python3.12"
        pytest.skip(f"{ENVIRONMENT / lacking[0]} is missing; {install}")


def test_the_newest_core_trains_with_its_own_bits() -> None:
    for numbers in ran(*SHORT):
        assert all(numbers)


@pytest.mark.long
def test_all_kinds_train_with_the_newest_cores_own_bits() -> None:
    for pairs, _, _ in ran(*KINDS.keys() - set(SHORT)):
        assert pairs
