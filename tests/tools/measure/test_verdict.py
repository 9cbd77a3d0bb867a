"""What is said of trainings: the fastest, the flags, the bits, and what could not be run."""

from __future__ import annotations

import math

import pytest

from commfuse_npu.tools.measure.forms import FORMS
from commfuse_npu.tools.measure.training_log import TrainingLog
from commfuse_npu.tools.measure.trainings import Training
from commfuse_npu.tools.measure.verdict import WARM_UP, iterations, picture, table, verdict

FORM = {form.name: form for form in FORMS}


def training(
    name: str, ms: float, weights: str | None = "a", off: float = 0.0, spread: float = 0.01
) -> Training:
    """Ten iterations, the first ones slow; ``off`` is added to the losses."""
    steady = [ms * (1 + spread * (i % 3 - 1)) for i in range(10 - WARM_UP)]
    log = TrainingLog(
        losses=[10 - 0.1 * i + off for i in range(10)],
        grad_norms=[2.5] * 10,
        teraflops=[1000 / ms] * 10,
        milliseconds=[50 * ms] * WARM_UP + steady,
        peak=51200.0,
        weights=None if weights is None else weights * 64,
    )
    return Training(FORM[name], log)


def failed(name: str) -> Training:
    return Training(FORM[name], None, "exit code 1 (x.log)\nTraceback\nOSError: no liblcal.so")


def said(*trainings: Training, device: str = "npu") -> str:
    return "\n".join(verdict(trainings, device)).replace("*", "").replace("`", "")


def test_the_fastest_is_to_be_used_and_compared() -> None:
    text = said(
        training("plain", 1000),
        training("megatron", 900),
        training("commfuse", 800),
        training("flow", 700, "b", 1e-6),
        training("mc2", 750, "c", 1e-3),
        failed("coc"),
    )
    assert text.splitlines() == [
        "Use --use-commfuse --commfuse-flow 4 --transformer-impl local: 700 ms per iteration, "
        "30.0 % shorter than plain collectives, 22.2 % shorter than Megatron's order, 6.7 % "
        "shorter than MC2.",
        "The same weights, bit for bit, after 10 iterations: plain collectives; Megatron's order; "
        "CommFuse, operator by operator.",
        "Beside Megatron's order: CommFuse, a flow of 4: losses differ by 1.1e-07 at most "
        "(relative), other weights.",
        "Beside Megatron's order: MC2: losses differ by 1.1e-04 at most (relative), other weights.",
        "Could not run: CoC in 4 slices: exit code 1 (x.log); OSError: no liblcal.so",
    ]


def test_a_rival_that_is_faster_is_named_and_ours_beside_it() -> None:
    text = said(training("megatron", 900), training("commfuse", 800), training("mc2", 600, "b"))
    assert "Use --use-ascend-mc2: 600 ms per iteration, 33.3 % shorter than Megatron's" in text
    assert "25.0 % shorter than CommFuse, operator by operator." in text
    assert "Best of ours: CommFuse, operator by operator, 800 ms: 33.3 % longer than MC2." in text


def test_megatrons_order_needs_no_flags() -> None:
    text = said(training("plain", 500), training("megatron", 600), training("commfuse", 700))
    # Plain collectives are no launch of anybody.
    assert "Use none of these flags: 600 ms per iteration, 20.0 % longer than plain" in text


def test_quartiles_that_overlap_tell_nothing() -> None:
    text = said(training("megatron", 101, spread=0.1), training("commfuse", 100, spread=0.1))
    assert (
        "Quartiles of 7 iterations do not tell CommFuse, operator by operator apart from: "
        "Megatron's order." in text
    )
    assert text.startswith("Not decided; fastest is --use-commfuse: 100 ms per iteration, 1.0 %")
    apart = said(training("megatron", 200), training("commfuse", 100))
    assert "do not tell" not in apart
    assert apart.startswith("Use --use-commfuse: ")


@pytest.mark.parametrize("off", [0.2, math.nan, math.inf])
def test_a_form_with_other_losses_is_not_to_be_used(off: float) -> None:
    text = said(
        training("megatron", 900), training("flow", 700, "b", off), training("commfuse", 800)
    )
    assert text.startswith("Use --use-commfuse: 800 ms")
    assert (
        "Not to be used: CommFuse, a flow of 4: losses are not those of Megatron's order." in text
    )
    assert "Best of ours" not in text


def test_of_one_form_nothing_is_decided() -> None:
    text = said(training("commfuse", 800), failed("megatron"))
    assert text.startswith("Not decided; fastest is --use-commfuse: 800 ms per iteration.")


def test_without_losses_there_is_no_advice() -> None:
    text = said(training("megatron", 900, off=math.nan), training("commfuse", 800))
    assert text.startswith(
        "Not to be used: Megatron's order; CommFuse, operator by operator: losses are not finite"
    )


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
    assert "Fastest to launch here: CommFuse, operator by operator: 800 ms" in text
    assert "says nothing of NPUs" in text
    assert "Use " not in text


def test_nothing_ran() -> None:
    assert said(failed("coc")).startswith("Could not run: CoC in 4 slices")
    assert verdict([], "npu") == []


def test_tables_and_picture() -> None:
    ran = [training("plain", 1000), training("flow", 700, "b")]
    shown = table(ran)
    flow = dict(zip(shown.head, shown.rows[1], strict=True))
    assert flow["flags"] == "`--use-commfuse --commfuse-flow 4 --transformer-impl local`"
    assert flow["ms per iteration"] == "700.0"
    assert flow["against plain collectives"] == "-30.0 %"
    assert flow["most memory"] == "50.00 GiB"
    assert flow["weights"] == "`bbbbbbbb`"
    # What nobody has, has no column.
    assert "flags" not in table(ran[:1]).head
    assert [len(one.rows) for one in iterations(ran)] == [10, 10, 10]
    assert "CommFuse, a flow of 4: 700 ms" in str(picture(ran).chart["description"])
