"""What the ranks began is compared before Megatron's optimizers change a weight."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu import MismatchError, Transport
from tests.limits import PATIENT
from tests.megatron.in_ranks import megatron


def trained(rank: int, distributed: bool, dtype: torch.dtype) -> tuple[bool, bool, str]:
    """Whether weights changed in a step before, and in the one with the error."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    made = Transport.create(timeout=PATIENT)
    with megatron():
        model = DistributedDataParallel(
            TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
            DistributedDataParallelConfig(use_distributed_optimizer=distributed),
            torch.nn.Linear(8, 8, dtype=dtype),
        )
        config = OptimizerConfig(
            optimizer="adam",
            lr=0.1,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
        )
        optimizer = get_megatron_optimizer(config, [model])

        def step(rows: int) -> bool:
            before = [parameter.detach().clone() for parameter in model.parameters()]
            model.zero_grad_buffer()
            optimizer.zero_grad()
            made.agree("layer", {"rows": rows})
            model(torch.ones(rows, 8, dtype=dtype)).float().sum().backward()
            model.finish_grad_sync()
            try:
                optimizer.step()
            finally:
                changed.append(not all(map(torch.equal, before, model.parameters())))
            return changed[-1]

        changed: list[bool] = []
        step(4)
        with pytest.raises(MismatchError) as caught:
            step(4 + rank)
    return changed[0], changed[1], str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_megatron_changes_no_weight(ranks, distributed: bool, dtype: torch.dtype) -> None:
    for before, after, message in ranks(2).run(trained, distributed, dtype):
        assert before
        assert not after
        assert "layer: rank " in message
        assert "rows: " in message
