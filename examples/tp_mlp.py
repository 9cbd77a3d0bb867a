"""A tensor-parallel MLP, trained with fused ops and with plain collectives: the same bits.

pip install -e . torch
torchrun --standalone --nproc_per_node 2 examples/tp_mlp.py
"""

from functools import partial

import torch
import torch.distributed as dist
from torch.nn.functional import gelu

# cut: linear
from commfuse_npu import (
    LinearOptions,
    Transport,
    all_gather_linear,
    linear_reduce_scatter,
)

# end
from commfuse_npu.runtime.collective_transport import CollectiveTransport

S = 64
B = 2
H = 32
FFN = 128

dist.init_process_group("gloo")  # "hccl" on NPUs
tensor_parallel_group = dist.group.WORLD
N = dist.get_world_size()
rank = dist.get_rank()
activation = partial(gelu, approximate="tanh")

# cut: linear
# Once, on all ranks, next to the set-up of the other process groups.
lanes = Transport.create(tensor_parallel_group)  # keep it
options = LinearOptions(chunks=2)


def mlp(x, up_weight, down_weight, group):
    """x: [s, B, H], this rank's part of the sequence; so is the result."""
    hidden = all_gather_linear(x, up_weight, group=group, options=options)
    return linear_reduce_scatter(activation(hidden), down_weight, group=group, options=options)


# end
def trained(group) -> list[torch.Tensor]:
    """Train three steps from the same start; returns this rank's losses and weights."""
    torch.manual_seed(rank)  # each rank has its own rows of the sequence and its own features
    up_weight = torch.nn.Parameter(torch.randn(FFN // N, H) / H**0.5)
    down_weight = torch.nn.Parameter(torch.randn(H, FFN // N) / FFN**0.5)
    optimizer = torch.optim.AdamW([up_weight, down_weight], lr=1e-2)
    losses = []
    for _ in range(3):
        x = torch.randn(S // N, B, H)
        loss = (mlp(x, up_weight, down_weight, group) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, up_weight.detach(), down_weight.detach()]


def main() -> None:
    # Over collectives, with the same split of GEMMs.
    collectives = CollectiveTransport(tensor_parallel_group, same_pieces=True)
    fused = trained(tensor_parallel_group)
    plain = trained(collectives)
    same = torch.tensor(all(map(torch.equal, fused, plain)))
    dist.all_reduce(same, dist.ReduceOp.MIN)
    if rank == 0:
        said = ", ".join(f"{loss:.4f}" for loss in fused[:3])
        print(f"losses {said}; fused and plain have the same bits on {N} ranks: {bool(same)}")
    dist.barrier()  # no rank exits while another still communicates
    lanes.close()
    dist.destroy_process_group()


main()
