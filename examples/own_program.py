"""A user-defined program on the transport, whose order is proved.

pip install -e . torch
torchrun --standalone --nproc_per_node 2 examples/own_program.py
"""

from pathlib import Path

import torch
import torch.distributed as dist

from commfuse_npu import Transport
from commfuse_npu.plan.rules import GatherUse

# cut: order log
from commfuse_npu.runtime.order_log import OrderLog

# end
dist.init_process_group("gloo")  # "hccl" on NPUs
tensor_parallel_group = dist.group.WORLD

# cut: order log
order_log = OrderLog(Path("orders"), dist.get_rank(), dist.get_world_size())
transport = Transport.create(tensor_parallel_group, order_log=order_log)
# end

rows = 4
columns = 8
torch.manual_seed(dist.get_rank())
shard = torch.randint(9, (rows, columns)).float()  # this rank's part of what is gathered
matrix = torch.ones(columns, 3)
product = torch.empty(transport.size * rows, 3)


def use(piece: torch.Tensor, run: slice) -> None:
    """Called for each piece as it arrives, rows `run` of the whole."""
    product[run] = piece @ matrix


running = transport.begin(GatherUse(rows, columns), "my_operation", like=shard)
running.run(use=use, shard=shard)

whole = [torch.empty_like(shard) for _ in range(transport.size)]
dist.all_gather(whole, shard)
if transport.rank == 0:
    same = torch.equal(product, torch.cat(whole) @ matrix)
    print(f"the product of an all-gather: {same}; commfuse-npu verify --log orders")
dist.barrier()  # no rank exits while another still communicates
transport.close()
order_log.close()
dist.destroy_process_group()
