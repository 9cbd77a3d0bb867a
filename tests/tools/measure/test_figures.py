"""Figures of a machine are recovered from the times it would give; the docs list each figure."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commfuse_npu.config_file import find_config
from commfuse_npu.hardware.description import Hardware
from commfuse_npu.hardware.machine import Machine
from commfuse_npu.tools.measure.figures import Peaks, description, figures
from commfuse_npu.tools.quartiles import quartiles

NOISE = 1.0, 1.25, 1.5
NPU, CPU = Peaks(20, 3e14, 1.6e12, 2.8e10), Peaks(0, 0.0, 0.0, 0.0)
LAYERS = {"qkv": (4096, 768), "proj": (512, 4096), "fc1": (4096, 3584), "fc2": (1792, 4096)}


def machine(name: str, **figures: Any) -> Machine:
    loaded = Hardware.load(find_config(name, "hardware")).machine()
    # Memory is never the bottleneck.
    return replace(loaded, hbm_bandwidth=1e18, **figures)


def gemms(of: Machine) -> list[dict[str, Any]]:
    return [
        {"layer": layer, "rows": rows, "inputs": inputs, "outputs": outputs,
         "seconds": [of.gemm(rows, inputs, outputs)] * 3}
        for layer, (inputs, outputs) in LAYERS.items()
        for rows in (8192, 4096, 2048, 1024, 512, 256)
    ]  # fmt: skip


def test_gemms_give_efficiency_and_start_of_tiles_or_speed_and_half_rows() -> None:
    npu = machine("ascend_910b_server", gemm_efficiency=0.7, gemm_start=2e-5)
    peaks = Peaks(npu.cores, npu.cube_flops, 1e12, 2.8e10)
    values = figures({"gemms": gemms(npu)}, peaks)
    assert values["npu.gemm_efficiency"] == pytest.approx((0.7,) * 3, rel=1e-6)
    assert values["npu.gemm_start"] == pytest.approx((2e-5,) * 3, rel=1e-4)
    assert values["npu.cube_flops"] == (npu.cube_flops,) * 3
    cpu = machine("cpu_paced", cube_flops=5e10, half_rows=20.0)
    values = figures({"gemms": gemms(cpu)}, CPU)
    assert values["npu.cube_flops"] == pytest.approx((5e10,) * 3, rel=1e-6)
    assert values["npu.half_rows"] == pytest.approx((20.0,) * 3, rel=1e-4)
    assert values["npu.gemm_efficiency"] == (1.0, 1.0, 1.0)


def test_links() -> None:
    times = [
        {"what": "half a ping-pong", "seconds": [3e-6, 1e-6, 2e-6]},
        {"what": "messages", "bytes": 1 << 20, "peers": 7, "seconds": [(1 << 20) / 1.4e10] * 3},
    ]
    npu = figures({"links": times}, NPU)
    assert npu["inside.latency"] == pytest.approx((1.5e-6, 2e-6, 2.5e-6))
    assert npu["inside.efficiency"] == pytest.approx((0.5,) * 3)
    cpu = figures({"links": times}, CPU)
    assert cpu["inside.rate"] == pytest.approx((1.4e10,) * 3)
    # Through a switch all lanes share one link.
    npu = figures({"links": times}, NPU._replace(link=1.96e11, switched=True))
    assert npu["inside.efficiency"] == pytest.approx((7 * 1.4e10 / 1.96e11,) * 3)


@pytest.mark.parametrize("copies", [0.0, 0.5, 1.0])
def test_copies_are_what_lanes_take_besides_the_wire(copies: float) -> None:
    npu = machine("ascend_910b_server", message_copies=copies)
    npu = replace(npu, hbm_bandwidth=8e11)
    size = 1 << 26
    wire = size / npu.inside.rate
    seconds = [wire + npu.buffered(size)] * 3
    messages = {"what": "messages", "bytes": size, "peers": 7, "seconds": seconds}
    gather = {"what": "all-gather", "bytes": size, "seconds": [wire] * 3}
    measured = {
        "links": [{"what": "half a ping-pong", "seconds": [1e-6]}, messages],
        # Other collectives are slower and are ignored.
        "collectives": [{**gather, "what": "reduce-scatter", "seconds": [1.0]}, gather],
        "memory": [{"what": "copy", "numbers": 1000, "seconds": [4000 / 8e11]}],
    }
    values = figures(measured, NPU)
    assert values["host.message_copies"] == pytest.approx((copies,) * 3, abs=1e-9)
    assert values["inside.efficiency"] == pytest.approx((npu.inside.rate / 2.8e10,) * 3)
    # Without the collectives the rate includes the copies.
    del measured["collectives"]
    values = figures(measured, NPU)
    assert values["host.message_copies"] == (0.0,) * 3
    assert values["inside.efficiency"][1] == pytest.approx(size / seconds[0] / 2.8e10)


def test_the_host_posts_a_step_or_its_two_operations() -> None:
    for seconds, post, launch in (
        ({"batch": 8e-5}, 8e-5, 8e-5),
        ({"batch": 8e-5, "single": 6e-5}, 3e-5, 3e-5),
        ({"batch": 8e-5, "GEMM": 1e-5}, 8e-5, 1e-5),
    ):
        rows = [{"what": kind, "seconds": [duration] * 3} for kind, duration in seconds.items()]
        values = figures({"host": rows}, CPU)
        assert values == {"host.post_overhead": (post,) * 3, "host.launch_overhead": (launch,) * 3}


def test_company() -> None:
    def beside(both: float) -> dict[str, Any]:
        seconds = {"gemm": 1e-3, "exchange": 2e-3, "gemm beside": 1.25e-3, "both": both}
        return {"beside": [{"what": kind, "seconds": [time]} for kind, time in seconds.items()]}

    # 1.25 ms beside work for the first 1 ms of the exchange, then the remaining 1 ms.
    values = figures(beside(2.25e-3), NPU)
    assert values["npu.transfer_slowdown"] == pytest.approx((0.2,) * 3)
    assert values["inside.beside_work"] == pytest.approx((1.25,) * 3)
    assert figures(beside(1.9e-3), NPU)["inside.beside_work"] == (1.0,) * 3
    # No part of the exchange runs beside work.
    assert figures(beside(4e-3), NPU)["inside.beside_work"] == (10.0,) * 3
    assert "inside.beside_work" not in figures(beside(2.25e-3), CPU)
    # The time of the transfer is unknown if the GEMM outlasts it.
    assert "inside.beside_work" not in figures(beside(1.26e-3), NPU)


def test_memory_and_attention() -> None:
    attention = {"queries": 4, "keys": 4, "heads": 2, "of": 8, "seconds": [1e-6]}
    measured = {
        "memory": [{"what": "copy", "numbers": 1000, "seconds": [1e-6]}],
        "attention": [attention, {**attention, "queries": 2, "seconds": [1.0]}],
    }
    values = figures(measured, Peaks(20, 1e9, 8e9, 1e9))
    assert values["npu.hbm_efficiency"] == pytest.approx((0.5,) * 3)
    # 1 + 2 + 3 + 4 keys seen, a product before the softmax and one after it.
    assert values["npu.attention_efficiency"] == pytest.approx((4 * 2 * 8 * 10 / 1e3,) * 3)
    without_gemms = figures({"attention": [attention]}, CPU)
    assert without_gemms == {}


def test_attention_of_fewer_queries_gives_half_rows() -> None:
    def seconds(queries: int, noise: float) -> float:
        # As LayerShape.attention of the simulator has it: 128 queries are half as fast.
        operations = 4 * 2 * 64 * queries * (8192 - (queries - 1) / 2)
        return noise * operations / 1e12 * (1 + 128 / queries)

    shape = {"keys": 8192, "heads": 2, "of": 64}
    times = [
        {**shape, "queries": queries, "seconds": [seconds(queries, noise) for noise in NOISE]}
        for queries in (8192, 4096, 2048, 1024)
    ]
    values = figures({"attention": times}, Peaks(20, 2e12, 1e12, 1e9))
    assert values["npu.half_rows"] == pytest.approx((128.0,) * 3)
    expected = quartiles([0.5 / noise for noise in NOISE])
    assert values["npu.attention_efficiency"] == pytest.approx(expected)


def test_the_description_has_the_cores_that_the_device_names(tmp_path: Path) -> None:
    name = "ascend_910b_server"
    base = Hardware.load(find_config(name, "hardware"))
    path, host = tmp_path / "measured.yaml", {"host": [{"what": "batch", "seconds": [2e-5]}]}
    for cores in (None, 24):  # 24: a 910B2, of which the description says 354 TFLOPS
        facts = {"cube cores": cores, "device bytes": None}
        path.write_text(description(name, "here", host, facts, "Measured here"), "utf-8")
        hardware = Hardware.load(path)
        named = {"npu.cores", "npu.cube_flops"} if cores else set()
        changed = {key for key in base.figures if hardware.figures[key] != base.figures[key]}
        assert changed == {"host.launch_overhead", "host.post_overhead"} | named
    assert hardware.machine().cores == 24
    peak = base.typical("npu.cube_flops")
    assert hardware.typical("npu.cube_flops") == pytest.approx(peak * 24 / 20)
    assert hardware.figures["npu.cores"].source == "Measured here"


def test_every_figure_has_a_row_in_the_docs() -> None:
    described = Hardware.load(find_config("ascend_910b_server", "hardware")).figures
    text = (Path(__file__).parents[3] / "docs" / "measure.md").read_text("utf-8")
    rows = re.findall(r"^\| (`\w+\.\w+`.*?) \| .* \|$", text, re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+\.\w+)`", row)]
    assert sorted(listed) == sorted(described)
