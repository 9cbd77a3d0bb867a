"""Sizes of what is measured, and the verdict on trainings."""

import math
from dataclasses import replace
from itertools import product

import pytest

from commfuse_npu.tools.config_file import find_config
from commfuse_npu.tools.measure.measured_launches import FORMS, WARM_UP, MeasuredTraining
from commfuse_npu.tools.measure.measuring_steps import Scale
from commfuse_npu.tools.measure.report import launch_table, verdict

CONFIG = find_config("llama3_8b")


def test_layers_of_a_scale_can_be_shared_by_the_ranks() -> None:
    for ranks, shrink in product((2, 3, 4), (4, 8, 32)):
        scale = replace(Scale.of(CONFIG, ranks, "cpu"), shrink=shrink)
        widths = scale.hidden, scale.ffn, scale.heads, scale.groups
        assert all(width > 0 and width % ranks == 0 for width in widths)
        assert (scale.heads % scale.groups, scale.head) == (0, 128)
    cpu, npu = (Scale.of(CONFIG, 8, device) for device in ("cpu", "npu"))
    assert (cpu.rows, npu.rows) == (512, 8192)
    sizes = {"qkv": (512, 384), "proj": (128, 512), "fc1": (512, 448), "fc2": (224, 512)}
    assert cpu.layers() == sizes
    sizes = {"qkv": (4096, 768), "proj": (512, 4096), "fc1": (4096, 3584), "fc2": (1792, 4096)}
    assert npu.layers() == sizes
    assert cpu.halves(4) == [512, 256, 128, 64]
    assert replace(cpu, rows=40).halves(4) == [40, 20]


# ------------------------------------------------------------------- trainings


def training(
    name: str, ms: float, weights: str | None = "a", off: float = 0.0, spread: float = 0.01
) -> MeasuredTraining:
    """Ten iterations, the first ones slow; ``off`` is added to the losses."""
    steady = [ms * (1 + spread * (i % 3 - 1)) for i in range(10 - WARM_UP)]
    return MeasuredTraining(
        FORMS[f"launch_{name}"],
        losses=[10 - 0.1 * i + off for i in range(10)],
        milliseconds=[50 * ms] * WARM_UP + steady,
        peak=51200.0,
        weights=None if weights is None else weights * 64,
    )


def failed(name: str) -> MeasuredTraining:
    why = "exit code 1 (x.log)\nTraceback\nOSError: no liblcal.so"
    return MeasuredTraining(FORMS[f"launch_{name}"], failed=why)


SLOW, OURS = training("megatron", 900), training("commfuse", 800)
SUMS_CHANGE = "their bits differ: sums of this launch change from run to run"


@pytest.mark.parametrize(
    ("trainings", "wanted", "unwanted"),
    [
        ([training("plain", 1000), SLOW, training("commfuse", 700, "b", 1e-6),
          training("mc2", 750, "c", 1e-3), failed("coc")],
         ["Use --use-commfuse: 700 ms per iteration, 30.0 % less time than blocking collectives, "
          "22.2 % less time than Megatron's order, 6.7 % less time than MC2.",
          "The same weights, bit for bit: blocking collectives; Megatron's order.",
          "Could not run: CoC in 4 slices: exit code 1 (x.log); OSError: no liblcal.so"], "Do not"),
        # A faster rival is recommended.
        ([SLOW, OURS, training("mc2", 600, "b")],
         ["Use --use-ascend-mc2: 600 ms per iteration, 33.3 % less time than Megatron's order, "
          "25.0 % less time than fused layers."], SUMS_CHANGE),
        # Blocking collectives are never recommended.
        ([training("plain", 500), training("megatron", 600), training("commfuse", 700)],
         ["Use none of these flags: 600 ms per iteration, -20.0 % less time than blocking"],
         SUMS_CHANGE),
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
         ["Do not use: Megatron's order; fused layers: losses"], "Use --"),
        # Weights that differ or are unknown.
        ([training("plain", 900, "a"), training("megatron", 900, "b")], [SUMS_CHANGE],
         "same weights"),
        ([training("megatron", 900, None), training("commfuse", 800, None)], ["Use --use-c"],
         "bit for bit"),
    ],
)  # fmt: skip
def test_the_verdict(trainings: list[MeasuredTraining], wanted: list[str], unwanted: str) -> None:
    text = "\n".join(verdict(trainings)).replace("*", "").replace("`", "")
    assert text.startswith(wanted[0]) or wanted[0] == SUMS_CHANGE
    assert all(line in text for line in wanted)
    assert unwanted not in text


def test_a_row_per_form() -> None:
    forms = training("megatron", 1000), training("commfuse", 700, "b", 1)
    _, heads, first, second = launch_table(forms)
    head = heads.splitlines()[0]
    row = dict(zip(head.split(" | "), second.split(" | "), strict=True))
    assert (row["ms"], row["less time than Megatron's order"]) == ("700.0", "30.0 %")
    assert (row["losses off"], row["most memory"]) == ("1.1e-01", "50.00 GiB")
    assert second.endswith("| `bbbbbbbb` |")
    assert first.count("|") == head.count("|")
