"""The report on trainings: the fastest, its flags, the bits, and forms that could not run."""

from __future__ import annotations

import math

import pytest

from commfuse_npu.tools.measure.launches import FORMS, WARM_UP, Training
from commfuse_npu.tools.measure.report import launch_table, verdict

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


def said(*trainings: Training, device: str = "npu") -> str:
    return "\n".join(verdict(trainings, device)).replace("*", "").replace("`", "")


def test_the_fastest_is_recommended_and_compared() -> None:
    text = said(
        training("plain", 1000),
        training("megatron", 900),
        training("commfuse", 700, "b", 1e-6),
        training("mc2", 750, "c", 1e-3),
        failed("coc"),
    )
    assert text.splitlines() == [
        "Use --use-commfuse: 700 ms per iteration, 30.0 % shorter than plain collectives, 22.2 % "
        "shorter than Megatron's order, 6.7 % shorter than MC2.",
        "The same weights, bit for bit: plain collectives; Megatron's order.",
        "Could not run: CoC in 4 slices: exit code 1 (x.log); OSError: no liblcal.so",
    ]


SLOW, OURS = training("megatron", 900), training("commfuse", 800)
SUMS_CHANGE = "their bits differ: sums of this launch change from run to run"


@pytest.mark.parametrize(
    ("trainings", "device", "wanted", "unwanted"),
    [
        # A faster rival is recommended.
        ([SLOW, OURS, training("mc2", 600, "b")], "npu",
         ["Use --use-ascend-mc2: 600 ms per iteration, 33.3 % shorter than Megatron's order, 25.0 "
          "% shorter than CommFuse's fused layers."], SUMS_CHANGE),
        # Plain collectives are never recommended.
        ([training("plain", 500), training("megatron", 600), training("commfuse", 700)], "npu",
         ["Use none of these flags: 600 ms per iteration, 20.0 % longer than plain"], SUMS_CHANGE),
        ([training("megatron", 101, spread=0.1), training("commfuse", 100, spread=0.1)], "npu",
         ["Not decided; fastest is --use-commfuse: 100 ms per iteration, 1.0 %",
          "Quartiles overlap with those of: Megatron's order."], SUMS_CHANGE),
        ([OURS, failed("megatron")], "npu",
         ["Not decided; fastest is --use-commfuse: 800 ms per iteration."], "Quartiles"),
        # Other losses.
        *(([SLOW, training("mc2", 700, "b", off), OURS], "npu",
           ["Use --use-commfuse: 800 ms",
            "Do not use: MC2: losses are not those of Megatron's order"], SUMS_CHANGE)
          for off in (0.2, math.nan)),
        ([training("megatron", 900, off=math.nan), OURS], "npu",
         ["Do not use: Megatron's order; CommFuse's fused layers: losses"], "Use --"),
        # Weights that differ or are unknown; on a CPU GEMMs may round in another way.
        ([training("plain", 900, "a"), training("megatron", 900, "b")], "npu", [SUMS_CHANGE],
         "same weights"),
        ([training("plain", 900, "a"), training("megatron", 900, "b"), OURS], "cpu",
         ["Fastest on this CPU, which says nothing about NPUs: CommFuse's fused"], SUMS_CHANGE),
        ([training("megatron", 900, None), training("commfuse", 800, None)], "npu", ["Use --use-c"],
         "bit for bit"),
    ],
)  # fmt: skip
def test_the_verdict(
    trainings: list[Training], device: str, wanted: list[str], unwanted: str
) -> None:
    text = said(*trainings, device=device)
    assert text.startswith(wanted[0]) or wanted[0] == SUMS_CHANGE
    assert all(line in text for line in wanted)
    assert unwanted not in text
    assert device == "npu" or "Use " not in text


def test_a_row_per_form() -> None:
    forms = training("megatron", 1000), training("commfuse", 700, "b", 1)
    _, heads, first, second = launch_table(forms)
    head = heads.splitlines()[0]
    row = dict(zip(head.split(" | "), second.split(" | "), strict=True))
    assert (row["ms"], row["against Megatron's order"]) == ("700.0", "-30.0 %")
    assert (row["losses off"], row["most memory"]) == ("1.1e-01", "50.00 GiB")
    assert second.endswith("| `bbbbbbbb` |")
    assert first.count("|") == head.count("|")
