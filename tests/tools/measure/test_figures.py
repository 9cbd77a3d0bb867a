"""Figures of a machine are recovered from the times it would give; the docs list each figure."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_npu.tools.config_file import find_config
from commfuse_npu.tools.hardware.description import Hardware
from commfuse_npu.tools.measure.figures import description, figures

NPU, CPU = (
    Hardware.load(find_config(name, "hardware")) for name in ("ascend_910b_server", "cpu_paced")
)
CUBE, MEMORY, LINK = map(NPU.typical, ("npu.cube_flops", "npu.hbm_bandwidth", "inside.rate"))
LAYERS = {"qkv": (4096, 768), "proj": (512, 4096), "fc1": (4096, 3584), "fc2": (1792, 4096)}
SIZE = 1 << 26
NOISE = 1.5, 1.0, 1.25
share = st.floats(0.1, 1.0)


def step(seconds: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows by what is timed: in one time, or in one per call."""
    return [
        {"what": what, "bytes": SIZE, "peers": 7, "numbers": SIZE,
         "seconds": time if isinstance(time, list) else [time] * 3}
        for what, time in seconds.items()
    ]  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(
    base=st.sampled_from([NPU, replace(NPU, topologies={"inside": "switched"}), CPU]),
    gemm=share, attention=share, memory=share, link=share, slowdown=st.floats(0.0, 0.8),
    copies=st.floats(0.0, 3.5), slower=st.floats(1.0, 5.0), half=st.floats(16.0, 512.0),
    start=st.floats(1e-6, 1e-4),
)  # fmt: skip
def test_they_are_recovered(
    base: Hardware, gemm, attention, memory, link, slowdown, copies, slower, half, start
) -> None:
    known = base is not CPU
    machine = replace(
        base.machine(), cube_flops=CUBE, gemm_efficiency=gemm, half_rows=half,
        gemm_start=start * known, hbm_bandwidth=1e30,
    )  # fmt: skip
    bandwidth, rate = memory * MEMORY, link * LINK
    # One link is shared by the messages to all peers, or each has its own.
    wire = SIZE * (7 if base.topologies["inside"] == "switched" else 1) / rate
    buffered = 4 * SIZE * copies / bandwidth if known else 0.0
    beside = 1e-3 / (1 - slowdown)
    exchange = 2 * beside  # of it ``beside / slower`` runs beside the work, which ends first
    measured = {
        "gemms": [
            {"layer": layer, "rows": rows, "inputs": inputs, "outputs": outputs,
             "seconds": [machine.gemm(rows, inputs, outputs)] * 3}
            for layer, (inputs, outputs) in LAYERS.items()
            for rows in (8192, 4096, 2048, 1024, 512, 256)
        ],
        "links": step({"half a ping-pong": [2e-6 * n for n in NOISE], "messages": wire + buffered}),
        # Other collectives are slower and are ignored.
        "collectives": step({"reduce-scatter": 1.0, "all-gather": wire}),
        "memory": step({"copy": 4 * SIZE / bandwidth}),
        # On a CPU no GEMM is launched.
        "host": step({"post": 8e-5, "GEMM": start} if known else {"post": 8e-5}),
        "beside": step({"gemm": 1e-3, "exchange": exchange, "gemm beside": beside,
                        "both": beside + exchange - beside / slower}),
        # Causal, two products; half of the queries are half as fast.
        "attention": [
            {"queries": queries, "keys": 8192, "heads": 2, "of": 64, "seconds": [
                4 * 2 * 64 * queries * (8192 - (queries - 1) / 2) / (attention * gemm * CUBE)
                * (1 + known * half / queries) * n
                for n in NOISE
            ]}
            for queries in (8192, 4096, 2048, 1024)
        ],
    }  # fmt: skip
    of_attention = attention * gemm if known else attention
    expected = {
        "npu.gemm_efficiency": [gemm if known else 1.0] * 3,
        "npu.cube_flops": [CUBE if known else gemm * CUBE] * 3,
        "npu.hbm_efficiency": [memory if known else 1.0] * 3,
        "npu.hbm_bandwidth": [MEMORY if known else bandwidth] * 3,
        "inside.efficiency": [link if known else 1.0] * 3,
        "inside.rate": [LINK if known else rate] * 3,
        "inside.latency": [2.25e-6, 2.5e-6, 2.75e-6],
        "npu.transfer_slowdown": [slowdown] * 3,
        "npu.attention_efficiency": [of_attention * n for n in (0.5 * (1 / 1.5 + 0.8), 0.8, 0.9)],
        "npu.half_rows": [half] * 3,
        "host.post_overhead": [8e-5] * 3,
        "host.launch_overhead": [start if known else 8e-5] * 3,
    }
    if known:
        expected |= {"npu.gemm_start": [start] * 3, "host.message_copies": [copies] * 3,
                     "inside.beside_work": [slower] * 3}  # fmt: skip
    values = figures(measured, base)
    assert values.keys() == expected.keys()
    for name, three in expected.items():
        assert values[name] == pytest.approx(tuple(three), rel=1e-4, abs=1e-9), name


def test_the_rate_without_the_collectives_includes_copies() -> None:
    links = step({"half a ping-pong": 1e-6, "messages": SIZE / 1.4e10})
    values = figures({"links": links}, NPU)
    assert values["host.message_copies"] == (0.0,) * 3
    assert values["inside.efficiency"] == pytest.approx((0.5,) * 3)
    # On a CPU it always does.
    steps = {"links": links, "collectives": step({"all-gather": SIZE / 2e10})}
    values = figures({**steps, "memory": step({"copy": 1.0})}, CPU)
    assert values["inside.rate"] == pytest.approx((1.4e10,) * 3)
    assert "host.message_copies" not in values


@pytest.mark.parametrize(
    ("both", "slower"),
    [
        (1.9e-3, 1.0),
        (4e-3, 10.0),  # no part of the exchange runs beside work
        (1.26e-3, None),  # the GEMM outlasts it, so its time is not known
    ],
)
def test_a_transfer_beside_work(both: float, slower: float | None) -> None:
    times = step({"gemm": 1e-3, "exchange": 2e-3, "gemm beside": 1.25e-3, "both": both})
    values = figures({"beside": times}, NPU)
    assert values.get("inside.beside_work") == (slower and (slower,) * 3)


def test_attention_is_fitted_with_relative_errors() -> None:
    rows = [
        {"queries": queries, "keys": 4096, "heads": 8, "of": 128, "seconds": [seconds]}
        for queries, seconds in ((4096, 3e-6), (1024, 1e-6), (256, 7e-7))
    ]
    # 405.3 with the same weight for each.
    assert figures({"attention": rows}, NPU)["npu.half_rows"][1] == pytest.approx(374.126)


def test_the_description_has_the_cores_that_the_device_names(tmp_path: Path) -> None:
    path, reached = tmp_path / "measured.yaml", []
    attention = [{"queries": 64, "keys": 64, "heads": 1, "of": 64, "seconds": [1e-3]}]
    measured = {"host": step({"post": 2e-5}), "attention": attention}
    for cores in (None, 24):  # 24: a 910B2, of which the description says 354 TFLOPS
        facts = {"cube cores": cores, "device bytes": None}
        path.write_text(description(NPU, "here", measured, facts, "Measured here"), "utf-8")
        hardware = Hardware.load(path)
        named = {"npu.cores", "npu.cube_flops"} if cores else set()
        changed = {key for key in NPU.figures if hardware.figures[key] != NPU.figures[key]}
        of_host = {"host.launch_overhead", "host.post_overhead"}
        assert changed == of_host | {"npu.attention_efficiency", "npu.half_rows"} | named
        reached.append(hardware.typical("npu.attention_efficiency"))
    assert reached[1] == pytest.approx(reached[0] * 20 / 24)
    assert hardware.machine().cores == 24
    assert hardware.typical("npu.cube_flops") == pytest.approx(CUBE * 24 / 20)
    assert hardware.figures["npu.cores"].source == "Measured here"


def test_every_figure_has_a_row_in_the_docs() -> None:
    text = (Path(__file__).parents[3] / "docs" / "measure.md").read_text("utf-8")
    rows = re.findall(r"^\| (`\w+\.\w+`.*?) \| .* \|$", text, re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+\.\w+)`", row)]
    assert sorted(listed) == sorted(NPU.figures)
