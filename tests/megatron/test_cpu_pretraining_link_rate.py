"""`--link-rate`: connections have the rate while the training lasts, or there is an error."""

from __future__ import annotations

import contextlib
import io
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu.tools.bench import wire
from scripts.cpu_pretraining import __main__ as command
from scripts.cpu_pretraining import link_rate
from scripts.cpu_pretraining.arguments import parse_arguments
from scripts.cpu_pretraining.data import Corpus, load_corpus
from scripts.cpu_pretraining.interrupt import StopRequest
from scripts.cpu_pretraining.speed import Speed, speed_of
from scripts.cpu_pretraining.usage_error import UsageError
from tests.megatron.in_ranks import TINY, megatron

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's option")

OPTIONS = (
    f"{TINY} --num-layers 1 --global-batch-size 2 --train-iters 5 --eval-interval 0 --data-path "
    f"{Path(wire.__file__).parent}"
)
RATE = 300_000_000


def parse(options: str, world_size: int | None = None) -> Any:
    return parse_arguments([*OPTIONS.split(), *options.split()], world_size=world_size)


def test_no_rate_unless_asked_for() -> None:
    assert parse("").link_rate is None
    assert parse("--link-rate 0.5").link_rate == 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--link-rate 0", r"--link-rate: 0 MB/s is not in \[0.001, 100000\]; give 50, .+ or leave"),
        ("--link-rate -5", r"-5 MB/s is not in \[0.001, 100000\]"),
        ("--link-rate nan", r"nan MB/s is not in \[0.001, 100000\]"),
        ("--link-rate inf", r"inf MB/s is not in \[0.001, 100000\]"),
        ("--link-rate fast", r"invalid number of megabytes per second value: 'fast'"),
        (
            "--link-rate 50 --tensor-model-parallel-size 1",
            "--link-rate 50 needs links, but there is 1 process; choose --tensor-model-parallel-si",
        ),
        (
            "--link-rate 50 --compare --train-iters 3",
            "after 3 warm-up iterations, but --train-iters is 3; choose --train-iters 4 or more",
        ),
    ],
)
def test_errors_name_value_limit_and_way_out(options: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(options)


def test_speed_leaves_the_first_iterations_out() -> None:
    times = [9000.0, 8000.0, 7000.0, 500.0, 100.0, 200.0]
    entries = [
        {"iteration": number, "elapsed_ms": time, "exposed_ms": time / 2}
        for number, time in enumerate(times, start=11)
    ]
    found = speed_of(entries, tokens=100, link_rate=20.0)
    assert found is not None
    assert found.quartiles == pytest.approx((0.15, 0.35))
    assert replace(found, quartiles=(0, 0)) == Speed(0.2, (0, 0), 0.1, 100, 14, 16, 20.0)
    assert found.tokens_per_second == 500
    assert str(found).startswith(
        "500 over links of 20 MB/s (0.200 s per iteration, quartiles 0.150 "
    )
    assert speed_of(entries[:3], tokens=100, link_rate=None) is None
    alone = speed_of(entries[:4], tokens=100, link_rate=None)
    assert alone is not None
    assert alone.quartiles == (0.5, 0.5)


@pytest.mark.parametrize("last", [12, 13])
def test_a_ratio_has_a_range_and_ten_iterations_behind_it(last: int) -> None:
    from scripts.cpu_pretraining.compare import _speeds
    from scripts.cpu_pretraining.training import Outcome

    fused = Speed(1.0, (0.8, 1.25), 0.1, 100, first=4, last=last, link_rate=None)
    other = replace(fused, seconds=2.0, quartiles=(1.5, 2.4))
    speeds = {"plain": other, "commfuse": fused, "megatron": other}
    lines = _speeds({mode: Outcome(speed=speed) for mode, speed in speeds.items()})
    if last == 12:
        assert lines[3:] == [
            "no ratio of tokens/s from 9 iterations: give --train-iters 13 or more"
        ]
    else:
        ratio = "2.000 (1.200 to 3.000 by the quartiles of 10 iterations)"
        assert lines[3:] == [
            f"tokens/s, commfuse / {mode}: {ratio}" for mode in ("plain", "megatron")
        ]


def test_a_refused_rate_ends_the_command_as_a_wrong_request(monkeypatch, capsys) -> None:
    def refused(*_: Any) -> int:
        raise UsageError("the reason")

    monkeypatch.setattr(command, "_checked_request", lambda _: (None, None, None))
    monkeypatch.setattr(command, "_run", refused)
    with pytest.raises(SystemExit) as ended:
        command.main([])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "cpu_pretraining: error: the reason\n"


def rates() -> set[int]:
    """What the kernel says about this process's connections."""
    found = set()
    for one in wire.connected_sockets():
        with one:
            option = one.getsockopt(socket.SOL_SOCKET, wire._SO_MAX_PACING_RATE, 8)
            found.add(int.from_bytes(option, sys.byteorder))
    return found


def request(options: str) -> tuple[Any, Corpus]:
    args = parse(options, dist.get_world_size())
    return args, load_corpus(args.data_path, valid_fraction=0.05, seq_length=32, need_valid=False)


def rates_while_training(rank: int, folder: Path, options: str) -> list[set[int]]:
    """Rates before each iteration and after the training; one connection comes during the first."""
    from scripts.cpu_pretraining import training

    found, late = [], contextlib.ExitStack()
    iterate = training._Loop._iteration

    def watched(loop: Any, stop: Any) -> Any:
        found.append(rates())
        if loop.iteration == 0:
            server = late.enter_context(socket.create_server(("127.0.0.1", 0)))
            late.enter_context(socket.create_connection(server.getsockname()))
        return iterate(loop, stop)

    with late, mock.patch.object(training._Loop, "_iteration", watched), megatron(2):
        training.train(
            *request(options),
            mode="commfuse",
            folder=folder,
            stop=StopRequest(),
            checkpoints=False,
        )
        found.append(rates())
    return found


@linux_only
def test_every_connection_has_the_rate_while_training_and_loses_it(ranks, tmp_path: Path) -> None:
    two = "--train-iters 2"
    for found in ranks(2).run(rates_while_training, tmp_path, f"{two} --link-rate 300"):
        assert found == [{RATE}, {RATE}, {wire.UNLIMITED}]
    for found in ranks(2).run(rates_while_training, tmp_path, two):
        assert found == [{wire.UNLIMITED}] * 3


def refused_on_rank_one(rank: int, when: str) -> tuple[str, set[int], int]:
    """The error, the rates that are left, and how often the training was entered."""
    entered = 0
    with contextlib.ExitStack() as patches:

        def refuse() -> None:
            if rank == 1:
                patches.enter_context(mock.patch.object(socket, "TCP_CONGESTION", 9999))

        if when == "before":
            refuse()
        try:
            with link_rate.paced_links(300.0) as pace_again:
                entered += 1
                refuse()
                pace_again()
        except UsageError as error:
            message = str(error)
        else:
            message = ""
    dist.barrier()  # Nobody is left behind in a collective.
    left = rates()
    wire.pace(None)  # On rank 1, where taking the rate away was refused as well.
    return message, left, entered


@linux_only
@pytest.mark.parametrize("when", ["before", "after the first iteration"])
def test_a_refusal_on_one_rank_is_an_error_on_all(ranks, when: str) -> None:
    outcomes = ranks(2).run(refused_on_rank_one, when)
    assert outcomes[0][1] == {wire.UNLIMITED}
    for message, _, entered in outcomes:
        assert message.startswith(
            "--link-rate 300 cannot be set on rank 1: the kernel refuses SO_MAX_PACING_RATE or reno"
        )
        assert "; leave --link-rate out" in message
        assert entered == (when != "before")


def compared(rank: int, folder: Path) -> tuple[int, str]:
    from scripts.cpu_pretraining.compare import compare

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), megatron(2):
        code = compare(*request("--compare --link-rate 300"), folder, StopRequest())
    return code, printed.getvalue()


@linux_only
def test_compare_over_links_says_speeds_ratios_and_identical(ranks, tmp_path: Path) -> None:
    code, printed = ranks(2).run(compared, tmp_path)[0]
    lines = printed.splitlines()
    assert code == 0, printed
    assert lines[-1] == "identical: True"
    for mode in ("plain", "commfuse", "megatron"):
        (line,) = [line for line in lines if line.startswith(f"tokens/s, {mode}: ")]
        assert " over links of 300 MB/s (" in line
        assert line.endswith("; medians of iterations 4 to 5)")
    # Two iterations after the warm-up say nothing about a ratio.
    assert "no ratio of tokens/s from 2 iterations: give --train-iters 13 or more" in lines
    assert not any(" / " in line for line in lines)
    assert f"written: {tmp_path}/compare/plain/metrics.jsonl" in printed
    assert sum(" connections of rank 0 at 300 MB/s" in line for line in lines) == 3
    assert any("the bytes of an all-reduce" in line for line in lines)
