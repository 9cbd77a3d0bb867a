"""A measurement: complete on the CPU, interrupted, killed, resumed, with steps that fail."""

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commfuse_npu.tools import ranks as module
from commfuse_npu.tools.config_file import find_config
from commfuse_npu.tools.hardware.description import Hardware
from commfuse_npu.tools.measure import measure_command
from commfuse_npu.tools.measure.measured_launches import (
    FORMS,
    Launches,
    TrainingError,
)
from commfuse_npu.tools.measure.measuring_steps import STEPS, Scale
from commfuse_npu.tools.simulate.simulate_command import main as simulate
from tests.distributed.ranks import forkserver
from tests.limits import LIMIT
from tests.processes import ended, interruptible, wait_for

SMALL = ("--device", "cpu", "--ranks", "2")
HOST = [{"what": "post", "seconds": [1e-6]}]


def times(folder: Path, step: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = steps(folder)[step]["times"]
    return rows


def steps(folder: Path) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = json.loads((folder / "measured.json").read_text())["steps"]
    return results


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    return tmp_path / "measured"


@pytest.fixture
def measure(measured: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``measure(*words, code=0)`` runs the command in the folder; returns what it prints."""

    def run(*words: str, code: int = 0, device: tuple[str, ...] = SMALL) -> str:
        assert measure_command.main([*device, "--folder", str(measured), *words]) == code
        return "".join(capsys.readouterr())

    return run


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the measured sizes small, and the start of ranks fast."""
    scale_of = Scale.of
    monkeypatch.setattr(module, "_context", forkserver)

    def small(*what: Any) -> Scale:
        return replace(scale_of(*what), rows=128, shrink=32, message=1 << 16, calls=3)

    monkeypatch.setattr(Scale, "of", small)


@pytest.mark.usefixtures("tiny")
def test_everything_is_measured_described_and_shown(measured, measure, capsys: Any) -> None:
    names = STEPS.keys() - {"launch"}
    measure("--steps", ",".join(names))
    for name in names:
        rows = times(measured, name)
        assert rows
        assert all(seconds > 0 for row in rows for seconds in row["seconds"]), name
    assert steps(measured)["machine"]["backend"] == "gloo"

    described = measured / "measured.yaml"
    figures = Hardware.load(described).figures
    base = Hardware.load(find_config("cpu_paced", "hardware")).figures
    ours = {name for name, figure in figures.items() if figure.source.startswith("Measured")}
    assert ours >= {"npu.hbm_bandwidth", "inside.rate", "inside.latency", "host.post_overhead"}
    assert all(figures[name] == base[name] for name in figures.keys() - ours)
    options = ["--hardware", str(described), "--model", "llama3_8b", "--tp", "2"]
    assert simulate([*options, "--sequence-length", "4096"]) == 0
    # Bold if it is the fastest, which depends on this machine.
    assert re.search(r"\| (\*\*)?Megatron's order(\*\*)? \| \d", capsys.readouterr().out)

    page = (measured / "measured.md").read_text()
    assert ours == set(re.findall(r"^\| (\w+\.\w+) \|", page, re.MULTILINE))
    # Nothing is left to do.
    before = (measured / "measured.json").stat().st_mtime_ns
    measure("--steps", ",".join(names))
    assert (measured / "measured.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_what_is_finished_is_kept(measured: Path, measure, how: signal.Signals) -> None:
    words = [sys.executable, "-m", "commfuse_npu", "measure", *SMALL, "--folder", str(measured)]
    (scratch := measured.parent / "scratch").mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}
    process = interruptible(words, env=environment, start_new_session=True)
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        stored = measured / "measured.json"
        wait_for(
            lambda: (stored.exists() and "links" in steps(measured)) or process.poll() is not None
        )
        assert any(scratch.glob("commfuse-*"))
        # Two ranks and the resource tracker of multiprocessing.
        children = [int(pid) for pid in listed.read_text().split()]
        assert len(children) >= 3
        # A terminal sends Ctrl-C to the ranks, too.
        (os.killpg if how == signal.SIGINT else os.kill)(process.pid, how)
        printed, err = process.communicate(timeout=LIMIT)
        wait_for(lambda: all(map(ended, children)))
    finally:
        process.kill()
        process.wait()
    assert process.returncode == {signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}[how]
    if how == signal.SIGINT:
        assert not any(scratch.glob("commfuse-*"))
        assert "interrupted; the same command continues" in err
        assert "figures were measured" in printed
        assert (measured / "measured.yaml").exists()
    assert "attention" not in steps(measured)
    assert "links: kept" in measure("--steps", "links")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for the ranks: its answers, and the time limits of the questions."""
    ping = {"what": "half a ping-pong", "seconds": [1e-6]}
    links = [ping, {"what": "messages", "bytes": 1 << 20, "peers": 1, "seconds": [1.0]}]
    machine = {"backend": "gloo", "device": "cpu", "torch": "none"}
    answers = {"machine": machine, "host": HOST, "links": links}

    def ask(method: str, *_: object) -> list[Any]:
        stand_in.limits.append(stand_in.timeout)
        answer = answers[method]
        return [answer() if callable(answer) else answer]

    def started(size: int, *, device: str, timeout: float) -> SimpleNamespace:
        stand_in.timeout = timeout
        return stand_in

    stand_in = SimpleNamespace(answers=answers, limits=[], ask=ask, close=lambda: None)
    monkeypatch.setattr(measure_command, "Ranks", started)
    monkeypatch.setattr(measure_command, "STEPS", {"host": "?", "links": "?"})
    return stand_in


def test_a_description_of_another_npu_is_refused(
    measured: Path, measure, ranks, monkeypatch
) -> None:
    base, name = "ascend_910c_supernode", "Ascend910_9391"
    ranks.answers["machine"]["device name"] = name
    monkeypatch.setattr(measure_command, "STEPS", {"host": "?"})
    monkeypatch.setattr(measure_command, "check_backend", lambda device: None)
    assert f"of them outside the range that {base} assumes: `host." in measure(device=())
    assert "| **below** |" in (measured / "measured.md").read_text()
    described = Hardware.load(measured / "measured.yaml")
    expected = Hardware.load(find_config(base, "hardware"))
    assert described.topologies == expected.topologies
    assert described.figures["inside.rate"] == expected.figures["inside.rate"]
    ranks.answers["machine"]["torch"] = "other"
    monkeypatch.setattr(measure_command, "STEPS", {"links": "?"})
    said = "other conditions: torch 'none' there, 'other' here; choose another"
    assert said in measure(code=2, device=())
    assert "links" not in steps(measured)


def test_ranks_have_the_environment_of_the_launch(measured, measure, ranks, monkeypatch) -> None:
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "1")
    planned = Launches({}, measured, {"TASK_QUEUE_ENABLE": "2"})
    monkeypatch.setattr(measure_command, "launches", lambda *_: planned)
    monkeypatch.setattr(measure_command, "check_backend", lambda device: None)
    ranks.answers["host"] = lambda: HOST * int(os.environ["TASK_QUEUE_ENABLE"])
    monkeypatch.setattr(measure_command, "STEPS", {"host": "?", "launch": "?"})
    measure("--launch", "launch.sh", device=())
    assert len(times(measured, "host")) == 2


def test_a_step_without_sense_is_measured_again(measured, measure, ranks) -> None:
    links = ranks.answers.pop("links")
    printed = measure(code=1)
    assert "links: failed: KeyError: 'links'" in printed
    assert "**Not measured**: links." in printed
    assert ranks.limits[1:] == [900] * 2
    assert "Traceback" in steps(measured)["links"]["failed"]
    ranks.answers["links"] = links
    ranks.answers["host"] = HOST * 2
    measure("--timeout", "70")
    assert ranks.limits[-1] == 70
    assert times(measured, "host") == HOST
    assert times(measured, "links") == links


def test_a_question_has_what_is_left_of_the_minutes(measure, ranks, monkeypatch) -> None:
    clock = count(0.0, 20.0)
    monkeypatch.setattr(measure_command.time, "monotonic", lambda: next(clock))
    measure("--minutes", "5")
    # The ranks start at 40 s; host and links are asked at 60 s and 120 s.
    assert ranks.limits == [260, 240, 180]


@pytest.mark.usefixtures("ranks")
def test_results_that_were_changed_are_named(measured: Path, measure) -> None:
    measure()
    content = json.loads((measured / "measured.json").read_text())
    content["steps"]["links"]["times"][-1]["seconds"] = [0.0]
    (measured / "measured.json").write_text(json.dumps(content))
    (line,) = [line for line in measure(code=2).splitlines() if "error" in line]
    assert f"{measured}/measured.json has results that cannot be evaluated: ZeroDiv" in line
    assert line.endswith("; remove it, or choose another --folder")


# ------------------------------------------------------------------- launches


def test_a_launch_ends_in_a_verdict_and_a_page(tmp_path, measured, measure, monkeypatch) -> None:
    """Four forms; ``ends`` says which ones fail, and how."""
    names = [f"launch_{form}" for form in ("megatron", "fb_overlap", "commfuse", "plain")]
    started = list[str]()

    def measured_as(
        line: str = "launch.sh", code: int = 0, minutes: str = "50", **ends: BaseException
    ) -> str:
        def train(name: str, *_: object) -> dict[str, Any]:
            form = name.removeprefix("launch_")
            started.append(form)
            if form in ends:
                raise ends[form]
            numbers = [1.0 + i for i in range(10)]
            return {"losses": numbers, "milliseconds": numbers, "peak": None, "weights": "a" * 64}

        monkeypatch.setattr(measure_command, "train", train)
        words = ["--steps", "launch", "--launch", line, "--minutes", minutes]
        return measure(*words, code=code, device=())

    def rows() -> list[str]:
        page = (measured / "measured.md").read_text()
        return re.findall(r"^\| (\S.*?) \| .* \| `aaaaaaaa` \|$", page, re.MULTILINE)

    planned = Launches({name: [] for name in names}, tmp_path, {})
    monkeypatch.setattr(measure_command, "launches", lambda *_: planned)
    monkeypatch.setattr(measure_command, "check_backend", lambda device: None)
    why = TrainingError("exit code 1 (x.log)\nOSError: liblcal.so")
    printed = measured_as(code=1, plain=why)
    assert "blocking collectives: failed: exit code 1 (x.log) OSError: liblcal.so" in printed
    assert "**Could not run**: blocking collectives: exit code 1 (x.log); `OSError: lib" in printed
    assert "## launch, blocking collectives: failed" in (measured / "measured.md").read_text()
    assert not (measured / "measured.yaml").exists()

    left_out = "blocking collectives: failed: left out, 1e-06 minutes are over"
    assert left_out in measured_as(code=1, minutes="1e-6")
    printed = measured_as()
    assert started == ["megatron", "fb_overlap", "commfuse", "plain", "plain"]
    assert "launch, Megatron's order: kept" in printed
    assert "**The same weights, bit for bit**: Megatron's order;" in printed
    titles = [FORMS[name].name for name in names]
    assert rows() == titles
    # Another launch is trained again, and results of the first one are not mixed with it.
    measured_as("launch.sh --num-layers 4", code=130, fb_overlap=KeyboardInterrupt())
    assert rows() == titles[:1]
