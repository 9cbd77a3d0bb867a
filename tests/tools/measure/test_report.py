"""What is measured of forms, and reports: layers in rounds, and trainings."""

import math
from itertools import product
from typing import Any

import pytest

from commfuse_npu.config_file import find_config
from commfuse_npu.tools.measure import rounds
from commfuse_npu.tools.measure.launches import FORMS, WARM_UP, Training
from commfuse_npu.tools.measure.report import forms_report, launch_table, verdict
from commfuse_npu.tools.measure.rounds import Sample, time_forms
from commfuse_npu.tools.measure.steps import REFERENCE, WORKS, Scale, Times
from commfuse_npu.tools.ranks import RanksError

CONFIG = find_config("llama3_8b")
TOTALS = {
    "compute": [0.1, 0.1, 0.13],
    "p2p": [0.2, 0.21, 0.19],
    "slices-4": [0.25, 0.24, 0.26],
    "ours-c4": [0.12, 0.125, 0.115],
    "auto": [0.15, 0.15, 0.15],
}


def timed(ratio: float | None = 1.0, work: str = "mlp", **totals: list[float]) -> Times:
    """Rows from seconds, which override or extend :data:`TOTALS`; a tenth is blocked."""
    reached = 0.96 if ratio else None
    return [
        {
            "work": work,
            "ratio": ratio,
            "form": name,
            "reached": reached,
            "difference": 2.5e-6 if name == "auto" and ratio else 0.0,
            "seconds": seconds,
            "blocked": [total / 10 for total in seconds],
        }
        for name, seconds in (TOTALS | totals).items()
    ]


# ------------------------------------------------------------------- sizes and forms


def test_layers_of_a_scale_can_be_shared_by_the_ranks() -> None:
    for ranks, shrink in product((2, 3, 4), (4, 8, 32)):
        scale = Scale.of(CONFIG, ranks, "cpu")._replace(shrink=shrink, compared_rows=100)
        widths = scale.sequence, scale.hidden, scale.ffn, scale.heads, scale.groups
        assert all(width > 0 and width % ranks == 0 for width in widths)
        assert (scale.heads % scale.groups, scale.head) == (0, 128)
    cpu, npu = (Scale.of(CONFIG, 8, device) for device in ("cpu", "npu"))
    assert (cpu.sequence, npu.sequence) == (2048, 8192)
    sizes = {"qkv": (512, 384), "proj": (128, 512), "fc1": (512, 448), "fc2": (224, 512)}
    assert cpu.layers() == sizes
    sizes = {"qkv": (4096, 768), "proj": (512, 4096), "fc1": (4096, 3584), "fc2": (1792, 4096)}
    assert npu.layers() == sizes
    assert cpu.halves(4) == [512, 256, 128, 64]
    assert cpu._replace(rows=40).halves(4) == [40, 20]


@pytest.mark.parametrize(
    ("work", "device", "expected"),
    [("mlp", "cpu", 1024 * 512 * 4 * 5), ("layers", "npu", 4096 * 4096 * 2 * 20),
     ("micro-batches", "cpu", 1024 * 512 * 4 * 160)],
)  # fmt: skip
def test_what_a_pair_exchanges(work: str, device: str, expected: int) -> None:
    assert WORKS[work].bytes_per_pair(Scale.of(CONFIG, 2, device)) == expected


# ------------------------------------------------------------------- rounds


class Asked:
    """Stands in for two ranks: rank 1 takes longer, waits longer and differs more."""

    def __init__(self, problem: str = "") -> None:
        self.problem, self.calls, self.orders = problem, list[tuple[str, Any]](), list[list[str]]()

    def __call__(self, method: str, *args: Any) -> list[Any]:
        self.calls.append((method, args[-1]))
        if method == "round":
            (order,) = args
            self.orders.append(list(order))
            totals = [TOTALS.get(form, [0.3])[0] for form in order]
            return [[Sample(t * k, t * k / 10) for t in totals] for k in (0.5, 1.0)]
        if method == "check":
            return [0.0, 0.0 if args[0] == REFERENCE else 1e-6]
        answers = {"pace": ["", self.problem], "messages": [[0.04], [0.0625]]}
        return answers.get(method, [None, None])

    def of(self, *methods: str) -> list[tuple[str, Any]]:
        return [call for call in self.calls if call[0] in methods]


def test_links_are_set_forms_checked_and_timed_in_shuffled_rounds(monkeypatch) -> None:
    monkeypatch.setattr(rounds.os, "cpu_count", lambda: 2)
    asked, scale = Asked(), Scale.of(CONFIG, 2, "cpu")
    rows = time_forms(asked, scale, "mlp", 0.5, ["ours-c4", "auto", "fb-overlap"], 5)
    # An MLP alone has no other micro-batch to overlap with.
    names = ["compute", "p2p", "ours-c4", "auto"]
    assert [row["form"] for row in rows] == names
    assert asked.calls[0] == ("set_up", None), "real GEMMs: a core for each rank"
    rate = WORKS["mlp"].bytes_per_pair(scale) / (0.5 * 0.1)
    paced = [argument for _, argument in asked.of("pace")]
    assert paced == [pytest.approx(rate), None]
    order = [method for method, _ in asked.calls]
    assert order[:4] == ["set_up", "round", "pace", "messages"]
    assert order[4:] == [*["check"] * 3, *["round"] * 5, "pace"]
    drawn = asked.orders[1:]
    assert all(sorted(names_of) == sorted(names) for names_of in drawn)
    assert len(set(map(tuple, drawn))) > 1
    ours = rows[2]
    assert (ours["seconds"], ours["difference"]) == ([0.12] * 5, 1e-6)
    # The mean of both ranks.
    assert ours["blocked"] == pytest.approx([0.009] * 5)
    # A message of a twentieth of a second took a sixteenth.
    assert ours["reached"] == pytest.approx(min(rate / 20, 1 << 24) / 0.0625 / rate)


def test_more_ranks_than_cores_sleep_and_devices_keep_their_links(monkeypatch) -> None:
    monkeypatch.setattr(rounds.os, "cpu_count", lambda: 1)
    asked = Asked()
    rows = time_forms(asked, Scale.of(CONFIG, 2, "cpu"), "micro-batches", 0.0, ["fb-overlap"], 1)
    assert asked.calls[0] == ("set_up", 15.0)
    assert [row["form"] for row in rows] == ["compute", "p2p", "fb-overlap"]
    assert not asked.of("pace", "messages")
    asked = Asked()
    (row, *_) = time_forms(asked, Scale.of(CONFIG, 2, "npu"), "mlp", None, [], 1)
    assert asked.calls[0] == ("set_up", None)
    assert not asked.of("pace", "messages")
    assert (row["ratio"], row["reached"]) == (None, None)


def test_links_that_get_no_rate_are_an_error_with_a_way_out() -> None:
    asked = Asked("the kernel refuses")
    with pytest.raises(RanksError, match=r"rate: the kernel refuses; run on .* --ratios 0"):
        time_forms(asked, Scale.of(CONFIG, 2, "cpu"), "mlp", 1.0, [], 1)


# ------------------------------------------------------------------- figures and report


def test_forms_have_a_verdict_and_a_row_per_ratio() -> None:
    rows = [*timed(0.5, auto=[0.11] * 3), *timed(None, "layers", megatron=[0.1] * 3)]
    verdicts, table = forms_report(rows)
    assert verdicts == [
        "**An MLP**, ratio 0.5: times as fast as `p2p`: `auto` 1.82; the fastest other, "
        "`slices-4`, 0.80.",
        "**Two layers**: times as fast as `p2p`: `ours-c4` 1.67; the fastest other, "
        "`megatron`, 2.00.",
    ]
    assert [line for line in table if line.startswith(("| mlp", "| layers"))] == [
        "| mlp | 0.5 | p2p | 1.00x | - | - | equal |",
        "| mlp | 0.5 | slices-4 | 0.80x | -50 % | -25 % | equal |",
        "| mlp | 0.5 | ours-c4 | 1.67x | 80 % | 40 % | equal |",
        "| mlp | 0.5 | **auto** | 1.82x | 90 % | 45 % | 2.5e-06 |",
        # Links without a given rate have no share of it.
        "| layers | - | p2p | 1.00x | - | - | equal |",
        "| layers | - | slices-4 | 0.80x | - | - | equal |",
        "| layers | - | ours-c4 | 1.67x | - | - | equal |",
        "| layers | - | auto | 1.33x | - | - | equal |",
        "| layers | - | **megatron** | 2.00x | - | - | equal |",
    ]
    assert "A message alone reached at least 96 % of the rate that links were given." in table
    _, table = forms_report(timed(0.0))
    assert "| mlp | 0 | slices-4 | 0.80x | - | - | equal |" in table
    # The reference takes no longer than the computation: nothing to remove.
    _, table = forms_report(timed(p2p=[0.09] * 3))
    assert "| mlp | 1 | ours-c4 | 0.75x | - | -33 % | equal |" in table
    ((line,), _) = forms_report([row for row in timed() if row["form"] in ("compute", "p2p")])
    assert line.endswith(": no form of ours was measured; no other was measured.")
    assert forms_report([]) == ([], [])


# ------------------------------------------------------------------- trainings

FORM = {form.name: form for form in FORMS}


def training(
    name: str, ms: float, weights: str | None = "a", off: float = 0.0, spread: float = 0.01
) -> Training:
    """Ten iterations, the first ones slow; ``off`` is added to the losses."""
    steady = [ms * (1 + spread * (i % 3 - 1)) for i in range(10 - WARM_UP)]
    return Training(
        FORM[name],
        losses=[10 - 0.1 * i + off for i in range(10)],
        milliseconds=[50 * ms] * WARM_UP + steady,
        peak=51200.0,
        weights=None if weights is None else weights * 64,
    )


def failed(name: str) -> Training:
    why = "exit code 1 (x.log)\nTraceback\nOSError: no liblcal.so"
    return Training(FORM[name], failed=why)


SLOW, OURS = training("megatron", 900), training("commfuse", 800)
SUMS_CHANGE = "their bits differ: sums of this launch change from run to run"


@pytest.mark.parametrize(
    ("trainings", "wanted", "unwanted"),
    [
        ([training("plain", 1000), SLOW, training("commfuse", 700, "b", 1e-6),
          training("mc2", 750, "c", 1e-3), failed("coc")],
         ["Use --use-commfuse: 700 ms per iteration, 30.0 % shorter than plain collectives, 22.2 % "
          "shorter than Megatron's order, 6.7 % shorter than MC2.",
          "The same weights, bit for bit: plain collectives; Megatron's order.",
          "Could not run: CoC in 4 slices: exit code 1 (x.log); OSError: no liblcal.so"], "Do not"),
        # A faster rival is recommended.
        ([SLOW, OURS, training("mc2", 600, "b")],
         ["Use --use-ascend-mc2: 600 ms per iteration, 33.3 % shorter than Megatron's order, 25.0 "
          "% shorter than CommFuse's fused layers."], SUMS_CHANGE),
        # Plain collectives are never recommended.
        ([training("plain", 500), training("megatron", 600), training("commfuse", 700)],
         ["Use none of these flags: 600 ms per iteration, 20.0 % longer than plain"], SUMS_CHANGE),
        ([training("megatron", 101, spread=0.1), training("commfuse", 100, spread=0.1)],
         ["Not decided; fastest is --use-commfuse: 100 ms per iteration, 1.0 %",
          "Quartiles overlap with those of: Megatron's order."], SUMS_CHANGE),
        ([OURS, failed("megatron")],
         ["Not decided; fastest is --use-commfuse: 800 ms per iteration."], "Quartiles"),
        # Other losses.
        *(([SLOW, training("mc2", 700, "b", off), OURS],
           ["Use --use-commfuse: 800 ms",
            "Do not use: MC2: losses are not those of Megatron's order"], SUMS_CHANGE)
          for off in (0.2, math.nan)),
        ([training("megatron", 900, off=math.nan), OURS],
         ["Do not use: Megatron's order; CommFuse's fused layers: losses"], "Use --"),
        # Weights that differ or are unknown.
        ([training("plain", 900, "a"), training("megatron", 900, "b")], [SUMS_CHANGE],
         "same weights"),
        ([training("megatron", 900, None), training("commfuse", 800, None)], ["Use --use-c"],
         "bit for bit"),
    ],
)  # fmt: skip
def test_the_verdict(trainings: list[Training], wanted: list[str], unwanted: str) -> None:
    text = "\n".join(verdict(trainings)).replace("*", "").replace("`", "")
    assert text.startswith(wanted[0]) or wanted[0] == SUMS_CHANGE
    assert all(line in text for line in wanted)
    assert unwanted not in text


def test_a_row_per_form() -> None:
    forms = training("megatron", 1000), training("commfuse", 700, "b", 1)
    _, heads, first, second = launch_table(forms)
    head = heads.splitlines()[0]
    row = dict(zip(head.split(" | "), second.split(" | "), strict=True))
    assert (row["ms"], row["against Megatron's order"]) == ("700.0", "-30.0 %")
    assert (row["losses off"], row["most memory"]) == ("1.1e-01", "50.00 GiB")
    assert second.endswith("| `bbbbbbbb` |")
    assert first.count("|") == head.count("|")
