"""``torch.compile`` runs what posts transfers in eager mode, and traces none of it."""

from collections.abc import Callable, Iterator
from inspect import isclass, isfunction
from typing import Any

import pytest
import torch

from commfuse_npu import ops
from commfuse_npu.overlap import ForwardBackwardOverlap

WITHOUT_TRANSFERS = "Documents", "LinearOptions"


def entry_points() -> Iterator[Callable[..., Any]]:
    """Every public function of the ops, and the public methods of their classes."""
    for name in ops.__all__:
        if name in WITHOUT_TRANSFERS:
            continue
        public = getattr(ops, name)
        if not isclass(public):
            yield public
            continue
        yield from (
            method
            for method_name, method in vars(public).items()
            if isfunction(method) and not method_name.startswith("_")
        )
    yield ForwardBackwardOverlap.run_together


@pytest.mark.parametrize(
    "function", list(entry_points()), ids=lambda function: function.__qualname__
)
def test_a_compiled_caller_does_not_trace_it(function: Callable[..., Any]) -> None:
    """A caller that must be one graph cannot be compiled; it is refused before the call."""
    caller = torch.compile(lambda: function(), backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"torch\.compiler\.disable"):
        caller()
