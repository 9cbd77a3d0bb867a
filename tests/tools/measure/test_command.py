"""A measurement on the CPU, whole, interrupted, killed, and with a step that hangs."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commfuse_npu.config_file import find_config
from commfuse_npu.hardware.description import Hardware
from commfuse_npu.tools.measure import command, folder
from commfuse_npu.tools.measure.forms import Launches
from commfuse_npu.tools.measure.layer import layer_times
from commfuse_npu.tools.measure.steps import STEPS, Ask, Scale, Step
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.ranks import RanksError
from commfuse_npu.tools.simulate.command import main as simulate
from tests.limits import PATIENT

LIMIT = PATIENT.total_seconds()

SMALL = ("--device", "cpu", "--ranks", "2")


def times(folder: Path, step: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / f"{step}.json").read_text())["times"]
    return found


def test_everything_is_measured_described_and_shown(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "measured"
    words = [*SMALL, "--folder", str(folder)]
    names = [name for name, step in STEPS.items() if step.ask is not None]
    assert command.main([*words, "--steps", ",".join(names)]) == 0
    for name in names:
        found = times(folder, name)
        assert found
        assert all(seconds > 0 for one in found for seconds in one["seconds"]), name
    machine = json.loads((folder / "machine.json").read_text())
    assert machine["backend"] == "gloo"

    described = folder / "measured.yaml"
    figures = Hardware.load(described).figures
    base = Hardware.load(find_config("cpu_paced", "hardware")).figures
    measured = {name for name, figure in figures.items() if figure.source.startswith("Measured")}
    assert measured >= {"npu.cube_flops", "npu.half_rows", "npu.hbm_bandwidth", "inside.rate",
                        "inside.latency", "host.post_overhead"}  # fmt: skip
    assert all(figures[name] == base[name] for name in figures.keys() - measured)
    options = ["--hardware", str(described), "--model", "llama3_8b", "--tp", "2"]
    assert simulate([*options, "--sequence-lengths", "4096"]) == 0
    assert "Megatron" in capsys.readouterr().out

    page = (folder / "measured.md").read_text()
    assert measured == set(re.findall(r"^\| (\w+\.\w+) \|", page, re.MULTILINE))
    # Nothing is left to do.
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.json")}
    assert command.main([*words, "--steps", ",".join(names), "--resume"]) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*.json")} == before


def test_one_device_answers_what_needs_no_peer(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "measured"
    words = [*SMALL, "--one-device", "--folder", str(folder), "--steps", "links,gemms,memory"]
    assert command.main(words) == 0
    assert "left out, they need the other ranks: links" in capsys.readouterr().out
    assert {path.stem for path in folder.glob("*.json")} == {"run", "machine", "gemms", "memory"}
    hardware = Hardware.load(folder / "measured.yaml")
    assert hardware.name == "one of 2 ranks on cpu, measured"
    # The shapes are those of a rank of two.
    assert {one["outputs"] for one in times(folder, "gemms") if one["layer"] == "fc1"} == {1792}


def test_one_device_trains_no_launch(tmp_path: Path, capsys: Any) -> None:
    words = ["--folder", str(tmp_path / "new"), "--launch", "train.sh"]
    assert command.main(["--one-device", *words]) == 2
    assert "--launch trains on all ranks" in capsys.readouterr().err


@pytest.mark.long
def test_layers_are_measured_and_the_best_named(tmp_path: Path) -> None:
    words = [*SMALL, "--folder", str(tmp_path / "measured"), "--steps", "host,layer"]
    assert command.main(words) == 0
    forms = {one["form"] for one in times(tmp_path / "measured", "layer")}
    assert forms >= {"collective", "megatron", "coc-4", "auto"}
    page = (tmp_path / "measured" / "measured.md").read_text()
    assert "Best of ours" in page or "Nothing can be concluded" in page


def test_layers_that_take_too_long_are_given_up() -> None:
    scale = Scale.of(ModelConfig.load(find_config("llama3_8b")), 2, "cpu")
    with pytest.raises(RanksError, match="bench did not end within 0 s"):
        layer_times(scale, "llama3_8b", "cpu", 0.1)


def test_layers_that_fail_say_why() -> None:
    scale = Scale.of(ModelConfig.load(find_config("llama3_8b")), 2, "cpu")
    with pytest.raises(RanksError, match=r"--config nowhere .*'nowhere' is neither a file nor one"):
        layer_times(scale, "nowhere", "cpu", LIMIT)


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A measurement in a process of its own, when its first step is over."""
    folder = tmp_path / "measured"
    words = [sys.executable, "-m", "commfuse_npu", "measure", *SMALL, "--folder", str(folder)]
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Who runs the tests in the background may have it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        end = time.monotonic() + LIMIT
        while not (folder / "links.json").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.01)
        yield process
    finally:
        process.kill()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_what_is_finished_is_kept(
    tmp_path: Path, begun: subprocess.Popen[str], how: signal.Signals, capsys: Any
) -> None:
    folder = tmp_path / "measured"
    begun.send_signal(how)
    printed, said = begun.communicate(timeout=LIMIT)
    if how == signal.SIGINT:
        assert begun.returncode == 130
        assert "finished steps are kept" in said
        assert "Continue with: commfuse-npu measure --resume" in printed
        assert (folder / "measured.yaml").exists()
    links = times(folder, "links")
    assert not (folder / "attention.json").exists()

    go_on = [*SMALL, "--folder", str(folder), "--resume"]
    assert command.main([*go_on, "--steps", "links,host"]) == 0
    assert "links: kept" in capsys.readouterr().out
    assert times(folder, "links") == links
    assert times(folder, "host")


class Sleepy:
    """A worker whose second question takes for ever."""

    def machine(self) -> dict[str, Any]:
        return {"backend": "gloo", "device": "cpu", "torch": "none"}

    def latency(self, seconds: float) -> list[float]:
        time.sleep(seconds)
        return [1e-6]


def asleep(ask: Ask, scale: Scale) -> list[dict[str, Any]]:
    ask("latency", 10 * LIMIT)
    raise AssertionError("it woke up")


def awake(ask: Ask, scale: Scale) -> list[dict[str, Any]]:
    seconds = ask("latency", 0.0)[0]
    return [{"what": "batch", "seconds": seconds}]


def test_a_step_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    steps = {"links": Step("asleep?", asleep, seconds=3), "host": Step("awake?", awake)}
    monkeypatch.setattr(command, "STEPS", steps)
    monkeypatch.setattr(command, "_WORKER", f"{__name__}:Sleepy")
    folder = tmp_path / "measured"
    words = [*SMALL, "--folder", str(folder)]
    assert command.main(words) == 1
    out, err = capsys.readouterr()
    assert "links: failed: no answer from rank 0, 1 of 2 to latency within 3 s" in err
    assert times(folder, "host") == [{"what": "batch", "seconds": [1e-6]}]
    assert f"Continue with: commfuse-npu measure --resume {shlex.join(words)}" in out

    # It is tried again, and the other one is not.
    monkeypatch.setattr(command, "STEPS", {**steps, "links": Step("awake?", links)})
    assert command.main([*words, "--resume"]) == 0
    assert "host: kept" in capsys.readouterr().out


def test_ranks_have_the_environment_of_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Queued(Sleepy):
        def __init__(self, *_: object, **__: object) -> None:
            self.timeout = 0.0
            assert os.environ["TASK_QUEUE_ENABLE"] == "2"

        def __enter__(self) -> Queued:
            return self

        def ask(self, method: str, *_: object) -> list[Any]:
            return [self.machine()] if method == "machine" else [[1e-6]]

        def close(self) -> None:
            """There is nothing to end."""

    monkeypatch.setenv("TASK_QUEUE_ENABLE", "1")
    found = Launches({}, tmp_path, {"TASK_QUEUE_ENABLE": "2"})
    monkeypatch.setattr(command, "launches", lambda *_: found)
    monkeypatch.setattr(command, "Ranks", Queued)
    monkeypatch.setattr(
        command, "STEPS", {"host": Step("awake?", awake), "launch": STEPS["launch"]}
    )
    words = [*SMALL, "--folder", str(tmp_path / "measured"), "--launch", "launch.sh"]
    assert command.main(words) == 0


def test_ranks_that_do_not_start_do_not_take_the_time_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def absent(*_: object, **__: object) -> None:
        raise RanksError("no device")

    names = "links", "collectives", "host", "beside"
    monkeypatch.setattr(command, "STEPS", {name: Step("awake?", awake) for name in names})
    monkeypatch.setattr(command, "Ranks", absent)
    assert command.main([*SMALL, "--folder", str(tmp_path / "measured")]) == 1
    out, err = capsys.readouterr()
    assert err.count("failed: no device") == 2
    assert "host: left out, ranks could not be started, 2 times" in out
    assert "Not measured: links, collectives." in out
    assert (tmp_path / "measured" / "measured.md").exists()


def test_a_step_that_makes_no_sense_of_its_answers_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def puzzled(ask: Ask, scale: Scale) -> list[dict[str, Any]]:
        return [{"seconds": ask("latency", 0.0)[0]["none"]}]

    steps = {"links": Step("puzzled?", puzzled), "host": Step("awake?", awake)}
    monkeypatch.setattr(command, "STEPS", steps)
    monkeypatch.setattr(command, "_WORKER", f"{__name__}:Sleepy")
    assert command.main([*SMALL, "--folder", str(tmp_path / "measured")]) == 1
    assert "links: failed: TypeError: list indices" in capsys.readouterr().err
    assert "Traceback" in json.loads((tmp_path / "measured" / "links.json").read_text())["failed"]
    assert times(tmp_path / "measured", "host")


@pytest.mark.parametrize(("words", "seconds"), [([], 9), (["--timeout", "70"], 70)])
def test_the_limit_of_a_question_is_its_steps_or_the_options(
    words: list[str], seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    class Asked:
        """In the place of ranks."""

        def __init__(self, size: int, *, timeout: float, **_: object) -> None:
            self.timeout = timeout

        def __enter__(self) -> Asked:
            return self

        def ask(self, method: str, *_: object) -> list[Any]:
            limits.append(self.timeout)
            return [Sleepy().machine()] if method == "machine" else [[1e-6]]

        def close(self) -> None:
            """There is nothing to end."""

    monkeypatch.setattr(command, "Ranks", Asked)
    monkeypatch.setattr(command, "STEPS", {"links": Step("awake?", links, seconds=9)})
    assert command.main([*SMALL, "--folder", str(tmp_path / "measured"), *words]) == 0
    assert limits[1:] == [seconds]


def links(ask: Ask, scale: Scale) -> list[dict[str, Any]]:
    seconds = ask("latency", 0.0)[0]
    ping = {"bytes": 8, "lanes": 1, "half a ping-pong": True, "seconds": seconds}
    return [ping, {"bytes": 1 << 20, "lanes": 1, "seconds": [1.0]}]


def test_a_run_is_not_gone_on_with_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(command, "_WORKER", f"{__name__}:Sleepy")
    monkeypatch.setattr(command, "STEPS", {"host": Step("awake?", awake)})
    folder = tmp_path / "measured"
    words = [*SMALL, "--folder", str(folder)]
    assert command.main(words) == 0
    (folder / "host.json").unlink()
    machine = json.loads((folder / "machine.json").read_text())
    (folder / "machine.json").write_text(json.dumps({**machine, "torch": "other"}))
    assert command.main([*words, "--resume"]) == 2
    said = capsys.readouterr().err
    assert "measured on another machine: torch 'other' there, 'none' here; choose another" in said
    assert not (folder / "host.json").exists()


def test_what_is_damaged_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(command, "_WORKER", f"{__name__}:Sleepy")
    monkeypatch.setattr(command, "STEPS", {"host": Step("awake?", awake)})
    folder = tmp_path / "measured"
    words = [*SMALL, "--folder", str(folder)]
    assert command.main(words) == 0
    for name in ("host", "machine"):
        (folder / f"{name}.json").write_text('{"times')
    assert command.main([*words, "--resume"]) == 0
    assert "host.json cannot be read" in capsys.readouterr().err
    assert times(folder, "host")[0]["seconds"] == [1e-6]
    assert json.loads((folder / "machine.json").read_text())["backend"] == "gloo"


@pytest.mark.parametrize(
    ("name", "base"),
    [("Ascend910B3", "ascend_910b_server"), ("Ascend910_9391", "ascend_910c_supernode")],
)
def test_an_npu_says_which_description_holds(
    name: str, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Named(Sleepy):
        def __init__(self, *_: object, **__: object) -> None:
            self.timeout = 0.0

        def __enter__(self) -> Named:
            return self

        def ask(self, method: str, *_: object) -> list[Any]:
            machine = {**self.machine(), "device name": name}
            return [machine] if method == "machine" else [[1e-6]]

        def close(self) -> None:
            """There is nothing to end."""

    monkeypatch.setattr(command, "Ranks", Named)
    monkeypatch.setattr(command, "STEPS", {"host": Step("awake?", awake)})
    folder = tmp_path / "measured"
    assert command.main(["--folder", str(folder)]) == 0
    described = Hardware.load(folder / "measured.yaml")
    expected = Hardware.load(find_config(base, "hardware"))
    assert described.topologies == expected.topologies
    assert described.figures["inside.rate"] == expected.figures["inside.rate"]


def test_no_step_begins_when_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(folder.time, "monotonic", iter([0.0, *[61.0] * 99]).__next__)
    words = [*SMALL, "--folder", str(tmp_path / "measured"), "--minutes", "1"]
    assert command.main(words) == 1
    out = capsys.readouterr().out
    assert out.count("left out, 1 minutes are over") == len(STEPS) - 1


def printing(folder: Path) -> str:
    """A launch that prints ten iterations; its plain form fails while ``folder/there`` is not."""
    script = folder / "training.py"
    script.write_text(
        "import pathlib, sys\n"
        "there = pathlib.Path(__file__).parent / 'there'\n"
        "if '--plain' in sys.argv and not there.exists():\n"
        "    raise OSError('not there')\n"
        "for i in range(1, 11):\n"
        "    print(f' iteration {i}/ 10 | elapsed time per iteration (ms): {100 + i}.0 | '\n"
        "          f'lm loss: 1.{i}E+01 | grad norm: 2.5 |')\n"
        "print('sha256 of all weights: ' + 'a' * 64)\n"
    )
    return f"{sys.executable} {script}"


def test_a_launch_ends_in_a_verdict_and_a_page(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "measured"
    words = [*SMALL, "--folder", str(folder), "--steps", "launch", "--launch", printing(tmp_path)]
    assert command.main(words) == 1
    out, err = capsys.readouterr()
    assert "Could not run: plain collectives: exit code 1" in out
    assert "OSError: not there" in err
    # As it can be pasted into a shell.
    assert f"Continue with: commfuse-npu measure --resume {shlex.join(words)}" in out
    assert "## launch, plain collectives: failed" in (folder / "measured.md").read_text()
    assert not (folder / "measured.yaml").exists()

    (tmp_path / "there").touch()
    assert command.main([*words, "--resume"]) == 0
    out = capsys.readouterr().out
    assert "launch, Megatron's order: kept" in out
    assert "The same weights, bit for bit: Megatron's order;" in out
    page = (folder / "measured.md").read_text()
    forms = re.findall(r"^\| (\S.*?) \| .* \| `aaaaaaaa` \|$", page, re.MULTILINE)
    titles = ["forward-backward overlap", "CommFuse's fused layers", "plain collectives"]
    assert forms == ["Megatron's order", *titles]


def test_a_launch_that_is_none_is_refused_before_anything_is_made(
    tmp_path: Path, capsys: Any
) -> None:
    folder = tmp_path / "measured"
    assert command.main([*SMALL, "--folder", str(folder), "--launch", "absent.sh"]) == 2
    assert "there is no launch script absent.sh" in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.long
def test_the_cpu_pretraining_is_measured_in_each_form(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    launch = (
        f"{sys.executable} -m scripts.cpu_pretraining --num-layers 1 --hidden-size 32 "
        "--ffn-hidden-size 64 --num-attention-heads 2 --num-query-groups 2 --seq-length 64"
    )
    words = [*SMALL, "--folder", str(tmp_path / "measured"), "--steps", "launch"]
    assert command.main([*words, "--launch", launch]) == 0
    out = capsys.readouterr().out
    # GEMMs that are not split may round in another way, on some machines.
    assert re.search(r"same weights, bit for bit: .* fused layers; plain", out)
