"""kernels/npu.py against the operators that the real torch_npu defines, and their meta kernels."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from commfuse_npu.kernels import Piece
from commfuse_npu.kernels import npu as kernels
from tests.npu.operator_calls import operator_calls

SOURCE = Path(kernels.__file__).read_text()
TENSOR = "Tensor"


def check_calls(source: str) -> list[str]:
    """In the worker: names, numbers and types of each call's arguments and results."""
    checked = []
    for call in operator_calls(source):
        schema = getattr(torch.ops.npu, call.name).default._schema
        arguments = {argument.name: argument for argument in schema.arguments}
        where = f"line {call.line}, {schema}"
        assert call.positional <= sum(not a.kwarg_only for a in schema.arguments), where
        given = [argument.name for argument in schema.arguments[: call.positional]]
        for keyword in call.keywords:
            assert keyword in arguments, f"{keyword} is no argument: {where}"
            assert keyword not in given, f"{keyword} is given twice: {where}"
        required = {name for name, a in arguments.items() if not a.has_default_value()}
        missing = required - set(given) - set(call.keywords)
        assert not missing, f"{missing} are not given: {where}"
        types = [str(result.type) for result in schema.returns]
        assert types[: call.unpacked] == [TENSOR] * call.unpacked, f"{types}: {where}"
        checked.append(call.name)
    return checked


def test_every_call_fits_its_schema(npu) -> None:
    checked = npu.run(check_calls, SOURCE)
    assert sorted(checked) == ["npu_fusion_attention", "npu_fusion_attention_grad"]


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("pre_tockens=", "pre_tokens=", "pre_tokens is no argument"),
        ("scale_value=", "scale=", "scale is no argument"),
        ("        run.layout,\n", "", "'input_layout'} are not given"),
        (
            "        run.layout,\n",
            "        run.layout,\n        head_num=1,\n",
            "head_num is given twice",
        ),
        ("reserved, *_ =", "reserved, a, b, *_ =", "'int'"),
    ],
)
def test_a_call_that_does_not_fit_is_noticed(npu, right: str, wrong: str, message: str) -> None:
    assert right in SOURCE
    with pytest.raises(pytest.fail.Exception, match=message):
        npu.run(check_calls, SOURCE.replace(right, wrong))


@pytest.mark.parametrize(
    "source",
    [
        "import torch_npu",
        "import torch_npu.npu as n",
        "from torch_npu import npu_swiglu",
        "from torch.ops import npu",
        "op = torch.ops.npu.npu_swiglu",
        "f = partial(torch.ops.npu.npu_swiglu, dim=-1)",
        "ns = torch.ops",
        "getattr(torch, 'ops').npu.npu_swiglu(x)",
        "torch.ops.npu.npu_swiglu(*arguments)",
        "torch.ops.npu.npu_swiglu(x, **options)",
    ],
)
def test_a_call_that_could_not_be_checked_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match=r"^line 1"):
        operator_calls(source)


class _Recorded(TorchDispatchMode):
    """The names of the npu operators that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "npu":
            self.names.add(function._schema.name.removeprefix("npu::"))
        return function(*args, **(kwargs or {}))


def shapes_on_meta(mask: str, dtype: torch.dtype) -> list[str]:
    """In the worker: the kernels on tensors without data, by torch_npu's own meta kernels."""
    from torch_npu.op_plugin.meta import _meta_registrations

    # It warns once on Ascend 950 and asks the device, which is not there, whether it is one.
    _meta_registrations._npu_fusion_attention_warning_printed = True
    source = inspect.getsource(_meta_registrations.npu_fusion_attention_forward)
    knows_documents = "TND" in source
    q, grad = torch.empty(2, 6, 3, 4, 32, device="meta", dtype=dtype)
    k, v = torch.empty(2, 9, 3, 2, 32, device="meta", dtype=dtype)
    told: dict[str, Any] = {"causal": mask != "full"}
    if mask == "hidden":
        told["hidden"] = torch.empty(3, 1, 6, 9, device="meta", dtype=torch.bool)
    elif mask == "documents":
        told["pieces"] = [Piece(sample, slice(0, 6), slice(sample, 9)) for sample in range(3)]
    rows = (18, 4, 8) if mask == "documents" else (3, 4, 6, 8)
    with _Recorded() as recorded:
        out, statistics = kernels.attention_forward(q, k, v, **told)
        assert (out.shape, out.dtype) == (q.shape, dtype)
        maximum, total, reserved = statistics
        for value in (maximum, total):
            assert value.dtype == torch.float32
            # The meta kernel of 2.7.1 gives statistics of BNSD for TND as well.
            assert tuple(value.shape) == rows or (mask == "documents" and not knows_documents)
        assert reserved.shape == (0,)
        sums = [torch.empty(k.shape, device="meta") for _ in range(2)]
        grad_q = kernels.attention_backward(grad, q, k, v, out, statistics, *sums, **told)
        assert (grad_q.shape, grad_q.dtype, grad_q.device) == (q.shape, dtype, q.device)
    return sorted(recorded.names)


@pytest.mark.parametrize("mask", ["causal", "full", "hidden", "documents"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_shapes_are_those_of_the_meta_kernels(npu, mask: str, dtype: torch.dtype) -> None:
    exercised = npu.run(shapes_on_meta, mask, dtype)
    assert exercised == sorted({call.name for call in operator_calls(SOURCE)}), (
        "an operator that kernels/npu.py calls is not exercised here"
    )
