"""The benchmark with one rank alone: every form of it, and what is measured of whom."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commfuse_npu.tools import cli
from commfuse_npu.tools.bench import sweep
from commfuse_npu.tools.bench.shapes import Shape
from commfuse_npu.tools.bench.variants import Variant, chosen
from commfuse_npu.tools.bench.worker import Worker
from commfuse_npu.tools.one_device.backend import register
from commfuse_npu.tools.one_device.device_streams import DeviceStreams
from commfuse_npu.tools.one_device.recording import Recording
from tests.distributed.ranks import Ranks
from tests.limits import LIMIT
from tests.one_device.race_detector import Module, RaceDetector

_FORMS = "collective,coc-2,slices-2,ring,megatron*,ours-c2"

_workers: list[Worker] = []


def asked(rank: int, method: str, args: tuple[Any, ...], whom: tuple[int, ...]) -> Any:
    worker = the_worker()
    if rank not in whom:
        return None
    if method == "check":  # the profiler that takes the memory needs seconds to start
        return worker.check(*args, memory=False)
    return getattr(worker, method)(*args)


def the_worker() -> Worker:
    if not _workers:
        _workers.append(Worker())
    return _workers[0]


def test_forms_are_timed_on_rank_0_alone(
    tmp_path: Path, capsys: Any, monkeypatch: Any, ranks: Callable[[int], Ranks]
) -> None:
    group, methods = ranks(2), []

    @contextmanager
    def borrowed(size: int, *, one_device: bool, **_: object) -> Iterator[SimpleNamespace]:
        assert one_device

        def ask(method: str, *args: Any) -> list[Any]:
            methods.append(method)
            return group.run(asked, method, args, (0, 1), timeout=LIMIT)

        def ask_first(method: str, *args: Any) -> Any:
            methods.append(f"{method} alone")
            return group.run(asked, method, args, (0,), timeout=LIMIT)[0]

        yield SimpleNamespace(ask=ask, ask_first=ask_first)

    monkeypatch.setattr(sweep, "Ranks", borrowed)
    monkeypatch.setattr(sweep, "_QUIET_TRIES", 0)
    written = tmp_path / "bench.json"
    words = ["bench", "--links", "one-device", "--ranks", "2", "--works", "layer", "--rounds", "1"]
    words += ["--scale", "64", "--sequence", "64", "--ratios", "0,1", "--json", str(written)]
    assert cli.main([*words, "--variants", f"{_FORMS},auto"]) == 0
    report = json.loads(written.read_text())
    found = [(row["ratio"], row["variant"]) for row in report["results"]]
    forms = ["p2p", "collective", "coc-2", "slices-2", "ring", "megatron", "megatron-p2p",
             "ours-c2"]  # fmt: skip
    assert found == [(ratio, form) for ratio in (0.0, 1.0) for form in forms]
    assert (
        "auto tries schedules out with all ranks: not on one device" in report["machine"]["notes"]
    )
    # The computation, the communication, and each form.
    assert methods.count("record") == 2 + len(forms)
    # Nothing is timed before rank 0 ran everything on its own.
    assert "record" not in methods[methods.index("round alone") :]
    assert "round" not in methods
    assert "of ours" in capsys.readouterr().out


def set_up(work: str) -> Worker:
    worker = the_worker()
    worker.set_up(work, Shape(96, 48, 96, 6, 6, 8), "fp32", 0, None)
    return worker


def tried(rank: int, spoiled: bool) -> int:
    """How many bytes of what was sent are kept for later runs."""
    worker, variant = set_up("mlp"), Variant("p2p", "blocking")

    def spoil(recording: Recording) -> None:
        rewind(recording)
        first = next(iter(recording._posted.values()))[0]
        first.received = [tensor + 1 for tensor in first.received]

    rewind = Recording.rewind
    with pytest.MonkeyPatch.context() as patch:
        if spoiled:
            patch.setattr(Recording, "rewind", spoil)
        worker.record(variant)
    kept = worker._recordings[variant]._posted.values() if rank == 0 else ()
    return sum(tensor.nbytes for posted in kept for one in posted for tensor in one.sent)


def test_rank_0_tries_what_it_recorded(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(tried, False) == [0, 0]
    alone, other = ranks(2).outcomes(tried, True)
    assert "p2p: what rank 0 computes alone is not what it computed" in str(alone.error)
    assert other.error is None


def races(rank: int, patterns: str) -> set[str]:
    worker, device, module = set_up("layer"), register("cpu"), Module()
    found = set()
    for variant in chosen(patterns.split(","), worker.size):
        call = worker._call(variant)
        call()  # what is agreed on once is, by all ranks
        with device.recording() as recording:
            call()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "get_device_module", lambda device_type: module)
            patch.setattr(device, "streams", DeviceStreams("cuda"))
            with RaceDetector(module) as detector, device.replaying(recording, seed=rank):
                call()
        found |= {f"{variant.name}: {race}" for race in detector.races}
    return found


def test_events_order_what_each_form_does(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(3).run(races, _FORMS, timeout=LIMIT) == [set()] * 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "cuda", "--sleep-gemm", "60"], "--sleep-gemm is for CPUs"),
        (["--device", "npu"], "--links one-device holds streams as CUDA can"),
    ],
)
def test_what_is_refused(words: list[str], said: str, capsys: Any) -> None:
    assert cli.main(["bench", "--links", "one-device", *words]) == 2
    assert said in capsys.readouterr().err
