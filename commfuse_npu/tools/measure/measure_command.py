"""``commfuse-npu measure``: measures what the simulator assumes of this machine."""

import argparse
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from commfuse_npu import __version__
from commfuse_npu.launch.options import whole, words_from
from commfuse_npu.plan.machines import described
from commfuse_npu.runtime.atomic_write import atomic_write
from commfuse_npu.tools.config_file import ConfigError, find_config
from commfuse_npu.tools.doctor.environment import check_variables
from commfuse_npu.tools.doctor.local_machine import LocalMachine, check_devices, topology
from commfuse_npu.tools.doctor.versions import check_cann, check_torch
from commfuse_npu.tools.hardware.description import Hardware
from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.measure.figures import Measured, description
from commfuse_npu.tools.measure.measured_launches import FORMS as LAUNCHED
from commfuse_npu.tools.measure.measured_launches import (
    Launches,
    MeasuredTraining,
    TrainingError,
    launches,
    train,
)
from commfuse_npu.tools.measure.measuring_steps import LAUNCH, STEPS, Scale, Times, slowest
from commfuse_npu.tools.measure.report import Row, as_markdown, compared, verdict
from commfuse_npu.tools.measure.results_folder import Folder
from commfuse_npu.tools.option_types import Parser, positive, refuse
from commfuse_npu.tools.ranks import Ranks, RanksError, check_backend
from commfuse_npu.tools.terminal import tell

_BASES = {"cpu": "cpu_paced", "npu": "ascend_910b_server"}
"""Description with the peaks and the unmeasured figures, by device, if nothing names another."""
_READ = "HCCL_", "P2P_HCCL_", "TORCH_HCCL_", "PYTORCH_NPU_", "ASCEND_RT_", "CPU_AFFINITY_"
"""Prefixes of the variables that the backend of NPUs reads."""
_SAME = "device name", "backend", "torch", "cores"
"""Facts about the machine that must be the same for all results of a folder."""


def main(words: Sequence[str]) -> int:
    """Measure; returns the exit code: 0 complete, 1 incomplete, 2 bad options, 130 Ctrl-C."""
    options = _parser().parse_args(words)
    try:
        run = _Measurement(options)
        try:
            code = 0 if run.measure() else 1
        except KeyboardInterrupt:
            print("interrupted; the same command continues with the next step", file=sys.stderr)
            code = 130
        try:
            run.write(["commfuse-npu", "measure", *words])
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise UsageError(
                f"{options.folder / 'measured.json'} has results that cannot be evaluated: "
                f"{error!r}; remove it, or choose another --folder"
            ) from error
    except (ConfigError, UsageError, OSError) as error:
        return refuse("measure", error)
    return code


def npu_facts(machine: LocalMachine) -> dict[str, str]:
    """Versions, devices, health and links of the NPUs, and the variables of their backend."""
    findings = [*check_torch(machine), check_cann(machine)]
    findings += [*check_devices(machine), *check_variables(machine)]
    facts = {finding.what: finding.value for finding in findings}
    facts |= {f"links of {npu}": " ".join(kinds) for npu, kinds in topology(machine).items()}
    return facts | {k: v for k, v in machine.variables.items() if k.startswith(_READ)}


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="commfuse-npu measure",
        description="Measures what the simulator assumes of a machine: links, GEMMs, the host, "
        "memory, attention; and which form of a launch is fastest. Each step is kept when it is "
        "over; measured.yaml is for simulate --hardware and plan --hardware.",
        epilog="Steps: "
        + "; ".join(f"{name}: {question}" for name, question in STEPS.items())
        + " The same command continues with what is missing. Exit codes: 0 all measured, 1 a step "
        "failed or was left out, 2 invalid options, 130 Ctrl-C (finished steps are kept).",
    )
    add = parser.add_argument
    add("--device", choices=tuple(_BASES), default="npu",
        help="npu: read, not run; default %(default)s")  # fmt: skip
    add("--ranks", type=whole(2, 1024), default=8, help="default %(default)s")
    add("--config", default="llama3_8b", help="whose layers; a yaml file, or its name in configs/")
    add("--base", metavar="DESCRIPTION",
        help="whose peaks and unmeasured figures are taken; default by the device")  # fmt: skip
    add("--folder", type=Path, default=Path("measured"), help="for all files; default %(default)s")
    add("--steps", type=words_from(STEPS), help="only these, in the order of the list below")
    add("--minutes", type=positive, default=55.0,
        help="then a running step ends and no other one starts; default %(default)g")  # fmt: skip
    add("--timeout", type=positive, default=900.0, metavar="SECONDS",
        help="for one question, or one form; default %(default)g")  # fmt: skip
    add = parser.add_argument_group("the step launch").add_argument
    add("--launch", metavar="COMMAND",
        help="train ten iterations of it in each form: plain, Megatron's order, CommFuse, MC2, "
        "CoC; a launch script of MindSpeed-LLM and its arguments, or its torchrun command (read, "
        "rehearsed, not run on NPUs)")  # fmt: skip
    return parser


class _Measurement:
    """One measurement, with parsed options and its folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._steps = _chosen(options)
        self._scale = Scale.of(find_config(options.config), options.ranks, options.device)
        self._launched: Launches | None = None
        if options.launch is not None:
            self._launched = launches(options.launch, options.ranks)
        if options.base is not None:
            Hardware.load(find_config(options.base, "hardware"))
        facts = {"version": __version__, "device": options.device, "ranks": options.ranks}
        facts |= {"config": options.config, "rows": self._scale.rows}
        facts |= {layer: list(shape) for layer, shape in self._scale.layers().items()}
        check_backend(options.device)
        self._folder = Folder(options.folder, facts)
        self._end = time.monotonic() + 60 * options.minutes
        self._ranks: Ranks | None = None

    def measure(self) -> bool:
        """Run all steps and store each when it ends; returns whether all are complete."""
        if self._launched is not None:
            # The ranks use the launch's settings of queues, affinities and buffers.
            os.environ.update(self._launched.environment)
        if not self._folder.steps.get("machine"):
            on_npus = self._options.device == "npu"
            self._folder.store("machine", npu_facts(LocalMachine.this()) if on_npus else {})
        try:
            failed = [part for part in self._parts() if not self._complete(*part)]
            return not failed
        finally:
            self._end_ranks()

    def _parts(self) -> Iterator[tuple[str, str, Any, Callable[[], Any]]]:
        """The parts of all steps: the name of the result, a title, what is asked, the measurement.

        A stored result is used only if the same was asked.
        """
        options = self._options
        for step in self._steps:
            if self._launched is not None and step == LAUNCH:
                # Idle ranks would compete with the training.
                self._end_ranks()
                self._folder.store(LAUNCH, {"asked": options.launch})
                print(*(f"  {note}\n" for note in self._launched.notes), sep="", end="")
                for name in self._launched.commands:
                    train = partial(self._trained, name, self._launched)
                    yield name, f"{LAUNCH}, {LAUNCHED[name].name}", options.launch, train
            else:
                yield step, step, None, partial(self._times, step)

    def _complete(self, name: str, title: str, asked: Any, measure: Callable[[], Any]) -> bool:
        """Measure and store a part, unless it is stored already; a failure is stored, too."""
        saved = self._folder.steps.get(name)
        if saved and saved.get("asked") == asked and "failed" not in saved:
            print(f"{title}: kept")
            return True
        start = time.monotonic()
        content = {"asked": asked}
        try:
            if start > self._end:
                raise TimeoutError(f"left out, {self._options.minutes:g} minutes are over")
            print(f"{title}: {STEPS[name]}" if name in STEPS else title, flush=True)
            tell(title)
            result = measure()
        except UsageError:
            raise
        except Exception as error:
            # Continue after any error, with new ranks.
            self._end_ranks()
            expected = isinstance(error, (RanksError, TrainingError, TimeoutError))
            content["failed"] = (str(error) if expected else traceback.format_exc()).strip()
            lines = content["failed"].splitlines()
            why = " ".join(dict.fromkeys((lines[0], lines[-1]))) if expected else lines[-1]
            print(f"{title}: failed: {why}", file=sys.stderr)
        else:
            content["times" if isinstance(result, list) else "log"] = result
            print(f"{title}: measured in {time.monotonic() - start:.0f} s", flush=True)
        self._folder.store(name, content)
        return "failed" not in content

    def _limit(self) -> float:
        """Seconds for a question, or a training, that starts now."""
        return max(1.0, min(self._options.timeout, self._end - time.monotonic()))

    def _times(self, step: str) -> Times:
        ranks = self._ranks or self._started()
        ranks.timeout = self._limit()
        return slowest(ranks.ask(step, self._scale))

    def _started(self) -> Ranks:
        options = self._options
        self._ranks = ranks = Ranks(options.ranks, device=options.device, timeout=self._limit())
        here = ranks.ask("machine")[0]
        self._folder.agree({name: here.get(name) for name in _SAME})
        self._folder.store("machine", {**self._folder.steps.get("machine", {}), **here})
        return ranks

    def _end_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = None

    def _trained(self, name: str, launched: Launches) -> dict[str, Any]:
        return train(name, launched, self._folder.path, self._limit())

    def _trainings(self) -> list[MeasuredTraining]:
        """The stored trainings of the last launch, in the order of the forms."""
        steps = self._folder.steps
        last = steps.get(LAUNCH, {}).get("asked")
        return [
            MeasuredTraining(form, **saved.get("log", {}), failed=saved.get("failed", ""))
            for name, form in LAUNCHED.items()
            if (saved := steps.get(name)) and saved.get("asked") == last
        ]

    def write(self, command: Sequence[str]) -> None:
        """Write the description and the page from the stored steps; print the verdict."""
        facts = self._folder.steps.get("machine", {})
        steps = {k: v for k, v in self._folder.steps.items() if not k.startswith(f"{LAUNCH}_")}
        failed = {name: part["failed"] for name, part in steps.items() if "failed" in part}
        measured = {name: part["times"] for name, part in steps.items() if "times" in part}
        trainings = self._trainings()
        lines = [*verdict(trainings)]
        rows = list[Row]()
        if measured:
            line, rows = self._described(measured, facts)
            lines.append(line)
        if failed:
            lines.append(f"**Not measured**: {', '.join(failed)}.")
        if not lines:
            return
        page = self._folder.path / "measured.md"
        with atomic_write(page) as part:
            facts = {"command": shlex.join(command), **facts}
            text = as_markdown(lines, trainings, rows, failed, facts)
            part.write_text(text, "utf-8")
        print(*lines, f"Written: {page}", sep="\n")

    def _described(self, measured: Measured, facts: dict[str, Any]) -> tuple[str, list[Row]]:
        """Write measured.yaml; returns a summary, and its figures beside those of the base."""
        options = self._options
        path = self._folder.path / "measured.yaml"
        device = facts.get("device name", options.device)
        named = options.base or described(str(device)) or _BASES[options.device]
        base = Hardware.load(find_config(named, "hardware"))
        name = f"{options.ranks} ranks on {device}"
        source = (
            f"Measured by commfuse-npu measure: {name}, torch {facts.get('torch')}, "
            f"{facts.get('backend')}, shapes of {options.config}"
        )
        text = description(base, f"{name}, measured", measured, facts, source)
        with atomic_write(path) as part:
            part.write_text(text, "utf-8")
        rows = compared(Hardware.load(path), base)
        outside = [f"`{row[0]}`" for row in rows if row[3] != "in the range"]
        return (
            f"{len(rows)} figures were measured, {len(outside)} of them outside the range that "
            f"{named} assumes{': ' if outside else ''}{', '.join(outside)}. To simulate with "
            f"them: `commfuse-npu simulate --hardware {path}`"
        ), rows


def _chosen(options: argparse.Namespace) -> list[str]:
    chosen = [name for name in STEPS if not options.steps or name in options.steps]
    if options.launch is not None and LAUNCH not in chosen:
        raise UsageError(f"--launch: no effect without {LAUNCH} among --steps; add it")
    if options.launch is not None and options.device == "cpu":
        raise UsageError(
            "--launch: trains on NPUs; on a CPU scripts/pretrain_llama_cpu.sh --compare compares "
            "the forms"
        )
    if options.launch is None and options.steps and LAUNCH in chosen:
        raise UsageError(f"--steps {LAUNCH} needs a launch; give it by --launch")
    return [name for name in chosen if name != LAUNCH or options.launch is not None]
