"""A small Llama in plain PyTorch, trained fully sharded over the data-parallel ranks.

pip install -e . torch
torchrun --standalone --nproc_per_node 2 examples/sharded_llama.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

# cut: sharded
from commfuse_npu import Transport
from commfuse_npu.ops import average_gradients, clip_gradient_norm, shard_linears

# end

VOCABULARY, H, FFN, HEADS, LAYERS, S = 64, 64, 160, 4, 2, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(H) for _ in range(2))
        self.qkv, self.proj = nn.Linear(H, 3 * H, bias=False), nn.Linear(H, H, bias=False)
        self.gate, self.up = nn.Linear(H, FFN, bias=False), nn.Linear(H, FFN, bias=False)
        self.down = nn.Linear(FFN, H, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Tokens [B, S] to logits [B, S, V]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, H)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.RMSNorm(H), nn.Linear(H, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary embeddings; x: [B, heads, S, D]."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[2]), 10000 ** (-torch.arange(half) / half))
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


dist.init_process_group("gloo")  # "hccl" on NPUs
rank, N = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # all ranks begin with the same model
model = Llama()
numbers = torch.Generator().manual_seed(1 + rank)
batches = [  # numbers that increase by one, from a random start
    (torch.randint(VOCABULARY, (8, 1), generator=numbers) + torch.arange(S + 1)) % VOCABULARY
    for _ in range(20)
]
whole = sum(parameter.numel() for parameter in model.parameters())
before = loss(model, batches[0]).item()

# cut: sharded
transport = Transport.create()  # of all ranks
model = shard_linears(model, transport=transport)
optimizer = torch.optim.AdamW(model.parameters())
for batch in batches:  # this rank's own
    loss(model, batch).backward()
    average_gradients(model, transport)  # of norms and embeddings; the ranks meet here
    clip_gradient_norm(model, 1.0, transport)
    optimizer.step()
    optimizer.zero_grad()
# end

after = loss(model, batches[0]).item()
if rank == 0:
    kept = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"loss {before:.2f} -> {after:.2f}; {kept:,} of {whole:,} parameters on each of {N} ranks"
    )
dist.barrier()  # no rank exits while another still communicates
transport.close()
dist.destroy_process_group()
