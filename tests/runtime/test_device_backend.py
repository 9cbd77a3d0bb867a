"""Where a group's tensors are, and how it posts, is asked of torch.distributed, not of a name."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from commfuse_npu.runtime.collectives import device_backend


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch_npu registers HCCL, and as a backend of CPU tensors registers itself."""
    capable = dist.Backend.backend_capability
    known = {**capable, "hccl": ["npu"], "own_backend": ["cpu"], "not_gloo": ["npu"]}
    monkeypatch.setattr(dist.Backend, "backend_capability", known)


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("gloo", ("cpu", "gloo")),
        ("nccl", ("cuda", "nccl")),
        ("hccl", ("npu", "hccl")),
        ("cpu:gloo,npu:hccl", ("npu", "hccl")),
        ("npu:hccl,cpu:gloo", ("npu", "hccl")),
        ("cpu:gloo", ("cpu", "gloo")),
        ("own_backend", ("cpu", "own_backend")),
        ("not_gloo", ("npu", "not_gloo")),
    ],
)
def test_the_device_and_its_backend(registered: None, backend: str, expected: object) -> None:
    assert device_backend(backend) == expected


def test_a_backend_that_nobody_registered() -> None:
    with pytest.raises(
        ValueError, match=r"'hccl' is unknown to torch.distributed, which has .*gloo"
    ):
        device_backend("hccl")
