"""The operators of experts against autograd of a GEMM per token and expert."""

import pytest
import torch

from mindspeed_patches.rehearsal import npu_ops as ops


def _random(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes
    ]


@pytest.mark.parametrize(("kind", "groups"), [(0, [3, 3, 6]), (1, [3, 0, 3])])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_grouped_gemms(kind: int, groups: list[int], as_tensor: bool) -> None:
    x, weight, grad = _random((6, 4), (3, 4, 5), (6, 5))
    group_list = torch.tensor(groups) if as_tensor else groups
    expert = torch.tensor([0, 0, 0, 2, 2, 2])
    expected = torch.einsum("ti,tio->to", x, weight[expert])
    dx, dw = torch.autograd.grad(expected, (x, weight), grad)
    (out,) = ops.npu_gmm([x], [weight], [], group_list, 0, kind)
    torch.testing.assert_close(out, expected)
    (got_dx,), (got_dw,), bias = ops.npu_gmm_backward([grad], [x], [weight], group_list, kind)
    torch.testing.assert_close(got_dx, dx)
    torch.testing.assert_close(got_dw, dw)
    assert bias == []


def test_weight_gradients_are_added() -> None:
    x, dy, before = (tensor.detach().float() for tensor in _random((6, 4), (6, 5), (3, 4, 5)))
    total = before.flatten(0, 1).clone()
    ops.npu_groupmatmul_add_fp32(x, dy, torch.tensor([3, 3, 6]), total)
    added = torch.stack([x[:3].T @ dy[:3], torch.zeros(4, 5), x[3:].T @ dy[3:]])
    torch.testing.assert_close(total.view(3, 4, 5), before + added)


def test_what_is_not_emulated_is_refused() -> None:
    x, weight = _random((6, 4), (2, 4, 5))
    with pytest.raises(ValueError, match=r"groups end at \[5\], the tensor has 6 rows"):
        ops.npu_gmm([x], [weight], [], [3, 5], 0, 0)
    with pytest.raises(NotImplementedError, match="group_type 1 or a bias is not emulated"):
        ops.npu_gmm([x], [weight], [], [3, 6], 1, 0)
