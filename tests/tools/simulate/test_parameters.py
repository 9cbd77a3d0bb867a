"""The simulator's parameter count against the one published by a model's authors."""

from __future__ import annotations

import pytest

from commfuse_npu.tools.plan.training import training_of
from tests.tools.plan.launches import asked

DEEPSEEK_V3 = (
    "--nproc_per_node 1 --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 "
    "--num-attention-heads 128 --vocab-size 129280 --seq-length 4096 --swiglu --bf16 "
    "--micro-batch-size 1 --global-batch-size 1 --max-position-embeddings 4096 "
    "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
    "--qk-pos-emb-head-dim 64 --v-head-dim 128 --num-experts 256 --moe-router-topk 8 "
    "--moe-ffn-hidden-size 2048 --n-shared-experts 1 --first-k-dense-replace 3 --moe-layer-freq 1 "
    "--moe-grouped-gemm --moe-token-dispatcher-type alltoall"
)


def test_deepseek_v3_has_671_billion() -> None:
    """Latent attention, experts and shared experts; 671 B in arXiv 2412.19437, with embeddings."""
    job = training_of(asked(DEEPSEEK_V3))
    embeddings = 2 * job.model.padded_vocab_size * job.model.hidden_size
    assert sum(job.of_layers(0)) + embeddings == pytest.approx(671e9, rel=1e-3)
