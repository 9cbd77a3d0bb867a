"""Runs a network of layers on one rank in a given form."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from commfuse_npu import ops
from commfuse_npu.ops import LinearOptions
from commfuse_npu.runtime.collective_transport import CollectiveTransport
from commfuse_npu.runtime.transport import Transport
from tests.attention_masks import mask_arguments, seen
from tests.distributed.programs import transport
from tests.random_networks import formulas
from tests.random_networks.case import (
    ATTENTION,
    BITS_OF_TORCH,
    FROM_SHARD,
    HEAD_FEATURES,
    WITH_PROJECTION,
    Form,
    Network,
)
from tests.random_networks.values import Found, arriving, drawn, fitting, laid_out

_WHOLE_WEIGHTS = ("linear_all_to_all", "all_to_all_linear", WITH_PROJECTION)
"""Ops whose weight is the same on every rank."""


def _drawn(
    case: Network, form: Form, what: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> torch.Tensor:
    tensor = drawn(case.seed, what, shape, dtype or case.dtype, case.rounded)
    return tensor.double() if form == "exact" else tensor


class Call:
    """One layer of a network: its parameters on this rank, and the op on them.

    Args:
        link: defaults to the transport of the case.
    """

    def __init__(
        self, case: Network, place: int = 0, form: Form = "fused", link: Transport | None = None
    ) -> None:
        self.case, self.layer, self.name = case, case.layers[place], f"layer {place}"
        self.form, self.link = form, link or transport(case.lanes)
        exact = not case.rounded and self.layer.op not in ATTENTION
        whole = exact or self.layer.op in BITS_OF_TORCH
        self.by_formula = form == "exact" or (form == "plain" and whole)
        self.weight, self.bias = self._parameters()
        self.keywords = self._keywords()
        op = self.layer.op.removesuffix(" with a weight")
        self.op: Callable[..., torch.Tensor] = getattr(formulas if self.by_formula else ops, op)

    def _parameters(self) -> tuple[torch.nn.Parameter | None, torch.nn.Parameter | None]:
        layer, case, size = self.layer, self.case, self.link.size
        if layer.op == "attention_all_to_all":
            return None, None
        inputs, outputs = layer.inputs, layer.outputs
        if layer.op in ATTENTION:
            inputs = layer.queries * HEAD_FEATURES
        if layer.op in ("all_to_all_linear", WITH_PROJECTION):
            inputs *= size
        if layer.op == "linear_all_to_all":
            outputs *= size
        owner = 0 if layer.op in _WHOLE_WEIGHTS else self.link.rank
        shape = (outputs, inputs)
        drawn_weight = _drawn(case, self.form, f"{self.name} weight {owner}", shape)
        laid = laid_out(drawn_weight, layer.weight_layout)
        weight = torch.nn.Parameter(laid, requires_grad=layer.weight_grad)
        if layer.main_grad is not None:
            start = _drawn(case, self.form, f"{self.name} main_grad", shape, layer.main_grad)
            weight.main_grad = start  # type: ignore[attr-defined]
            if layer.flag:
                weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        if layer.bias == "no":
            return weight, None
        owner = self.link.rank if layer.op == "all_gather_linear" else 0
        bias = _drawn(case, self.form, f"{self.name} bias {owner}", (outputs,))
        return weight, torch.nn.Parameter(bias, requires_grad=layer.bias == "trained")

    def _keywords(self) -> dict[str, Any]:
        layer = self.layer
        wide, main_grad = torch.float32 if layer.wide else None, layer.main_grad is not None
        options = LinearOptions(
            layer.schedule, wide, main_grad, collectives_from=layer.collectives_from
        )
        keywords: dict[str, Any] = {"options": options}
        if layer.op in ATTENTION:
            keywords["scale"] = layer.scale
        if self.by_formula:
            return keywords | {"group": self.link.group}
        if self.form == "fused":
            return keywords | {"group": self.link}
        return keywords | {"group": CollectiveTransport(self.link.group, same_pieces=True)}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        if layer.op not in ATTENTION:
            return self.op(x, self.weight, self.bias, **self.keywords)
        sizes = layer.mask, x.shape[0], x.shape[1]
        mask = {"shown": seen(*sizes)} if self.by_formula else mask_arguments(*sizes)
        heads = x.unflatten(-1, (-1, HEAD_FEATURES))
        parts = [
            part if name in layer.trained else part.detach()
            for name, part in zip(
                "qkv", heads.split([layer.queries, layer.keys, layer.keys], 2), strict=True
            )
        ]
        if self.weight is None:
            return self.op(*parts, **self.keywords, **mask)
        return self.op(*parts, self.weight, self.bias, **self.keywords, **mask)

    def gradients(self) -> Found:
        """Gradients and related attributes of the parameters after the backward."""
        parameters = {"weight": self.weight, "bias": self.bias}
        results: Found = {
            f"{self.name} {name}.grad": parameter.grad
            for name, parameter in parameters.items()
            if parameter is not None
        }
        weight: Any = self.weight
        if self.layer.main_grad is not None and weight is not None:
            results[f"{self.name} main_grad"] = weight.main_grad
            if self.layer.flag:
                results[f"{self.name} flag"] = torch.tensor(weight.grad_added_to_main_grad)
                # Its contents are undefined; Megatron asks for the shape only.
                if weight.grad is not None:
                    results[f"{self.name} weight.grad"] = torch.zeros_like(weight.grad)
        return results


def input_of(
    case: Network, number: int = 0, form: Form = "fused", link: Transport | None = None
) -> torch.Tensor:
    """The input of the first layer on this rank in a micro-batch."""
    rank = (link or transport(case.lanes)).rank
    rows = case.rows
    if case.layers[0].op not in FROM_SHARD:
        rows *= case.size
    leading = (rows,) if case.batch is None else (rows, case.batch)
    x = _drawn(case, form, f"x {number} {rank}", (*leading, case.layers[0].inputs))
    return x.requires_grad_(case.x_grad)


def run_network(case: Network, form: Form, link: Transport | None = None) -> Found:
    """Run forward and backward of every micro-batch; returns all outputs and gradients."""
    calls = [Call(case, place, form, link) for place in range(len(case.layers))]
    results: Found = {}
    open_: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    rank = calls[0].link.rank
    inputs: list[torch.Tensor] = []

    def forward(number: int) -> list[torch.Tensor]:
        x = input_of(case, number, form, link)
        inputs.append(x)
        ends = []
        for call in calls:
            name = f"micro-batch {number}, {call.name}"
            layer, rounded = call.layer, case.rounded
            run: Callable[[torch.Tensor], torch.Tensor] = call
            if layer.recompute != "no":
                run = partial(checkpoint, call, use_reentrant=layer.recompute == "reentrant")
            fitted = fitting(x, layer.inputs, layer.x_layout, rounded, results, f"{name} x.grad")
            y = arriving(run(fitted), layer.grad_layout, rounded)
            results[f"{name} y"] = y.detach().clone()
            if case.branches:
                ends.append(y)
            else:
                x, ends = y, [y]
        return ends

    with torch.set_grad_enabled(case.gradients):
        for number in range(case.micro_batches):
            ends = [y for y in forward(number) if y.requires_grad]
            grads = [
                _drawn(case, form, f"gradient {number} {place} {rank}", tuple(y.shape)).to(y.dtype)
                for place, y in enumerate(ends)
            ]
            open_.append((ends, grads))
    for ends, grads in reversed(open_) if case.last_first else open_:
        if ends:
            torch.autograd.backward(ends, grads)
    for number, x in enumerate(inputs):
        results[f"micro-batch {number} x.grad"] = x.grad
    for call in calls:
        results |= call.gradients()
    return results
