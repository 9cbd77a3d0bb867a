"""Forward-backward overlap of two micro-batches, with the same bits as sequential execution.

pip install -e . torch
torchrun --standalone --nproc_per_node 2 examples/forward_backward_overlap.py
"""

from typing import Any

import torch
import torch.distributed as dist

# cut: overlap
from commfuse_npu.overlap import ForwardBackwardOverlap

# end

dist.init_process_group("gloo")  # "hccl" on NPUs
N = dist.get_world_size()
rank = dist.get_rank()


class RowParallel(torch.autograd.Function):
    """``all_reduce(x @ W^T)``: blocking, as in most hand-written layers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        y = x @ weight.t()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight
        work = dist.all_reduce(grad_x, async_op=True)
        grad_weight = grad.t() @ x
        work.wait()
        return grad_x / N, grad_weight


def train(enabled: bool) -> list[torch.Tensor]:
    torch.manual_seed(rank)
    weights = [torch.nn.Parameter(torch.randn(16, 16) / 8) for _ in range(4)]
    batches = [torch.randn(8, 16) for _ in range(6)]

    def logits(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.tanh(RowParallel.apply(x, weight))
        return x

    def forward(x: torch.Tensor) -> torch.Tensor:
        return logits(x).pow(2).mean()

    tensor_parallel_group = dist.group.WORLD
    # cut: overlap
    overlap = ForwardBackwardOverlap([tensor_parallel_group])  # once
    # end
    overlap.enabled = enabled
    # cut: overlap
    loss = forward(batches[0])
    for batch in batches[1:]:
        loss, _ = overlap.run(lambda batch=batch: forward(batch), loss.backward)
    loss.backward()
    overlap.check()  # before the optimizer changes weights
    # end
    requests = torch.cat(batches)
    half = 3 * 8
    # cut: prefill
    with torch.no_grad():
        first, second = overlap.run_together(
            first=lambda: logits(requests[:half]), second=lambda: logits(requests[half:])
        )
    # end
    if rank == 0 and enabled:
        print(f"{overlap.runs} runs, {overlap.hand_overs.total()} transfers with work beside them")
    return [first, second, *(weight.grad for weight in weights if weight.grad is not None)]


same = all(map(torch.equal, train(True), train(False)))
if rank == 0:
    print(f"side by side and one after the other have the same bits on {N} ranks: {same}")
dist.barrier()  # no rank exits while another still communicates
dist.destroy_process_group()
