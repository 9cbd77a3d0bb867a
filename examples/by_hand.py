"""The forwards of the fused ops, written by hand: post, compute, wait.  They equal the ops.

pip install -e . torch
torchrun --standalone --nproc_per_node 2 examples/by_hand.py
"""

import torch
import torch.distributed as dist
from torch.nn.functional import linear, scaled_dot_product_attention

from commfuse_npu import (
    Transport,
    all_gather_linear,
    all_to_all_linear,
    attention_linear_reduce_scatter,
    linear_all_to_all,
    linear_reduce_scatter,
)

dist.init_process_group("gloo")  # "hccl" on NPUs
N = dist.get_world_size()
rank = dist.get_rank()
hops = [((rank + distance) % N, (rank - distance) % N) for distance in range(1, N)]


# cut: by hand
def swap(sent, target, received, source):
    """Post a send and a receive as one batch; wait for what it returns."""
    receive = dist.P2POp(dist.irecv, received, source)
    return dist.batch_isend_irecv([receive, dist.P2POp(dist.isend, sent, target)])


def gather_gemm(x, weight):
    """linear(all_gather(x), weight): the own block first, while the first transfer is in flight."""
    blocks = [torch.empty_like(x) for _ in range(N)]
    posted = [swap(x, target, blocks[source], source) for target, source in hops]
    results = {rank: linear(x, weight)}
    for works, (_, source) in zip(posted, hops, strict=True):
        for work in works:
            work.wait()
        results[source] = linear(blocks[source], weight)  # the next block is in flight
    return torch.cat([results[block] for block in range(N)])


def gemm_scatter(block_of):
    """reduce_scatter of blocks: the own one last, while the last transfer is in flight."""
    posted = []
    for target, source in hops:
        sent = block_of(target)  # the block before is in flight
        arriving = torch.empty_like(sent)
        posted.append((swap(sent, target, arriving, source), sent, arriving))
    own = block_of(rank)
    total = torch.zeros_like(own)
    for works, _, arriving in posted:
        for work in works:
            work.wait()
        total += arriving
    return total + own


# end
def exchange(block_of):
    """all_to_all of blocks: the own one last; returns them by rank of the sender."""
    received = {}
    posted = []
    for target, source in hops:
        sent = block_of(target)
        received[source] = torch.empty_like(sent)
        posted.append((swap(sent, target, received[source], source), sent))
    received[rank] = block_of(rank)
    for works, _ in posted:
        for work in works:
            work.wait()
    return [received[block] for block in range(N)]


def attention(q, k, v):
    """[S, B, A, D] to [S, B, A * D], one query sees all keys."""
    heads = (tensor.permute(1, 2, 0, 3) for tensor in (q, k, v))
    return scaled_dot_product_attention(*heads).permute(2, 0, 1, 3).flatten(2)


torch.manual_seed(rank)
S, B, H, A, D = 4 * N, 2, 32, 2, 16
lanes = Transport.create()


def whole(*shape):
    """Integers, whose sums are exact in any order."""
    return torch.randint(-3, 4, shape).float()


x = whole(S, B, H)
shard = whole(S // N, B, H)
weight = whole(24, H)
wide = whole(N * 24, H)
heads = whole(S, B, 8)
projection = whole(H, N * 8)
q, k, v = (torch.randn(S, B, A, D) for _ in range(3))
out = torch.randn(H, A * D)

queries = q.chunk(N)
by_rank = x.chunk(N)
by_head = wide.chunk(N)
pairs = {
    "all_gather_linear": (gather_gemm(shard, weight), all_gather_linear(shard, weight)),
    "linear_reduce_scatter": (
        gemm_scatter(lambda block: linear(by_rank[block], weight)),
        linear_reduce_scatter(x, weight),
    ),
    "linear_all_to_all": (
        torch.cat(exchange(lambda block: linear(shard, by_head[block]))),
        linear_all_to_all(shard, wide),
    ),
    "all_to_all_linear": (
        linear(
            torch.cat(exchange(lambda block: heads.chunk(N)[block].contiguous()), -1), projection
        ),
        all_to_all_linear(heads, projection),
    ),
    "attention_linear_reduce_scatter": (
        gemm_scatter(lambda block: linear(attention(queries[block], k, v), out)),
        attention_linear_reduce_scatter(q, k, v, out, causal=False),
    ),
}
for name, (by_hand, fused) in pairs.items():
    same = (
        torch.allclose(by_hand, fused, atol=1e-4) if "attention" in name else by_hand.equal(fused)
    )
    if rank == 0:
        print(f"{name}: {same}")
dist.barrier()
lanes.close()
dist.destroy_process_group()
