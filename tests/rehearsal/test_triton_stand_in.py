"""Kernels of Triton can be declared where there is no Triton, and say so when they are called."""

import importlib.util
import sys
from unittest.mock import patch

import pytest
import torch._dynamo  # noqa: F401  # before the modules below, which are removed again

from mindspeed_patches.rehearsal import triton_stand_in


@patch.dict(sys.modules)
def test_declared_kernels_raise_when_they_are_called() -> None:
    triton_stand_in.install()
    import triton
    import triton.language as tl

    @triton.autotune(configs=[triton.Config({}, num_warps=1)], key=["T"])
    @triton.jit(do_not_specialize=["T"])
    def kernel(x, T: tl.constexpr = 64):
        """Never runs."""

    assert importlib.util.find_spec("triton") is not None
    assert not hasattr(triton.runtime.driver, "active")
    with pytest.raises(NotImplementedError, match="is not emulated; leave out the option"):
        kernel[1, 2](None)
