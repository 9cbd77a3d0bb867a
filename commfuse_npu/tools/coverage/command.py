"""What would --use-commfuse fuse in each launch script below a folder?

Each script, *.sh, is run by bash, in a copy of its folder: torchrun and python are stand-ins that
write down what they are asked to start, most other programs do nothing. What a script calls by an
absolute path does run, without network where bubblewrap or unshare is allowed: give folders whose
scripts you would run.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commfuse_npu.runtime.whole_file import write_json
from commfuse_npu.tools.config_file import ConfigError
from commfuse_npu.tools.coverage.scripts import Reader
from commfuse_npu.tools.coverage.summary import counts, lines, table
from commfuse_npu.tools.coverage.verdict import Coverage, cover
from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.option_types import Parser, new_file, positive, refuse, whole
from commfuse_npu.tools.tell import tell

__all__ = ["main"]

_SECONDS = 20.0
_USUAL_CHUNKS = 4


def main(words: Sequence[str]) -> int:
    """Run the subcommand: 0 all read, 1 not all scripts could be, 2 a question without sense."""
    parser = Parser(prog="commfuse-npu coverage", description=__doc__)
    parser.add_argument("folder", type=Path, help="with launch scripts in it or below it")
    parser.add_argument(
        "--json", type=new_file, metavar="FILE", help="write all of it as JSON, too"
    )
    parser.add_argument(
        "--all", action="store_true", help="a paragraph on each launch, besides the counts"
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        default=_SECONDS,
        metavar="SECONDS",
        help=f"for each script; default {_SECONDS:g}",
    )
    parser.add_argument(
        "--chunks",
        type=whole(2),
        default=_USUAL_CHUNKS,
        help=f"of --commfuse-flow; default {_USUAL_CHUNKS}",
    )
    given = parser.parse_args(words)
    try:
        return _report(given.folder, given.timeout, given.chunks, given.json, given.all)
    except (UsageError, OSError) as error:
        return refuse("coverage", error)


def _report(folder: Path, timeout: float, chunks: int, page: Path | None, everything: bool) -> int:
    reader = Reader(folder, timeout)
    used, scripts = reader.read()
    launches: list[Coverage] = []
    others: dict[str, str] = {}
    unread: dict[str, str] = {}
    for number, script in enumerate(scripts, 1):
        tell(f"{number} of {len(reader.scripts)}: {script.name}")
        if script.error:
            unread[script.name] = script.error
        elif script.other:
            others[script.name] = script.other
        for training in script.trainings:
            try:
                launches.append(cover(script.name, training, chunks))
            except (UsageError, ConfigError) as error:
                unread[script.name] = str(error)
    tell("")
    for launch in launches if everything else ():
        print("\n".join(_about(launch)), end="\n\n")
    print(*table(launches), "", *lines(launches), sep="\n")
    if not everything:
        print("what becomes of each launch, and why: --all")
    for what, count in sorted(Counter(others.values()).items()):
        print(f"no such training: {count} scripts: {what}")
    print(f"Scripts were run {used.said}. Nothing was trained: read, by rules.")
    for name, why in unread.items():
        print(f"not read: {name}: {why}")
    if page is not None:
        write_json(page, _as_json(launches, others, unread, used.said), indent=2)
    return 1 if unread else 0


def _about(launch: Coverage) -> list[str]:
    """A paragraph on a launch."""
    fused = [one.layer for one in launch.layers if one.state == "fused"]
    would = "would be fused" if launch.refused else "fused"
    told = [f"{launch.script}: {launch.verdict}", f"  {launch.layout}"]
    told += [f"  refused: {option}: {why}" for option, why in launch.refused.items()]
    if launch.without:
        told.append(f"  {launch.without}")
    if launch.layout.tensor > 1:
        told.append(f"  {would}: {', '.join(fused) or 'nothing'}")
        reasons: dict[str, list[str]] = {}
        for one in launch.layers:
            if one.state != "fused":
                prefix = "left" if one.state == "left" else "nothing to hide"
                reasons.setdefault(f"{prefix}: %s: {one.reason}", []).append(one.layer)
        told += ["  " + line % ", ".join(layers) for line, layers in reasons.items()]
    taken = [flag for flag, why in launch.flags.items() if not why and not launch.excluded]
    if taken:
        alone = "alone, for no tensor-parallel layer" if launch.refused else "besides"
        told.append(f"  {alone}: {', '.join(taken)}")
    if launch.overlap.transfers:
        why = launch.overlap.obstacle
        told.append(f"  {'not ' if why else ''}--commfuse-fb-overlap{f': {why}' if why else ''}")
    if not launch.excluded:
        exchanging = launch.layout.context > 1
        told += [
            f"  not {flag}: {why}"
            for flag, why in launch.flags.items()
            if why and (exchanging or flag != "--commfuse-ulysses")
        ]
    return [*told, *(f"  note: {note}" for note in launch.notes)]


def _as_json(
    launches: Sequence[Coverage], others: dict[str, str], unread: dict[str, str], sandbox: str
) -> dict[str, Any]:
    return {
        "launches": [
            {
                **dataclasses.asdict(launch),
                "data_parallel_alone": launch.data_parallel_alone,
            }
            for launch in launches
        ],
        "others": others,
        "unread": unread,
        "sandbox": sandbox,
        "counts": counts(launches),
    }
