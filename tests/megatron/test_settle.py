"""What the ranks began is compared before Megatron's optimizers change a weight."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu import MismatchError, Transport
from mindspeed_patches.state_hashes import weight_hashes
from tests.distributed.ranks import on_ranks
from tests.limits import PATIENT
from tests.megatron.in_ranks import megatron
from tests.megatron.test_data_parallel import Case, Training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
@on_ranks(2)
def test_megatron_changes_no_weight(rank: int, distributed: bool, dtype: torch.dtype) -> None:
    made = Transport.create(timeout=PATIENT)
    with megatron():
        training = Training(Case(dtype, distributed))
        weights = weight_hashes([training.model.module])
        made.agree("layer", {"rows": 4})
        training.iterate()
        assert weight_hashes([training.model.module]) != weights
        bits = training.sha256()
        made.agree("layer", {"rows": 4 + rank})
        with pytest.raises(MismatchError, match=r"layer: rank .* rows: "):
            training.iterate()
        assert training.sha256() == bits
