"""``commfuse-npu plan FOLDER``: a row for each launch script in a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from commfuse_npu.tools.launch_script import NoTrainingError, UsageError
from commfuse_npu.tools.option_types import write_figures
from commfuse_npu.tools.plan.launch_plan import LaunchPlan
from commfuse_npu.tools.simulate.variants import LEGEND
from commfuse_npu.tools.terminal import table_head, table_row, tell

_HEAD = (
    "script",
    "now, ms",
    "best form",
    "less time than now",
    "GiB of usable",
    "machine",
    "what to do",
)
_LEGEND = (
    "Simulated, not measured: a step at typical figures (ranges over uncertain ones), and the "
    "memory of the fullest rank in the best form. `commfuse-npu plan SCRIPT` has all forms of one "
    f"launch. {LEGEND}"
)


def launch_scripts(folder: Path) -> list[Path]:
    """The shell scripts in a folder and below it."""
    return sorted(path for path in folder.rglob("*.sh") if path.is_file())


def plan_folder(
    folder: Path,
    scripts: Sequence[Path],
    plan: Callable[[Sequence[str]], LaunchPlan],
    json: Path | None,
) -> int:
    """Print a row for each launch; scripts that start no training are counted.

    Args:
        scripts: the :func:`launch_scripts` of the folder.
        plan: plans the launch of a command line.
        json: a file for the plans, by path of the script.

    Returns:
        The exit code: 0.
    """
    plans: dict[str, LaunchPlan | str] = {}
    others = 0
    for path in scripts:
        name = str(path.relative_to(folder))
        tell(f"{len(plans)} launches; reading {name}")
        try:
            plans[name] = plan(["bash", str(path)])
        except NoTrainingError:
            others += 1
        except (UsageError, ValueError, OSError) as error:
            plans[name] = str(error)
    print(table_head(_HEAD, numbers=False), *_rows(plans), sep="\n")
    print(f"\n{len(plans)} launches; {others} other scripts start no training.\n\n{_LEGEND}")
    content = {
        name: {"error": found} if isinstance(found, str) else found.as_json()
        for name, found in plans.items()
    }
    write_figures(json, content)
    return 0


def _rows(plans: dict[str, LaunchPlan | str]) -> Iterator[str]:
    """The launches with the largest gain first, those without a known gain last."""
    for name, found in sorted(plans.items(), key=_gain, reverse=True):
        if isinstance(found, str):
            yield table_row((name, *"-----", found))
            continue
        best = found.best
        changes = best is not found.now and not found.problems
        what = best.change if changes else found.verdict
        if changes and found.unsimulated:
            what += f" (gain not known: {found.unsimulated})"
        yield table_row((
            name,
            f"{1e3 * found.now.seconds:,.0f}" if found.now.timed else "-",
            best.name,
            found.saved.percent if found.saved and changes else "-",
            f"{best.gibibytes:.1f} of {found.usable:.1f}" if best.timed else "-",
            "A3" if "A3" in found.hardware.name else "A2",
            what,
        ))  # fmt: skip


def _gain(item: tuple[str, LaunchPlan | str]) -> float:
    found = item[1]
    if isinstance(found, str) or not found.saved:
        return -1.0
    return found.saved.typical
