"""The emulated operators themselves, called through torch_npu, against torch's own functions."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mindspeed_patches.rehearsal.npu_ops import register_cpu_kernels
from tests.free_port import free_port

LAYOUTS = ("SBH", "BSH", "BSND", "BNSD")


def test_without_torch_npu_it_says_what_is_missing() -> None:
    with pytest.raises(RuntimeError, match="not defined; import torch_npu before"):
        register_cpu_kernels()


def _in(layout: str, x: torch.Tensor) -> torch.Tensor:
    """From ``[B, A, S, D]``."""
    orders = {"SBH": (2, 0, 1, 3), "BSH": (0, 2, 1, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}
    x = x.permute(orders[layout])
    return x.flatten(2) if layout in ("SBH", "BSH") else x


def _random(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def _allowed(mode: int, queries: int, keys: int) -> torch.Tensor:
    """What the modes let a query see; a window of 3 keys back and 1 ahead where there is one."""
    i, j = torch.arange(queries).unsqueeze(1), torch.arange(keys)
    i_last = i + keys - queries
    return {
        0: (j <= i + 1) & (j >= i - 3) & (j != 2),
        1: (j != 2).expand(queries, keys),
        2: j <= i,
        3: j <= i_last,
        4: (j <= i_last + 1) & (j >= i_last - 3),
    }[mode]


def attention(layout: str, mode: int) -> None:
    """In the worker: forward and autograd of torch_npu.npu_fusion_attention."""
    import torch_npu

    register_cpu_kernels()
    q, k, v, grad = _random((2, 4, 6, 8), (2, 2, 9, 8), (2, 2, 9, 8), (2, 4, 6, 8))
    allowed = _allowed(mode, 6, 9)
    reference = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=allowed, scale=0.3, enable_gqa=True
    )
    expected = torch.autograd.grad(reference, (q, k, v), grad)
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    if mode < 2:
        mask = (torch.arange(9) == 2).expand(6, 9).contiguous()
    out, *rest = torch_npu.npu_fusion_attention(
        *(_in(layout, x) for x in (q, k, v)),
        4,
        layout,
        atten_mask=mask,
        scale=0.3,
        pre_tockens=3,
        next_tockens=1,
        sparse_mode=mode,
    )
    torch.testing.assert_close(out, _in(layout, reference), rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(out, (q, k, v), _in(layout, grad))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    scores = (q @ k.repeat_interleave(2, 1).mT * 0.3).masked_fill(~allowed, -torch.inf)
    log_sum = rest[0] + rest[1].log()
    assert log_sum.shape == (2, 4, 6, 8)
    assert not log_sum.requires_grad
    torch.testing.assert_close(log_sum, scores.logsumexp(-1, keepdim=True).expand(-1, -1, -1, 8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_in_every_layout_and_mode(npu, layout: str) -> None:
    for mode in range(5):
        npu.run(attention, layout, mode)


def packed() -> None:
    """In the worker: three sequences in one, by their ends; causal within each."""
    import torch_npu

    register_cpu_kernels()
    q, k, v, grad = _random((9, 4, 8), (12, 2, 8), (12, 2, 8), (9, 4, 8))
    ends = [2, 6, 9], [3, 7, 12]
    parts = []
    for rows, columns in zip(
        zip([0, *ends[0]], ends[0], strict=False),
        zip([0, *ends[1]], ends[1], strict=False),
        strict=True,
    ):
        one = [x.transpose(0, 1) for x in (q[slice(*rows)], k[slice(*columns)], v[slice(*columns)])]
        allowed = _allowed(3, one[0].shape[1], one[1].shape[1])
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(
                *one, attn_mask=allowed, scale=0.3, enable_gqa=True
            ).transpose(0, 1)
        )
    reference = torch.cat(parts)
    out, top, total, *_ = torch_npu.npu_fusion_attention(
        q,
        k,
        v,
        4,
        "TND",
        atten_mask=torch.ones(2048, 2048, dtype=torch.bool).triu(1),
        scale=0.3,
        sparse_mode=3,
        actual_seq_qlen=ends[0],
        actual_seq_kvlen=ends[1],
    )
    assert top.shape == total.shape == (9, 4, 8)
    torch.testing.assert_close(out, reference, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(out, (q, k, v), grad)
    expected = torch.autograd.grad(reference, (q, k, v), grad)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_packed_sequences_do_not_see_each_other(npu) -> None:
    npu.run(packed)


def without_a_mask(mode: int) -> None:
    """In the worker: attention is full then, whatever the mode."""
    import torch_npu

    register_cpu_kernels()
    q, k, v = _random((2, 4, 6, 8), (2, 4, 9, 8), (2, 4, 9, 8))
    out = torch_npu.npu_fusion_attention(q, k, v, 4, "BNSD", scale=0.3, sparse_mode=mode)[0]
    full = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3)
    torch.testing.assert_close(out, full, rtol=1e-5, atol=1e-5)


def test_without_a_mask_attention_is_full(npu) -> None:
    for mode in range(5):
        npu.run(without_a_mask, mode)


def blind_queries() -> None:
    """In the worker: more queries than keys, so that the first see nothing."""
    import torch_npu

    register_cpu_kernels()
    q, k, v = _random((1, 1, 5, 8), (1, 1, 3, 8), (1, 1, 3, 8))
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    out = torch_npu.npu_fusion_attention(q, k, v, 1, "BNSD", atten_mask=mask, sparse_mode=3)[0]
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert not out[:, :, :2].any()
    assert out[:, :, 2:].all()
    assert not grads[0][:, :, :2].any()
    assert all(grad.isfinite().all() for grad in grads)


def test_queries_that_see_nothing_give_zeros(npu) -> None:
    npu.run(blind_queries)


def refused(name: str) -> str:
    """In the worker: the error of an unsupported call."""
    import torch_npu

    register_cpu_kernels()
    x = torch.ones(1, 2, 4, 8)
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    calls = {
        "dropout": {"keep_prob": 0.9},
        "mode 7": {"sparse_mode": 7},
        "padding mask": {"padding_mask": x},
        "whole mask": {"sparse_mode": 3, "atten_mask": mask[:4, :4]},
        "inverted mask": {"sparse_mode": 2, "atten_mask": ~mask},
        "heads": {"head_num": 4},
        "layout": {"input_layout": "NSD"},
        "TND": {"input_layout": "TND", "query": x[0], "key": x[0], "value": x[0], "head_num": 4},
        "rest": {
            "input_layout": "TND",
            "query": x[0],
            "key": x[0],
            "value": x[0],
            "head_num": 4,
            "actual_seq_qlen": [1],
            "actual_seq_kvlen": [2],
        },
        "batch": {"key": x.expand(3, -1, -1, -1)},
    }
    options = {"query": x, "key": x, "value": x, "head_num": 2, "input_layout": "BNSD"}
    try:
        torch_npu.npu_fusion_attention(**{**options, **calls[name]})
    except (NotImplementedError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dropout", "NotImplementedError: npu_fusion_attention: keep_prob 0.9, dropout is not"),
        ("mode 7", "NotImplementedError: npu_fusion_attention: sparse_mode 7 is not emulated"),
        ("padding mask", "NotImplementedError: npu_fusion_attention: padding_mask is not emulated"),
        ("whole mask", "ValueError: npu_fusion_attention: sparse_mode 3 takes the compressed mask"),
        ("inverted mask", "ValueError: npu_fusion_attention: sparse_mode 2 takes a mask that is"),
        ("heads", "ValueError: npu_fusion_attention: head_num 4, query (1, 2, 4, 8)"),
        ("batch", "ValueError: npu_fusion_attention: head_num 2, query (1, 2, 4, 8), key (3, 2,"),
        ("layout", "NotImplementedError: npu_fusion_attention: input_layout 'NSD' is not"),
        ("TND", "ValueError: npu_fusion_attention: TND needs actual_seq_qlen"),
        ("rest", "ValueError: npu_fusion_attention: the packed sequences end at [1], the tensor"),
    ],
)
def test_what_is_not_emulated_is_refused(npu, name: str, message: str) -> None:
    assert npu.run(refused, name).startswith(message)


def pointwise() -> None:
    """In the worker: normalisation, activation and rotation, with gradients."""
    import torch_npu

    register_cpu_kernels()
    x, gamma, angles = _random((5, 3, 8), (8,), (5, 1, 4))
    pairs = []
    normed, inverse = torch_npu.npu_rms_norm(x, gamma, epsilon=1e-3)
    assert inverse.shape == (5, 3, 1)
    assert inverse.dtype == torch.float32
    pairs.append((normed, torch.nn.functional.rms_norm(x, (8,), gamma, eps=1e-3)))
    gate, up = x[..., :4], x[..., 4:]
    pairs.append((torch_npu.npu_swiglu(x), torch.nn.functional.silu(gate) * up))
    pairs.append(
        (torch_npu.npu_swiglu(x[:4], dim=0), torch.nn.functional.silu(x[:2]) * x[2:4]),
    )
    # Rotation by complex numbers; a pair has one angle.
    turns = torch.polar(torch.ones_like(angles), angles)
    halves = torch.complex(gate, up) * turns
    pairs.append(
        (
            torch_npu.npu_rotary_mul(x, angles.cos().tile(2), angles.sin().tile(2)),
            torch.cat((halves.real, halves.imag), -1),
        )
    )
    turned = torch.complex(x[..., ::2], x[..., 1::2]) * turns
    repeated = [f(angles).repeat_interleave(2, -1) for f in (torch.cos, torch.sin)]
    pairs.append(
        (
            torch_npu.npu_rotary_mul(x, *repeated, rotary_mode="interleave"),
            torch.view_as_real(turned).flatten(-2),
        )
    )
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        weights = torch.arange(float(found.numel())).view(found.shape).cos()
        inputs = [t for t in (x, gamma, angles) if _depends(found, t)]
        assert inputs[0] is x
        grads = [
            torch.autograd.grad((y * weights).sum(), inputs, retain_graph=True)
            for y in (found, expected)
        ]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    for operator in (torch_npu.npu_swiglu, lambda t: torch_npu.npu_rms_norm(t, gamma)[0]):
        assert operator(x.bfloat16()).dtype == torch.bfloat16


def _depends(y: torch.Tensor, x: torch.Tensor) -> bool:
    (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True, allow_unused=True)
    return grad is not None


def test_normalisation_activation_and_rotation(npu) -> None:
    npu.run(pointwise)


def adam_steps(maximize: bool) -> None:
    """In the worker: three steps against torch's AdamW; the powers are those before the step."""
    import torch_npu

    register_cpu_kernels()
    start, *grads = (x.detach() for x in _random(*[(7,)] * 4))
    reference = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW(
        [reference],
        lr=0.1,
        betas=(0.8, 0.9),
        eps=1e-3,
        weight_decay=0.2,
        # The choice between the forms asks the device.
        foreach=False,
        maximize=maximize,
    )
    weight, first, second = start.clone(), torch.zeros(7), torch.zeros(7)
    for step, grad in enumerate(grads):
        reference.grad = grad
        optimizer.step()
        out = torch_npu.npu_apply_adam_w(
            0.8**step, 0.9**step, 0.1, 0.2, 0.8, 0.9, 1e-3, grad, None, False, maximize,
            out=(weight, first, second),
        )  # fmt: skip
        assert out[0] is weight
        torch.testing.assert_close(weight, reference.data)
    torch.testing.assert_close(first, optimizer.state[reference]["exp_avg"])
    torch.testing.assert_close(second, optimizer.state[reference]["exp_avg_sq"])


@pytest.mark.parametrize("maximize", [False, True])
def test_adam_w_takes_the_powers_before_the_step(npu, maximize: bool) -> None:
    npu.run(adam_steps, maximize)


def gemms_with_collectives(rank: int, port: int) -> None:
    """In two workers: MC2's operators over gloo, with whole numbers."""
    import torch_npu

    register_cpu_kernels()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    name = dist.group.WORLD.group_name
    shards = [torch.arange(6.0).reshape(2, 3) + 10 * r for r in range(2)]
    weight = torch.arange(12.0).reshape(3, 4)
    product, whole = torch_npu.npu_all_gather_base_mm(shards[rank], weight, name, 2)
    assert torch.equal(whole, torch.cat(shards))
    assert torch.equal(product, torch.cat(shards) @ weight)
    _, empty = torch_npu.npu_all_gather_base_mm(shards[rank], weight, name, 2, gather_output=False)
    assert empty.numel() == 0
    partials = [torch.arange(12.0).reshape(4, 3) - 5 * r for r in range(2)]
    scattered = torch_npu.npu_mm_reduce_scatter_base(partials[rank], weight, name, 2)
    expected = partials[0] @ weight + partials[1] @ weight
    assert torch.equal(scattered, expected[2 * rank : 2 * rank + 2])
    for wrong in (
        lambda: torch_npu.npu_all_gather_base_mm(shards[rank], weight, name, 4),
        lambda: torch_npu.npu_mm_reduce_scatter_base(partials[rank][:3], weight, name, 2),
    ):
        with pytest.raises(ValueError, match=r"world_size 4, but group|3 rows are not divisible"):
            wrong()
    dist.destroy_process_group()


@pytest.mark.long
def test_gemms_with_collectives(npu_pair) -> None:
    port = free_port()
    for rank, worker in enumerate(npu_pair):
        worker.send(gemms_with_collectives, rank, port)
    for worker in npu_pair:
        worker.receive()
