"""How many times as fast as blocking exchanges is each form of a layer, on a CPU?

    python -m scripts.evidence.measured [--ranks N] [--works WORKS] [--ratios RATIOS]

docs/performance.md says how it is measured.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from itertools import product
from statistics import median

from commfuse_npu.launch.options import whole, words, words_from
from commfuse_npu.runtime.atomic_write import write_json
from commfuse_npu.tools.config_file import ConfigError
from commfuse_npu.tools.measure.measuring_steps import Times
from commfuse_npu.tools.option_types import Parser, new_file
from commfuse_npu.tools.ranks import Ranks, RanksError
from commfuse_npu.tools.terminal import rendered, table_head, table_row
from scripts.evidence.measured.rounds import time_forms
from scripts.evidence.measured.works import COMPUTE, NAMES, REFERENCE, WORKS, scale_of

_LEGEND = f"""\
Ratio: time on the links / time of the computation. Speed: relative to `{REFERENCE}`, which waits
for each collective. Removed: the share that is gone of its time beyond computation (wall), and of
the host's waiting time (blocked). Bold: the fastest. Bits: whether results equal those of
`{REFERENCE}` bit for bit, else the largest difference."""


def _ratios(text: str) -> tuple[float, ...]:
    try:
        ratios = {float(word) for word in words(text)}
    except ValueError:
        ratios = {-1.0}
    if not all(0 <= ratio <= 100 for ratio in ratios):
        raise argparse.ArgumentTypeError(f"{text!r}: ratios are numbers from 0 to 100")
    return tuple(sorted(ratios))


def table(times: Times) -> list[str]:
    """A row per form of one workload at one ratio, as Markdown."""
    rows = {row["form"]: row for row in times}
    seconds = {name: median(row["seconds"]) for name, row in rows.items()}
    blocked = {name: median(row["blocked"]) for name, row in rows.items()}
    compute = seconds.pop(COMPUTE)
    reference = seconds[REFERENCE]
    waits = blocked[REFERENCE]
    reached = rows[REFERENCE]["reached"]
    lines = [table_head(("form", "speed", "wall removed", "blocked removed", "bits"))]
    for name, middle in seconds.items():
        removed = ["-", "-"]
        if reached and name != REFERENCE:
            removed = [
                _share(reference - middle, reference - compute),
                _share(waits - blocked[name], waits),
            ]
        off = rows[name]["difference"]
        lines.append(table_row([
            f"**{name}**" if middle == min(seconds.values()) else name,
            f"{reference / middle:.2f}x",
            *removed,
            f"{off:.1e}" if off else "equal",
        ]))  # fmt: skip
    if reached:
        share = f"{100 * reached:.0f} %"
        lines.append(f"\nA message alone reached {share} of the rate that links were given.")
    return lines


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole > 0 else "-"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m scripts.evidence.measured",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=whole(2, 64), default=2, help="default %(default)s")
    add("--config", default="llama3_8b", help="whose layers; a yaml file, or its name in configs/")
    add("--works", type=words_from(WORKS), default=("mlp", "layers"), metavar="WORKS",
        help=f"from {', '.join(WORKS)}; default mlp,layers")  # fmt: skip
    add("--forms", type=words_from(NAMES), default=NAMES, metavar="FORMS",
        help=f"from {', '.join(NAMES)}; default all")  # fmt: skip
    add("--ratios", type=_ratios, default=(1.0,),
        help="time on the links / time of the computation; default 1")  # fmt: skip
    add("--rounds", type=whole(), default=3, help="default %(default)s")
    add("--timeout", type=whole(), default=900, metavar="SECONDS",
        help="for one question to the ranks; default %(default)s")  # fmt: skip
    add("--json", type=new_file, metavar="FILE", help="the seconds of each round")
    return parser


def main(argv: Sequence[str]) -> int:
    """Measure, and print a table as each workload and ratio is over."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        scale = scale_of(options.config, options.ranks)
        times = Times()
        worker = "scripts.evidence.measured.forms_worker:FormsWorker"
        limit = options.timeout
        with Ranks(options.ranks, device="cpu", timeout=limit, worker=worker) as ranks, rendered():
            for work, ratio in product(options.works, options.ratios):
                asked = {"names": options.forms, "rounds": options.rounds}
                measured = time_forms(ranks.ask, scale, work, ratio, **asked)
                print(f"\n## {work}, {options.ranks} ranks, ratio {ratio:g}\n")
                print(*table(measured), sep="\n")
                times += measured
                if options.json is not None:
                    write_json(options.json, times, indent=1)
            print(f"\n{_LEGEND}")
    except (ConfigError, RanksError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    # Raise SystemExit, so that the ranks are ended and their folder is removed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
