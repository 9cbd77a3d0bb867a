"""What the ranks began is compared before Megatron's optimizers change a weight."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu import MismatchError, Transport
from mindspeed_patches.state_hashes import weight_hashes
from tests.limits import PATIENT
from tests.megatron.in_ranks import megatron
from tests.megatron.test_data_parallel import Case, Training


def trained(rank: int, case: Case) -> tuple[bool, bool, str]:
    """Whether weights changed in a step before, and in the one with the error."""
    made = Transport.create(timeout=PATIENT)
    with megatron():
        training = Training(case)
        weights = weight_hashes([training.model.module])
        made.agree("layer", {"rows": 4})
        training.iterate()
        changed = weight_hashes([training.model.module]) != weights
        bits = training.sha256()
        made.agree("layer", {"rows": 4 + rank})
        with pytest.raises(MismatchError) as caught:
            training.iterate()
        return changed, training.sha256() != bits, str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_megatron_changes_no_weight(ranks, distributed: bool, dtype: torch.dtype) -> None:
    for before, after, message in ranks(2).run(trained, Case(dtype, distributed)):
        assert before
        assert not after
        assert "layer: rank " in message
        assert "rows: " in message
