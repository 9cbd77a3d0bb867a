"""How far summed gradient buckets are from fp64.

Every rank has a bucket of random gradients; each gets its shard of the sum, three ways: by the
collective in the bucket's dtype, by `Buckets` in that dtype (rounded at every addition, as the
collective), and by `Buckets` with `reduce_dtype=torch.float32` (what `--commfuse-dp-reduce-dtype
float32` asks for: rounded once).  All are held against the same sum in fp64, whose numbers are of
size 1 per rank; errors are means and maxima over all elements of all ranks.

With two ranks there is one addition, rounded once either way, so all three are the same numbers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from commfuse_npu.ops import BucketOptions, Buckets
from commfuse_npu.reference import plain_reduce_scatter_bucket
from commfuse_npu.runtime.collectives import all_gather_rows
from commfuse_npu.runtime.transport import Transport
from scripts.gloo_ranks import run_ranks

__all__ = ["Errors", "main", "measure"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Errors:
    """Errors of one rank's shard against fp64, and what they are errors of.

    Attributes:
        way: how the shard was summed.
        mean, largest: absolute.
        as_collective: whether every bit is that of the collective's sum.
    """

    way: str
    mean: float
    largest: float
    as_collective: bool


def measure(
    transport: Transport, elements: int, dtype: torch.dtype, average: bool, seed: int = 0
) -> list[Errors]:
    """Sum a bucket of `elements` per shard three ways; collective over the transport's ranks."""
    rank, size = transport.rank, transport.size
    generator = torch.Generator().manual_seed(seed * size + rank)
    bucket = torch.randn(size * elements, generator=generator).to(dtype)
    everyone = all_gather_rows(bucket, transport.group).view(size, size, -1)[:, rank].double()
    exact = everyone.mean(0) if average else everyone.sum(0)

    collective = bucket.clone()
    plain_reduce_scatter_bucket(collective, group=transport.group, average=average)
    sums = {"the collective": collective}
    for way, reduce_dtype in (("Buckets", None), ("Buckets, added in fp32", torch.float32)):
        sums[way] = bucket.clone()
        buckets = Buckets(transport, BucketOptions(reduce_dtype=reduce_dtype))
        buckets.reduce_scatter(sums[way], average=average).wait()

    own = slice(rank * elements, (rank + 1) * elements)
    found = []
    for way, total in sums.items():
        error = (total[own].double() - exact).abs()
        same = torch.equal(total[own], collective[own])
        found.append(Errors(way, error.mean().item(), error.max().item(), same))
    return found


def _rank(rank: int, elements: int, dtype: str, average: bool) -> None:
    transport = Transport.create()
    found = measure(transport, elements, DTYPES[dtype], average)
    everyone: list[list[Errors]] = [[]] * transport.size
    dist.all_gather_object(everyone, found)
    if rank == 0:
        _print(transport.size, everyone)
    transport.close()


def _print(size: int, everyone: Sequence[Sequence[Errors]]) -> None:
    for ways in zip(*everyone, strict=True):
        mean = sum(errors.mean for errors in ways) / size
        largest = max(errors.largest for errors in ways)
        same = "yes" if all(errors.as_collective for errors in ways) else "no"
        print(f"{size:>5}  {ways[0].way:<24} {mean:>12.3e} {largest:>12.3e}  {same}", flush=True)


def main(argv: Sequence[str]) -> int:
    """Print a table, three lines per number of ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--elements", type=int, default=1 << 16, help="of a shard")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--average", action="store_true", help="divide by the number of ranks")
    args = parser.parse_args(argv)
    for size in args.ranks:
        if size < 2:
            parser.error(f"--ranks {size}: one rank adds nothing; give numbers from 2")
    if args.elements < 1:
        parser.error(f"--elements {args.elements} is not positive")
    what = "averages" if args.average else "sums"
    print(f"{what} of {args.dtype} gradients against fp64, {args.elements} elements per shard")
    print(f"{'ranks':>5}  {'':<24} {'mean error':>12} {'largest':>12}  bits of the collective")
    for size in args.ranks:
        run_ranks(_rank, size, args.elements, args.dtype, args.average)
    return 0
