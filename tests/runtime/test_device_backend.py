"""Device and backend of a group are looked up in torch.distributed, not guessed from names."""

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
    """Backends as torch_npu registers HCCL, and as a CPU backend registers itself."""
    devices = {**dist.Backend.backend_capability, "hccl": ["npu"], "own_backend": ["cpu"]}
    monkeypatch.setattr(dist.Backend, "backend_capability", devices)
    assert device_backend(backend) == expected


def test_a_backend_that_nobody_registered() -> None:
    with pytest.raises(ValueError, match=r"'hccl' is unknown to torch.distributed, .*gloo"):
        device_backend("hccl")
