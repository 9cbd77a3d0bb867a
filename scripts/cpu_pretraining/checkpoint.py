"""Checkpoints that are either complete or absent.

    checkpoints/
      iter_0000100/rank_0.pt ...     weights, optimizer, random states, and facts about the run
      .iter_0000200.partial/         being written, or left over by a kill

Every rank writes and syncs its file into the partial folder; once all have reported success, rank 0
renames the folder. A kill at any moment therefore leaves the previous checkpoint unchanged.

torch.distributed.checkpoint would not be simpler here: it treats tensors of one name on several
ranks as copies, needs the optimizer's state before it can load it, and executes pickled code.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .arguments import UsageError

__all__ = [
    "CheckpointError",
    "find_checkpoint",
    "first_reason",
    "load_state",
    "run_facts",
    "save_state",
]

_KEPT = 2
# The shapes of the saved tensors depend on these. Everything else may change on resume.
_SHAPE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("tensor_model_parallel_size", "context_parallel_size", "data_parallel_size", "bf16"),
    *("use_distributed_optimizer", "overlap_grad_reduce", "ddp_bucket_size"),
)
# The losses depend on these, too: a change is allowed but ends bit-for-bit continuation.
_COURSE = ("seq_length", "micro_batch_size", "global_batch_size", "train_iters", "lr", "seed")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read, or not be written; then the previous one is unchanged."""


def run_facts(args: argparse.Namespace, data: str) -> dict[str, Any]:
    """The facts that are stored about a run; ``data``: the fingerprint of its corpus."""
    return {name: getattr(args, name) for name in (*_SHAPE, *_COURSE)} | {"data": data}


def find_checkpoint(checkpoints: Path, facts: dict[str, Any]) -> tuple[Path, list[str]]:
    """The latest complete checkpoint, and how its run differs from ``facts`` of this one.

    Raises:
        UsageError: there is none, or its model or layout differs.
        CheckpointError: it is damaged.
    """
    folder = max(checkpoints.glob("iter_*[0-9]"), default=None)
    if folder is None:
        raise UsageError(
            f"there is no complete checkpoint in {checkpoints}; leave --resume out to start anew, "
            "or name the run with --name and --runs-dir"
        )
    saved, notes = load_state(folder, 0)["run"], []
    for name, now in facts.items():
        if (before := saved.get(name)) == now:
            continue
        if name in _SHAPE:
            raise UsageError(
                f"{folder} was written with {name} {before}, but this run has {now}; "
                f"set {name} back to {before}, or start anew under another --name"
            )
        notes.append(f"{name} differs from the checkpoint's ({before}, now {now}): losses will too")
    return folder, notes


def load_state(folder: Path, rank: int) -> dict[str, Any]:
    """What `save_state` wrote for this rank: ``run``, ``iteration`` and ``training``.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    path = folder / f"rank_{rank}.pt"
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
        return {key: state[key] for key in ("run", "iteration", "training")}
    except Exception as error:  # a damaged file makes torch.load raise almost anything
        raise CheckpointError(
            f"{path} is missing or damaged ({type(error).__name__}); move {folder} away to go on "
            "from the checkpoint before"
        ) from error


def save_state(checkpoints: Path, iteration: int, training: Any, facts: dict[str, Any]) -> Path:
    """Write a checkpoint together with all other ranks; returns its folder. Collective.

    Raises:
        CheckpointError: on every rank if any could not write, e.g. on a full disk.
    """
    final = checkpoints / f"iter_{iteration:07d}"
    partial = checkpoints / f".{final.name}.partial"
    rank = dist.get_rank()
    with _on_all_ranks("write", partial):
        partial.mkdir(parents=True, exist_ok=True)
        with (partial / f"rank_{rank}.pt").open("wb") as file:
            torch.save({"run": facts, "iteration": iteration, "training": training}, file)
            os.fsync(file.fileno())
    with _on_all_ranks("publish", final):
        if rank == 0:
            # It exists if the run resumed from an older checkpoint, which is kept for now.
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            _prune(checkpoints, final.name)
    return final


@contextmanager
def _on_all_ranks(step: str, path: Path) -> Iterator[None]:
    """A step after which all ranks know whether it succeeded everywhere; ends like a barrier."""
    reason = ""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = f"{error}"
    if why := first_reason(reason):
        raise CheckpointError(f"could not {step} {path}: {why}; the previous one is untouched")


def first_reason(reason: str) -> str:
    """The reason of the first rank that has one, on all ranks; empty if none has. Collective."""
    reasons = [reason] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next(filter(None, reasons), "")


def _prune(checkpoints: Path, newest: str) -> None:
    """Keep the newest `_KEPT` checkpoints up to ``newest``, and nothing half-written."""
    # Later ones belong to a course that was abandoned by resuming from an older checkpoint.
    names = sorted(folder.name for folder in checkpoints.glob("iter_*"))
    recent = [name for name in names if name <= newest][-_KEPT:]
    for folder in (*checkpoints.glob("iter_*"), *checkpoints.glob(".iter_*")):
        if folder.name not in recent:
            shutil.rmtree(folder, ignore_errors=True)
