"""Reports what CommFuse would do in each launch script below a folder.

bash runs each script, *.sh, in a copy of its folder. torchrun and python are replaced by recorders
of their arguments, and most other programs by no-ops. Programs that a script calls by an absolute
path do run, without network if bubblewrap or unshare is available: use folders whose scripts you
would run. Nothing is trained, and torch is not needed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from commfuse_npu.config_file import ConfigError
from commfuse_npu.runtime.atomic_write import write_json
from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.markdown import table_head, table_row
from commfuse_npu.tools.outputs import Output, write_outputs
from commfuse_npu.tools.plan.judgement import Judgement, fuse_options, judge_launch
from commfuse_npu.tools.plan.scripts import find_scripts, read_scripts
from commfuse_npu.tools.terminal import print_verdict, tell

__all__ = ["plan_folder"]

_COLUMNS = (
    *("launches", "full", "partial", "refused", "TP 1", "LoRA", "another overlap", "else"),
    *("mixture of experts", "--commfuse-dp alone"),
)


def plan_folder(folder: Path, timeout: float, page: Path | None, everything: bool) -> int:
    """Print what CommFuse would do in each launch; returns 0, or 1 if not all could be read.

    Args:
        timeout: seconds for each script.
        page: a file for all results as JSON.
        everything: also print a line per launch.

    Raises:
        UsageError: the folder has no scripts.
    """
    scripts = find_scripts(folder)
    launches: list[tuple[str, Judgement]] = []
    others: dict[str, str] = {}
    unread: dict[str, str] = {}
    sandbox = ""
    for number, script in enumerate(read_scripts(folder, scripts, timeout), 1):
        tell(f"{number} of {len(scripts)}: {script.name}")
        sandbox = script.sandbox
        if script.error:
            unread[script.name] = script.error
        elif script.other:
            others[script.name] = script.other
        for launch in script.trainings:
            try:
                fuse = fuse_options(launch.options.words)
                judged = judge_launch(launch.options, launch.processes, fuse)
                launches.append((script.name, judged))
            except (UsageError, ConfigError) as error:
                unread[script.name] = str(error)
    judgements = [judged for _, judged in launches]
    counts = _counts(judgements)
    overlaps, fused = counts["--commfuse-fb-overlap passes as typed"], counts["not refused"]
    print_verdict(
        f"Of {len(judgements)} launches {overlaps} can take --commfuse-fb-overlap as they are, "
        f"{fused} --use-commfuse.",
        overlaps + fused > 0,
    )
    print()
    if everything:
        print(*(_line(name, judged) for name, judged in launches), "", sep="\n")
    folders: dict[str, list[Judgement]] = {}
    for name, judgement in launches:
        folders.setdefault(str(PurePath(name).parent), []).append(judgement)
    folders["all"] = judgements
    print(table_head(["folder", *_COLUMNS]))
    for name, inside in folders.items():
        print(table_row([name, *map(str, _row(inside).values())]))
    print("", *_sums(judgements), "", sep="\n")
    if not everything:
        print("Each launch in a line: --all; all about one: commfuse-npu plan SCRIPT")
    for kind, count in sorted(Counter(others.values()).items()):
        print(f"No such training: {count} scripts: {kind}")
    print(f"Scripts were run {sandbox}. Nothing was trained: read, by rules.")
    for name, why in unread.items():
        print(f"Not read: {name}: {why}")
    content = {
        "launches": [{"script": name, **_as_json(judged)} for name, judged in launches],
        "others": others,
        "unread": unread,
        "sandbox": sandbox,
        "counts": counts,
    }
    figures = partial(write_json, content=content, indent=2)
    code = write_outputs("plan", [Output("--json", page, ": all launches", figures)])
    return code or int(bool(unread))


def _line(name: str, launch: Judgement) -> str:
    """One line about a launch."""
    refused = " ".join(launch.refused)
    left = ", ".join(layer.layer for layer in launch.layers if layer.state == "left")
    flags = [flag for flag, why in launch.why_not.items() if not why and not launch.excluded]
    flags += ["--commfuse-fb-overlap"] * (not launch.overlap.obstacle)
    parts = [
        f"{name}: {launch.verdict}" + (f" with {refused}" if refused else ""),
        str(launch.layout),
        f"left: {left}" if left and launch.layout.tensor > 1 else "",
        f"also: {', '.join(flags)}" if flags else "",
    ]
    return "; ".join(filter(None, parts))


def _row(launches: Sequence[Judgement]) -> dict[str, int]:
    """The counts of a table row; a launch refused for several reasons counts under the first."""
    counts: Counter[str] = Counter(launches=len(launches))
    for launch in launches:
        counts.update((launch.verdict, launch.kind))
        counts["mixture of experts"] += launch.layout.experts
        counts["--commfuse-dp alone"] += launch.data_parallel_alone
    return {name: counts[name] for name in _COLUMNS}


def _counts(launches: Sequence[Judgement]) -> dict[str, int]:
    """The last row of the table and further counts, by name."""
    plain = [
        launch for launch in launches if launch.layout.tensor > 1 and launch.kind in ("", "else")
    ]
    accepted = [launch for launch in launches if not launch.refused]
    exchanging = [launch for launch in launches if launch.layout.algorithm == "ulysses_cp_algo"]
    ulysses = [launch for launch in exchanging if not launch.why_not["--commfuse-ulysses"]]
    return {
        **_row(launches),
        "with transfers of TP, EP or CP": sum(launch.overlap.transfers for launch in launches),
        "--commfuse-fb-overlap passes as typed": sum(
            not launch.overlap.obstacle for launch in launches
        ),
        "and without the flags of another overlap": sum(
            not launch.overlap.without for launch in launches
        ),
        "TP above 1, neither LoRA nor another overlap": len(plain),
        "of these full": sum(launch.verdict == "full" for launch in plain),
        "Ulysses launches": len(exchanging),
        "of these --commfuse-ulysses fits": sum(not launch.excluded for launch in ulysses),
        "and without what excludes --use-commfuse": len(ulysses),
        "not refused": len(accepted),
        "of these with short blocks": sum(launch.short for launch in accepted),
        **{
            f"of these {name} passes": sum(not launch.why_not[name] for launch in accepted)
            for name in ("--commfuse-attention", "--commfuse-dp")
        },
    }


def _sums(launches: Sequence[Judgement]) -> list[str]:
    """The counts that the table does not have, and why forward-backward overlap is refused."""
    overlaps = [
        launch.overlap
        for launch in launches
        if launch.overlap.transfers and launch.overlap.obstacle
    ]
    # Launches whose reasons differ only in their numbers count as one.
    pattern = re.compile(r"^\d+ micro-batches: \d+%")
    reasons = (
        pattern.sub("too few micro-batches: less than half", overlap.obstacle)
        for overlap in overlaps
    )
    counted = ", ".join(f"{n} x {why}" for why, n in Counter(reasons).most_common())
    rows = [
        table_row([name, str(n)]) for name, n in _counts(launches).items() if name not in _COLUMNS
    ]
    why = ["", f"--commfuse-fb-overlap does not pass as typed: {counted}"]
    return [table_head(["of all", "launches"]), *rows, *(why if counted else [])]


def _as_json(launch: Judgement) -> dict[str, Any]:
    without = " ".join(map(str, launch.excluded)) if launch.layout.tensor > 1 else ""
    return {
        "layout": launch.layout._asdict(),
        "layers": [layer._asdict() for layer in launch.layers],
        "overlap": launch.overlap._asdict(),
        "without": f"{launch.fused} without {without}" if without else "",
        "flags": launch.why_not,
        **{
            name: getattr(launch, name)
            for name in ("verdict", "refused", "kind", "short", "notes", "data_parallel_alone")
        },
    }
