"""What a trace calls things, and lanes without holes or overlaps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commfuse_npu.config_file import find_config
from commfuse_npu.hardware.description import Hardware
from commfuse_npu.tools import cli
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate.lanes import lanes
from commfuse_npu.tools.simulate.names import name
from commfuse_npu.tools.simulate.step import Layout, Step
from commfuse_npu.tools.simulate.sweep import Options, of_hardware, training


@pytest.fixture(scope="module")
def step() -> Step:
    hardware = Hardware.load(find_config("ascend_910b_server", "hardware"))
    model = ModelConfig.load(find_config("llama3_8b"))
    return Step(hardware.machine(), training(model, Layout(4, 1, 1, 1), 4096, Options()))


def _names(step: Step, wanted: str, part: str, rank: int = 2) -> set[str]:
    hardware = Hardware.load(find_config("ascend_910b_server", "hardware"))
    every = of_hardware(hardware, Layout(4, 1, 1, 1), Options())
    variant = next(one for one in every if one.name == wanted)
    played = step.layer(variant, "forward" if part == "forward" else "backward")
    rank = min(rank, len(played.launches) - 1)
    return {name(span.operation) for span in played.timeline.spans if span.rank == rank}


def test_pieces_are_named_by_chunk_and_rank(step: Step) -> None:
    forward = _names(step, "commfuse-c2-l3", "forward")
    assert {"norm", "rotary", "attention", "SwiGLU", "residual"} <= forward
    assert {
        *("qkv GEMM, own block", "qkv GEMM, chunk 1 of ranks 0-1, 3"),
        *("qkv all-gather, chunk 0 of rank 2", "fc2 reduce-scatter, chunk 1 for rank 3"),
        *("fc2 GEMM, own block", "proj sum, chunk 0 for rank 2"),
    } <= forward
    backward = _names(step, "commfuse-c2-l3", "backward")
    assert {"fc2 dgrad, own block", "fc2 dgrad, chunk 0 of ranks 0-1, 3", "fc2 wgrad"} <= backward
    assert "fc2 all-gather of the gradient, chunk 1 of rank 2" in backward
    assert not any(
        "gemm" in said or said.endswith((" make", " use")) for said in forward | backward
    )


def test_one_rank_at_a_time_where_attention_is_split(step: Step) -> None:
    forward = _names(step, "commfuse-c4-l3-attention", "forward")
    assert "attention and proj, chunk 2 for rank 3" in forward
    backward = _names(step, "commfuse-c4-l3-attention", "backward")
    assert "proj and attention backward, chunk 2 of rank 3" in backward


def test_collectives_have_the_names_of_the_field(step: Step) -> None:
    assert {"qkv all-gather", "qkv GEMM", "proj reduce-scatter"} <= _names(
        step, "megatron", "forward"
    )
    assert {
        *("fc1 all-gather of the input, again", "fc1 reduce-scatter of dgrad", "fc1 dgrad"),
        *("fc1 wgrad", "fc2 all-gather of the gradient"),
    } <= _names(step, "megatron", "backward")


@pytest.mark.parametrize("wanted", ["plain-mesh", "megatron", "commfuse-c4-l3", "commfuse-fb"])
def test_work_and_waiting_fill_the_compute_lane(step: Step, wanted: str) -> None:
    hardware = Hardware.load(find_config("ascend_910b_server", "hardware"))
    every = of_hardware(hardware, Layout(4, 1, 1, 1), Options())
    variant = next(one for one in every if one.name == wanted)
    played = step.parts(variant)
    row = lanes(wanted, played)
    end = 1e3 * sum(one.seconds for _, one in played)
    at = 0.0
    for bit in sorted((b for b in row.bits if b.lane == "compute"), key=lambda bit: bit.start):
        assert bit.start == pytest.approx(at, abs=1e-5), bit
        at = bit.end
    assert at == pytest.approx(end)
    waited = sum(bit.end - bit.start for bit in row.bits if bit.kind == "waiting")
    assert 0 < waited < end
    assert row.said == f"{wanted}: {end:.1f} ms, waiting {waited:.1f} ms"
    assert {bit.kind for bit in row.bits if bit.lane == "links"} == {"transfer"}


def test_a_trace_is_of_the_best_of_ours_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    words = ["simulate", "--typical", "--tp", "2", "--dp", "1", "--micro-batches", "1"]
    words += ["--sequence-lengths", "2048", "--variants", "megatron,mc2,commfuse-c[12]-l1"]
    assert cli.main([*words, "--trace", str(path)]) == 0
    trace = json.loads(path.read_text())
    about = trace["otherData"]
    assert about["variant"] in ("commfuse-c1-l1", "commfuse-c2-l1")
    assert (about["simulated"], about["sequence"], about["model"]) == (True, 2048, "llama3_8b")
    printed = capsys.readouterr().out
    assert f"Written: {path}: {about['variant']}, for https://ui.perfetto.dev" in printed
    assert printed.splitlines()[-2].startswith(f"Best of ours: {about['variant']}, a step in ")
    work = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {(event["args"]["iteration"], event["args"]["layer"]) for event in work} == {(1, 1)}
    said = {event["name"] for event in work}
    assert "iteration 1, layer 1 of 32, forward" in said
    assert {"attention", "SwiGLU", "norm backward", "qkv GEMM, own block"} <= said
