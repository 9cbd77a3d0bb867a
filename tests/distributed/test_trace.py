"""What a trace says of real ranks, and that nothing is written down without one."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from commfuse_npu import Schedule, Transport
from commfuse_npu.ops import LinearOptions, all_gather_linear, linear_reduce_scatter
from commfuse_npu.plan.program import Add, Compute, Copy, line
from commfuse_npu.plan.rules import column_backward, gather_gemm, gemm_scatter
from commfuse_npu.plan.schedule import Place
from commfuse_npu.runtime import agreement, executor, trace
from commfuse_npu.runtime.trace import Event, Linear, Trace
from commfuse_npu.tools.trace_file import events_of_viewer, linears_of, shown, write
from tests.limits import PATIENT

HOUR = 3600 * 10**9
PROGRAM = gather_gemm(Place(Schedule(lanes=2, chunks=2), 0, 3, True), 8, 16, 24, False, None, 0)


def _traced(rank: int, path: str, batched: bool) -> int:
    """A forward and backward of two layers, each rank's clock an hour ahead of the one before."""
    real = trace.clock
    with pytest.MonkeyPatch.context() as patch:
        for module in (trace, agreement, executor):
            patch.setattr(module, "clock", lambda: real() + rank * HOUR)
        link = Transport.create(lanes=2, timeout=PATIENT, batched=batched)
        options = LinearOptions(Schedule(lanes=2, chunks=2))
        x = torch.ones(8, 16, requires_grad=True)
        weight = torch.ones(24, 16, requires_grad=True)
        back = torch.ones(16, 24, requires_grad=True)
        for traced in (False, True):
            linears = {weight.data_ptr(): Linear("fc1", 3), back.data_ptr(): Linear("fc2", 3)}
            link.trace = Trace(linears=linears) if traced else None
            if link.trace is not None:
                link.trace.iteration = 7
            y = all_gather_linear(x, weight, transport=link, options=options)
            z = linear_reduce_scatter(y, back, transport=link, options=options)
            z.sum().backward()
        count = write(link, Path(path))
        link.close()
    return count


@pytest.mark.parametrize("batched", [False, True])
def test_a_trace_shows_every_message_and_every_piece_on_one_clock(
    ranks, tmp_path, batched: bool
) -> None:
    path = tmp_path / "a folder" / "trace.json"
    counts = ranks(3).run(_traced, str(path), batched)
    content = json.loads(path.read_text())
    assert content["otherData"] == {"left out": 0}
    assert [file.name for file in path.parent.iterdir()] == ["trace.json"]
    names: dict[tuple[int, int], str] = {}
    found: dict[tuple[int, str, str], list[dict[str, Any]]] = defaultdict(list)
    for event in content["traceEvents"]:
        if event["name"] == "thread_name":
            names[event["pid"], event["tid"]] = event["args"]["name"]
    spans = [event for event in content["traceEvents"] if event["ph"] == "X"]
    assert counts == [len(spans)] * 3
    for event in spans:
        found[event["pid"], names[event["pid"], event["tid"]], event["cat"]].append(event)
    programs = {
        "all_gather_linear": lambda place: gather_gemm(place, 8, 16, 24, False, None, 0),
        "linear_reduce_scatter": lambda place: gemm_scatter(place, 8, 24, 16),
        "all_gather_linear backward": lambda place: column_backward(
            place, 8, 16, 24, True, True, True
        ),
    }
    for operation, compiled in programs.items():
        for rank in range(3):
            program = compiled(Place(Schedule(lanes=2, chunks=2), rank, 3, batched))
            work = [line(one) for one in program.code if isinstance(one, Add | Compute | Copy)]
            pieces = found[rank, "compute", operation]
            assert [event["args"]["instruction"] for event in pieces] == work
            for peer in {0, 1, 2} - {rank}:
                sent = found[rank, f"link to rank {peer}", operation]
                came = found[peer, f"from rank {rank}", operation]
                assert sorted(event["name"] for event in sent) == sorted(
                    event["name"] for event in came
                )
                mine = [one for one, _ in program.transfers.values() if one.target == peer]
                assert len(sent) == len(mine)
                assert sum(e["args"]["bytes"] for e in sent) == sum(
                    e["args"]["bytes"] for e in came
                )
                for before, after in pairwise(sent):
                    assert after["ts"] >= before["ts"] + before["dur"] - 0.001, "one at a time"
                # Clocks that were hours apart: nothing is there before it was sent.
                for out, into in zip(sent, came, strict=True):
                    assert into["ts"] + into["dur"] > out["ts"] - 1e5
                    assert abs(into["ts"] - out["ts"]) < 60e6
    for rank in range(3):
        first, *_ = found[rank, "compute", "all_gather_linear"]
        assert first["name"] == "fc1 GEMM, own block", "own block first"
        assert (first["args"]["iteration"], first["args"]["layer"]) == (7, 3)
        for wait in found[rank, "waiting", "all_gather_linear"]:
            assert wait["ts"] >= first["ts"]
    said = {(event["pid"], event["name"]) for event in spans}
    assert {
        (0, "fc1 all-gather, chunk 1 of rank 2"),
        (0, "fc1 GEMM, chunk 0 of ranks 1-2"),
        (1, "fc2 reduce-scatter, chunk 0 for rank 2"),
        (1, "fc2 all-gather of the gradient, chunk 1 of rank 0"),
        (2, "fc1 all-gather of the input, again, block of rank 1"),
        (2, "fc1 dgrad, chunk 1 for ranks 0-1"),
        (2, "fc1 wgrad"),
    } <= said
    assert all(event["args"]["layer"] == 3 for event in spans)


def _untraced(rank: int) -> list[object]:
    link = Transport.create(lanes=2, timeout=PATIENT)
    asked: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "clock", lambda: asked.append(1) or 0)
        x, weight = torch.ones(8, 16), torch.ones(24, 16)
        all_gather_linear(x, weight, transport=link)
    link.close()
    return asked


def test_without_a_trace_nobody_looks_at_the_clock(ranks) -> None:
    assert ranks(2).run(_untraced) == [[], []]


def test_a_full_trace_counts_what_it_leaves_out() -> None:
    full = Trace(limit=2)
    for start in range(5):
        full.add(Event("compute", "op", start, start + 1, (PROGRAM, 0)))
    assert (len(full.events), full.left_out) == (2, 3)


def test_rows_of_the_viewer_begin_with_the_work() -> None:
    rows = ["link to rank 1", "waiting", "compute", "from rank 1"]
    events = [Event(row, "op", 5_000, 7_500, (PROGRAM, "block 2")) for row in rows]
    found = events_of_viewer([list(map(shown, events)), []], ["rank 0", "rank 1"])
    order = [e["args"]["name"] for e in found if e["name"] == "thread_name"]
    assert order == ["compute", "waiting", "from rank 1", "link to rank 1"]
    assert {(e["ts"], e["dur"]) for e in found if e["ph"] == "X"} == {(0.0, 2.5)}
    assert [e["args"]["name"] for e in found if e["name"] == "process_name"] == ["rank 0", "rank 1"]


def test_without_a_linear_layer_it_is_called_after_its_operation() -> None:
    own = next(at for at, one in enumerate(PROGRAM.code) if isinstance(one, Compute))
    for about, name in (
        (own, "all_gather_linear gemm, own block"),
        ("block 2 chunk 1", "all_gather_linear all-gather, chunk 1 of rank 2"),
    ):
        event = Event("compute", "all_gather_linear", 0, 1, (PROGRAM, about))
        assert shown(event).name == name
        assert shown(event).args["operation"] == "all_gather_linear"
        assert not {"layer", "iteration"} & shown(event).args.keys()


def test_weights_have_the_names_and_numbers_of_their_layers() -> None:
    layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
    for number, layer in enumerate(layers, 5):
        layer.layer_number = number
        layer.mlp = torch.nn.Module()
        layer.mlp.linear_fc1 = torch.nn.Linear(2, 2)
        layer.norm = torch.nn.LayerNorm(2)
    model = torch.nn.Module()
    model.layers, model.output_layer = layers, torch.nn.Linear(2, 2)
    assert linears_of(model) == {
        layers[0].mlp.linear_fc1.weight.data_ptr(): Linear("fc1", 5),
        layers[1].mlp.linear_fc1.weight.data_ptr(): Linear("fc1", 6),
        model.output_layer.weight.data_ptr(): Linear("output"),
    }
