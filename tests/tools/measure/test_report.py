"""What is said of trainings: the fastest, the flags, the bits, and what could not be run."""

from __future__ import annotations

import math

import pytest

from commfuse_npu.tools.measure.forms import FORMS
from commfuse_npu.tools.measure.report import launch_table, verdict
from commfuse_npu.tools.measure.trainings import WARM_UP, Training, TrainingLog

FORM = {form.name: form for form in FORMS}


def training(
    name: str, ms: float, weights: str | None = "a", off: float = 0.0, spread: float = 0.01
) -> Training:
    """Ten iterations, the first ones slow; ``off`` is added to the losses."""
    steady = [ms * (1 + spread * (i % 3 - 1)) for i in range(10 - WARM_UP)]
    log = TrainingLog(
        losses=[10 - 0.1 * i + off for i in range(10)],
        milliseconds=[50 * ms] * WARM_UP + steady,
        peak=51200.0,
        weights=None if weights is None else weights * 64,
    )
    return Training(FORM[name], log)


def failed(name: str) -> Training:
    return Training(
        FORM[name], TrainingLog(), "exit code 1 (x.log)\nTraceback\nOSError: no liblcal.so"
    )


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


def test_a_rival_that_is_faster_is_recommended_and_ours_beside_it() -> None:
    text = said(training("megatron", 900), training("commfuse", 800), training("mc2", 600, "b"))
    assert "Use --use-ascend-mc2: 600 ms per iteration, 33.3 % shorter than Megatron's" in text
    assert "Best of CommFuse: CommFuse's fused layers: 33.3 % longer than MC2." in text


def test_plain_collectives_are_no_launch_of_anybody() -> None:
    text = said(training("plain", 500), training("megatron", 600), training("commfuse", 700))
    assert "Use none of these flags: 600 ms per iteration, 20.0 % longer than plain" in text


def test_nothing_is_decided_where_quartiles_overlap_or_one_form_ran() -> None:
    text = said(training("megatron", 101, spread=0.1), training("commfuse", 100, spread=0.1))
    assert text.startswith("Not decided; fastest is --use-commfuse: 100 ms per iteration, 1.0 %")
    assert "Quartiles overlap with those of: Megatron's order." in text
    text = said(training("commfuse", 800), failed("megatron"))
    assert text.startswith("Not decided; fastest is --use-commfuse: 800 ms per iteration.")


@pytest.mark.parametrize("off", [0.2, math.nan, math.inf])
def test_a_form_with_other_losses_is_not_recommended(off: float) -> None:
    forms = training("megatron", 900), training("mc2", 700, "b", off), training("commfuse", 800)
    text = said(*forms)
    assert text.startswith("Use --use-commfuse: 800 ms")
    assert "Do not use: MC2: losses are not those of Megatron's order" in text
    assert "Best of" not in text


def test_without_losses_there_is_no_advice() -> None:
    text = said(training("megatron", 900, off=math.nan), training("commfuse", 800))
    assert text.startswith("Do not use: Megatron's order; CommFuse's fused layers: losses")


def test_a_launch_whose_sums_change_is_told() -> None:
    runs = training("plain", 900, "a"), training("megatron", 900, "b")
    assert "their bits differ: sums of this launch change from run to run" in said(*runs)
    # There GEMMs of another size may round in another way.
    assert "change from run to run" not in said(*runs, device="cpu")
    assert "change from run to run" not in said(training("megatron", 900))


def test_weights_that_are_not_known_are_not_the_same() -> None:
    text = said(training("megatron", 900, None), training("commfuse", 800, None))
    assert "bit for bit" not in text


def test_a_cpu_says_nothing_of_npus() -> None:
    text = said(training("megatron", 900), training("commfuse", 800), device="cpu")
    assert text.startswith("Fastest here, which says nothing of NPUs: CommFuse's fused")
    assert "Use " not in text


def test_a_row_per_form() -> None:
    forms = training("megatron", 1000), training("commfuse", 700, "b", 1)
    _, heads, first, second = launch_table(forms)
    head = heads.splitlines()[0]
    row = dict(zip(head.split(" | "), second.split(" | "), strict=True))
    assert row["ms"] == "700.0"
    assert row["against Megatron's order"] == "-30.0 %"
    assert row["losses off"] == "1.1e-01"
    assert row["most memory"] == "50.00 GiB"
    assert second.endswith("| `bbbbbbbb` |")
    assert first.count("|") == head.count("|")
