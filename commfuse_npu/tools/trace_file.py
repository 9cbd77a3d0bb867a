"""The traces of a group as one file for chrome://tracing and Perfetto, on one clock.

Clocks of ranks differ.  :func:`write` measures by how much (a message there and back, the fastest
of many: the answer was read half way) and shows everything on rank 0's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from commfuse_npu.plan.program import Add, Compute, line
from commfuse_npu.runtime.trace import Event, Linear, Trace
from commfuse_npu.runtime.transport import Transport
from commfuse_npu.runtime.whole_file import write_json
from commfuse_npu.tools.simulate.names import message, work

__all__ = ["Shown", "events_of_viewer", "linears_of", "shown", "write"]

_PINGS = 20


class Shown(NamedTuple):
    """An event as the viewer has it; ``args`` is what it shows beside the name."""

    row: str
    name: str
    operation: str
    start: int
    end: int
    args: dict[str, int | str]


def linears_of(model: torch.nn.Module) -> dict[int, Linear]:
    """The linear layers of a GPTModel by the address of their weights, for a :class:`Trace`.

    Their names are Megatron's, without ``linear_`` and ``_layer``; layers are counted as there,
    from 1 over all stages (``layer_number``).
    """
    layers: dict[str, int] = {}
    found: dict[int, Linear] = {}
    for path, module in model.named_modules():
        above, _, name = path.rpartition(".")
        number = getattr(module, "layer_number", None)
        if isinstance(number, int):
            layers[path] = number
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dim() == 2:
            layer = next((layers[at] for at in _upwards(above) if at in layers), None)
            name = name.removeprefix("linear_").removesuffix("_layer")
            found[weight.data_ptr()] = Linear(name, layer)
    return found


def _upwards(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def write(transport: Transport, path: Path) -> int:
    """Gather the traces of a group on its rank 0 and write them as one file.

    A collective of the group; ranks without a trace have no events.

    Args:
        path: rank 0's counts.

    Returns:
        how many events there are in all.

    Raises:
        OSError: rank 0 cannot write there; the others have returned.
        TransportError: a rank did not come in time.
    """
    behind = transport.clock_behind(_PINGS)
    trace = transport.trace or Trace()
    mine = [shown(event) for event in trace.events]
    gathered = transport.share("trace", (mine, trace.left_out, behind))
    events = [
        [event._replace(start=event.start + late, end=event.end + late) for event in found]
        for found, _, late in gathered
    ]
    if transport.rank == 0:
        names = [f"rank {rank}, measured" for rank in transport.ranks]
        content = {
            "traceEvents": events_of_viewer(events, names),
            "displayTimeUnit": "ms",
            "otherData": {"left out": sum(left for _, left, _ in gathered)},
        }
        write_json(path, content)
    return sum(map(len, events))


def shown(event: Event) -> Shown:
    """With the name that the same thing has in a simulated trace: ``fc1 dgrad, chunk 2 of rank 3``.

    Without a known linear layer it is called after its operation.
    """
    args, linear = dict[str, int | str](), event.linear
    if event.iteration:
        args["iteration"] = event.iteration
    if linear is not None and linear.layer is not None:
        args["layer"] = linear.layer
    args["operation"] = event.operation
    program, about = event.origin
    called = event.operation
    if linear is not None:
        called = linear.name + (" backward" if called.endswith(" backward") else "")
    if isinstance(about, str):
        said = message(called, program, about)
    else:
        one = program.code[about]
        what = one.work if isinstance(one, Compute) else "sum" if isinstance(one, Add) else "copy"
        said = work(f"{called} {what}", program, about)
        args["instruction"] = line(one)
    if event.bytes:
        args["bytes"] = event.bytes
    return Shown(event.row, said, event.operation, event.start, event.end, args)


def events_of_viewer(
    of_ranks: Sequence[Sequence[Shown]], names: Sequence[str]
) -> list[dict[str, Any]]:
    """The Trace Event Format: a process per rank, a thread per row, times from the first event."""
    zero = min((event.start for events in of_ranks for event in events), default=0)
    found: list[dict[str, Any]] = []
    for rank, (events, name) in enumerate(zip(of_ranks, names, strict=True)):
        found.append(_about("process_name", rank, 0, name=name))
        rows = sorted({event.row for event in events}, key=_place)
        for number, row in enumerate(rows):
            found.append(_about("thread_name", rank, number, name=row))
            found.append(_about("thread_sort_index", rank, number, sort_index=number))
        for event in events:
            found.append(
                {
                    "name": event.name,
                    "cat": event.operation,
                    "ph": "X",
                    "pid": rank,
                    "tid": rows.index(event.row),
                    "ts": (event.start - zero) / 1e3,
                    "dur": (event.end - event.start) / 1e3,
                    "args": event.args,
                }
            )
    return found


def _place(row: str) -> tuple[int, str]:
    order = ("compute", "waiting")
    return (order.index(row) if row in order else len(order), row)


def _about(what: str, rank: int, thread: int, **value: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": value}
