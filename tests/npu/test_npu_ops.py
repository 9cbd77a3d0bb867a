"""The emulated operators themselves, called through torch_npu, against torch's own functions."""

from typing import Any

import pytest
import torch
from einops import rearrange

from mindspeed_patches.rehearsal.npu_ops import register_cpu_kernels

X = torch.ones(1, 2, 4, 8)
MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
PACKED = {"input_layout": "TND", "query": X[0], "key": X[0], "value": X[0], "head_num": 4}


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest) -> None:
    """CPU kernels in the worker of a test."""
    if "npu" in request.fixturenames:
        request.getfixturevalue("npu").run(register_cpu_kernels)


def _in(layout: str, x: torch.Tensor) -> torch.Tensor:
    """A tensor ``[B, A, S, D]`` in another layout."""
    patterns = {"SBH": "s b (a d)", "BSH": "b s (a d)", "BSND": "b s a d", "BNSD": "b a s d"}
    return rearrange(x, f"b a s d -> {patterns[layout]}")


def _random(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def _allowed(mode: int | None, queries: int, keys: int) -> torch.Tensor:
    """Keys that each mode lets a query see; windows reach 3 keys back and 1 ahead."""
    i, j = torch.arange(queries).unsqueeze(1), torch.arange(keys)
    i_last = i + keys - queries
    return {
        None: (j >= 0).expand(queries, keys),
        0: (j <= i + 1) & (j >= i - 3) & (j != 2),
        1: (j != 2).expand(queries, keys),
        2: j <= i,
        3: j <= i_last,
        4: (j <= i_last + 1) & (j >= i_last - 3),
    }[mode]


def attention(layout: str, mode: int, masked: bool = True, size: int = 8) -> None:
    """In the worker: forward and autograd of torch_npu.npu_fusion_attention."""
    import torch_npu

    q, k, v, grad = _random((2, 4, 6, 8), (2, 2, 9, 8), (2, 2, 9, size), (2, 4, 6, size))
    allowed = _allowed(mode if masked else None, 6, 9)
    reference = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=allowed, scale=0.3, enable_gqa=True
    )
    expected = torch.autograd.grad(reference, (q, k, v), grad)
    mask = MASK if mode > 1 else (torch.arange(9) == 2).expand(6, 9).contiguous()
    options = {"scale": 0.3, "pre_tockens": 3, "next_tockens": 1, "sparse_mode": mode}
    out, *statistics = torch_npu.npu_fusion_attention(
        *(_in(layout, x) for x in (q, k, v)), 4, layout,
        atten_mask=mask if masked else None, **options,
    )  # fmt: skip
    torch.testing.assert_close(out, _in(layout, reference), rtol=1e-5, atol=1e-5)
    actual = torch.autograd.grad(out, (q, k, v), _in(layout, grad))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    # The operator of the gradient, which ring attention calls with the statistics of all blocks.
    options["scale_value"] = options.pop("scale")
    parts = torch_npu.npu_fusion_attention_grad(
        *(_in(layout, x) for x in (q, k, v, grad)), 4, layout,
        atten_mask=mask if masked else None, softmax_max=statistics[0], softmax_sum=statistics[1],
        attention_in=out, **options,
    )[:3]  # fmt: skip
    torch.testing.assert_close(parts, tuple(_in(layout, x) for x in expected), rtol=1e-5, atol=1e-5)
    scores = (q @ k.repeat_interleave(2, 1).mT * 0.3).masked_fill(~allowed, -torch.inf)
    log_sum = statistics[0] + statistics[1].log()
    assert log_sum.shape == (2, 4, 6, 8)
    assert not log_sum.requires_grad
    torch.testing.assert_close(log_sum, scores.logsumexp(-1, keepdim=True).expand(-1, -1, -1, 8))


def modes(layout: str) -> None:
    """In the worker: all modes in a layout."""
    for mode in range(5):
        attention(layout, mode)
        # Without a mask attention is full, whatever the mode.
        attention(layout, mode, masked=False)
    # Latent attention: the heads of the values are smaller, or larger.
    for size in (4, 12):
        attention(layout, 3, size=size)


def blind_queries() -> None:
    """In the worker: with more queries than keys the first see no key; their output is zero."""
    import torch_npu

    q, k, v = _random((1, 1, 5, 8), (1, 1, 3, 8), (1, 1, 3, 8))
    out = torch_npu.npu_fusion_attention(q, k, v, 1, "BNSD", atten_mask=MASK, sparse_mode=3)[0]
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert not out[:, :, :2].any()
    assert out[:, :, 2:].all()
    assert not grads[0][:, :, :2].any()
    assert all(grad.isfinite().all() for grad in grads)


def refused(changes: dict[str, Any]) -> None:
    """In the worker: a call that is not supported."""
    import torch_npu

    options = {"query": X, "key": X, "value": X, "head_num": 2, "input_layout": "BNSD"}
    torch_npu.npu_fusion_attention(**{**options, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep_prob": 0.9}, "keep_prob 0.9 is not emulated"),
        ({"padding_mask": X}, "padding_mask a tensor is not emulated on the CPU; leave it out"),
        *(({"sparse_mode": 3, "atten_mask": mask}, "sparse_mode 3 takes the compressed mask")
          for mask in (MASK[:4, :4], ~MASK)),
        ({"input_layout": "NSD"}, "input_layout 'NSD' is not"),
        ({**PACKED, "actual_seq_qlen": [1], "actual_seq_kvlen": [2]},
         r"end at \(1, 2\), the tensors have \(2, 2\) rows; TND needs actual_seq_qlen"),
    ],
)  # fmt: skip
def test_what_is_not_emulated_is_refused(npu, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=message):
        npu.run(refused, changes)


def pointwise() -> None:
    """In the worker: normalization, activation and rotation, with gradients."""
    import torch_npu

    x, gamma, angles = _random((5, 3, 8), (8,), (5, 1, 4))
    gate, up = x[..., :4], x[..., 4:]
    # Rotation by complex numbers; a pair has one angle.
    turns = torch.polar(torch.ones_like(angles), angles)
    halves = torch.complex(gate, up) * turns
    turned = torch.complex(x[..., ::2], x[..., 1::2]) * turns
    cos, sin = angles.cos(), angles.sin()
    tiled, repeated = (cos.tile(2), sin.tile(2)), [f.repeat_interleave(2, -1) for f in (cos, sin)]
    normed, inverse = torch_npu.npu_rms_norm(x, gamma, epsilon=1e-3)
    assert (inverse.shape, inverse.dtype) == ((5, 3, 1), torch.float32)
    silu, rotary = torch.nn.functional.silu, torch_npu.npu_rotary_mul
    interleaved = rotary(x, *repeated, rotary_mode="interleave")
    for actual, expected, inputs in (
        (normed, torch.nn.functional.rms_norm(x, (8,), gamma, eps=1e-3), (x, gamma)),
        (torch_npu.npu_swiglu(x), silu(gate) * up, (x,)),
        (torch_npu.npu_swiglu(x[:4], dim=0), silu(x[:2]) * x[2:4], (x,)),
        (rotary(x, *tiled), torch.cat((halves.real, halves.imag), -1), (x, angles)),
        (interleaved, torch.view_as_real(turned).flatten(-2), (x, angles)),
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        weights = torch.arange(float(actual.numel())).view(actual.shape).cos()
        grads = [
            torch.autograd.grad((y * weights).sum(), inputs, retain_graph=True)
            for y in (actual, expected)
        ]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    for operator in (torch_npu.npu_swiglu, lambda t: torch_npu.npu_rms_norm(t, gamma)[0]):
        assert operator(x.bfloat16()).dtype == torch.bfloat16


def adam_steps() -> None:
    """In the worker: three steps against torch's AdamW; the powers are those before the step."""
    import torch_npu

    start, *grads = (x.detach() for x in _random(*[(7,)] * 4))
    reference = torch.nn.Parameter(start.clone())
    # Without foreach=False AdamW would query the device.
    options = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.2, "foreach": False}
    optimizer = torch.optim.AdamW([reference], **options)
    weight, first, second = start.clone(), torch.zeros(7), torch.zeros(7)
    for step, grad in enumerate(grads):
        reference.grad = grad
        optimizer.step()
        out = torch_npu.npu_apply_adam_w(
            0.8**step, 0.9**step, 0.1, 0.2, 0.8, 0.9, 1e-3, grad, None, False, False,
            out=(weight, first, second),
        )  # fmt: skip
        assert out[0] is weight
        torch.testing.assert_close(weight, reference.data)
    torch.testing.assert_close(first, optimizer.state[reference]["exp_avg"])
    torch.testing.assert_close(second, optimizer.state[reference]["exp_avg_sq"])


@pytest.mark.parametrize(
    ("work", "given"),
    [
        *((modes, [layout]) for layout in ("SBH", "BSH", "BSND", "BNSD")),
        (blind_queries, []),
        (pointwise, []),
        (adam_steps, []),
    ],
)
def test_emulated_operators_are_torchs_own(npu, work: Any, given: list[Any]) -> None:
    npu.run(work, *given)
