"""Where a group's tensors are, and how it posts, is asked of torch.distributed, not of a name."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from commfuse_npu.runtime.collectives import device_backend


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("gloo", ("cpu", "gloo")),
        ("nccl", ("cuda", "nccl")),
        ("hccl", ("npu", "hccl")),
        ("cpu:gloo,npu:hccl", ("npu", "hccl")),
        ("npu:hccl,cpu:gloo", ("npu", "hccl")),
        ("own_backend", ("cpu", "own_backend")),
    ],
)
def test_the_device_and_its_backend(monkeypatch, backend: str, expected: object) -> None:
    """As torch_npu registers HCCL, and as a backend of CPU tensors registers itself."""
    known = {**dist.Backend.backend_capability, "hccl": ["npu"], "own_backend": ["cpu"]}
    monkeypatch.setattr(dist.Backend, "backend_capability", known)
    assert device_backend(backend) == expected


def test_a_backend_that_nobody_registered() -> None:
    with pytest.raises(ValueError, match=r"'hccl' is unknown to torch.distributed, .*gloo"):
        device_backend("hccl")
