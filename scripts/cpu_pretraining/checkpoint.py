"""Checkpoints that are either complete or not there.

    checkpoints/
      latest_checkpointed_iteration.txt      the number of the newest complete checkpoint
      iter_0000100/
        run.json                             model shape and layout, to refuse a mismatch early
        mp_rank_00_000/model_optim.pt        state of tensor-parallel rank 0, data-parallel rank 0
        mp_rank_01_000/model_optim.pt        ... (data-parallel ranks with context parallelism)
      .iter_0000200.partial/                 being written, or left over by a kill

Every rank writes and syncs its file into the partial folder; only when all ranks have said so does
rank 0 rename the folder, and only then replace the number. A kill at any moment therefore leaves
the previous checkpoint and its number as they were.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .usage_error import UsageError

__all__ = [
    "CheckpointError",
    "FoundCheckpoint",
    "find_checkpoint",
    "load_state",
    "save_state",
    "shape_of_run",
]

KEPT = 2
TRACKER = "latest_checkpointed_iteration.txt"
STATE_FILE = "model_optim.pt"
FACTS_FILE = "run.json"
# What the tensors in the files depend on. Everything else may change on resume.
_SHAPE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "make_vocab_size_divisible_by",
    "tensor_model_parallel_size",
    "context_parallel_size",
    "data_parallel_size",
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "ddp_bucket_size",
    "bf16",
)
_BEFORE_THERE_WAS = {
    "context_parallel_size": 1,
    "overlap_grad_reduce": False,
    "ddp_bucket_size": None,
}
# What the losses depend on as well: a change is allowed but ends bit-for-bit continuation.
_COURSE = (
    "sequence_parallel",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "train_iters",
    "lr",
    "min_lr",
    "lr_warmup_iters",
    "weight_decay",
    "clip_grad",
    "seed",
)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, and the previous one is untouched; or not be read."""


@dataclass(frozen=True)
class FoundCheckpoint:
    """A complete checkpoint: its folder, its iteration, and notes worth printing."""

    folder: Path
    iteration: int
    notes: tuple[str, ...]


def shape_of_run(args: argparse.Namespace, data_fingerprint: str) -> dict[str, Any]:
    """The facts stored with a checkpoint."""
    facts = {name: getattr(args, name) for name in (*_SHAPE, *_COURSE)}
    facts["data"] = data_fingerprint
    return facts


def find_checkpoint(checkpoints: Path, facts: dict[str, Any]) -> FoundCheckpoint:
    """The latest complete checkpoint below `checkpoints`, checked against `facts` of this run.

    Only reads the file system, so that it can run before process groups exist.

    Raises `UsageError` if there is none or if its model shape or layout differs.
    """
    notes: list[str] = []
    candidates = sorted(
        (folder for folder in checkpoints.glob("iter_*") if _is_number(folder)), reverse=True
    )
    tracked = _tracked(checkpoints)
    if tracked is not None:
        # The number is replaced last: a newer folder was never announced, but it is complete too.
        candidates.sort(key=lambda folder: folder.name != _folder_name(tracked))
    for folder in candidates:
        missing = _missing_file(folder)
        if missing is None:
            break
        notes.append(f"{folder.name} is incomplete ({missing} is missing), looking further back")
    else:
        raise UsageError(
            f"there is no complete checkpoint in {checkpoints}; leave --resume out to start anew, "
            "or name the run with --name and --runs-dir"
        )
    saved = _facts(folder / FACTS_FILE)
    unknown = [name for name in (*_SHAPE, *_COURSE, "data") if name not in saved]
    if unknown:
        raise UsageError(
            f"{folder / FACTS_FILE} does not say {', '.join(unknown)}; it is damaged: move "
            f"{folder} away to go on from the checkpoint before"
        )
    for name in _SHAPE:
        if saved[name] != facts[name]:
            raise UsageError(
                f"{folder} was written with {name} {saved[name]}, but this run has {facts[name]}; "
                f"set {name} back to {saved[name]}, or start anew under another --name"
            )
    for name in (*_COURSE, "data"):
        if saved[name] != facts[name]:
            change = "" if name == "data" else f" ({saved[name]}, now {facts[name]})"
            notes.append(f"{name} differs from the checkpoint's{change}: losses will differ too")
    return FoundCheckpoint(folder, int(folder.name.removeprefix("iter_")), tuple(notes))


def _is_number(folder: Path) -> bool:
    number = folder.name.removeprefix("iter_")
    return number.isascii() and number.isdecimal()


def _facts(path: Path) -> dict[str, Any]:
    """The facts of a checkpoint; an old one lacks those that did not exist yet."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        found = error
    if not isinstance(found, dict):
        why = found if isinstance(found, Exception) else f"it holds {type(found).__name__}"
        raise UsageError(
            f"{path} cannot be read: {why}; move {path.parent} away to go on from the checkpoint "
            "before"
        )
    return {**_BEFORE_THERE_WAS, **found}


def _tracked(checkpoints: Path) -> int | None:
    try:
        return int((checkpoints / TRACKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # the folders themselves say what there is


def _missing_file(folder: Path) -> str | None:
    if not (folder / FACTS_FILE).is_file():
        return FACTS_FILE
    facts = _facts(folder / FACTS_FILE)
    for name in ("tensor_model_parallel_size", "context_parallel_size", "data_parallel_size"):
        if type(facts.get(name)) is not int:
            return f"{name} in {FACTS_FILE}"
    for tp in range(facts["tensor_model_parallel_size"]):
        for dp in range(facts["context_parallel_size"] * facts["data_parallel_size"]):
            path = Path(_rank_folder(tp, dp), STATE_FILE)
            if not (folder / path).is_file():
                return str(path)
    return None


def _folder_name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def _rank_folder(tp_rank: int, dp_rank: int) -> str:
    return f"mp_rank_{tp_rank:02d}_{dp_rank:03d}"


def load_state(found: FoundCheckpoint, tp_rank: int, dp_rank: int) -> dict[str, Any]:
    """What `save_state` wrote for this rank."""
    path = found.folder / _rank_folder(tp_rank, dp_rank) / STATE_FILE
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever comes to the mind of a file that is none
        raise CheckpointError(
            f"{path} cannot be read: {error}; move {found.folder} away to go on from the "
            "checkpoint before"
        ) from error
    return state


def save_state(
    checkpoints: Path,
    iteration: int,
    state: dict[str, Any],
    facts: dict[str, Any],
    tp_rank: int,
    dp_rank: int,
) -> Path:
    """Write a checkpoint together with all other ranks (collective); returns its folder.

    Raises `CheckpointError` on every rank if any rank could not write, e.g. on a full disk.
    """
    first = dist.get_rank() == 0
    partial = checkpoints / f".{_folder_name(iteration)}.partial"
    final = checkpoints / _folder_name(iteration)
    with _together("prepare", partial):
        if first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    with _together("write", partial):
        folder = partial / _rank_folder(tp_rank, dp_rank)
        folder.mkdir()
        with (folder / STATE_FILE).open("wb") as file:
            torch.save(state, file)
            os.fsync(file.fileno())
        _sync_folder(folder)
        if first:
            _write_synced(partial / FACTS_FILE, json.dumps(facts, indent=1))
    with _together("publish", final):
        if first:
            _publish(partial, final)
            _write_synced(checkpoints / f".{TRACKER}.partial", f"{iteration}\n")
            os.replace(checkpoints / f".{TRACKER}.partial", checkpoints / TRACKER)
            _sync_folder(checkpoints)
            _prune(checkpoints, iteration)
    return final


@contextmanager
def _together(step: str, path: Path) -> Iterator[None]:
    """A step of which all ranks learn whether every rank managed it; it ends like a barrier."""
    failed: Exception | None = None
    try:
        yield
    except (OSError, RuntimeError) as error:
        failed = error
    failures = torch.tensor([int(failed is not None)])
    dist.all_reduce(failures)
    if failures.item():
        reason = failed or "another rank failed, see its message"
        raise CheckpointError(
            f"could not {step} {path}: {reason}; the previous checkpoint is untouched"
        ) from failed


def _publish(partial: Path, final: Path) -> None:
    _sync_folder(partial)
    if final.exists():
        # A run that resumed from an older checkpoint gets here again. A folder cannot be replaced
        # in one step; the older checkpoint it resumed from is still there in between.
        replaced = final.with_name(f".{final.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    partial.rename(final)
    _sync_folder(final.parent)


def _prune(checkpoints: Path, iteration: int) -> None:
    """Keep the newest `KEPT` checkpoints up to `iteration`, and nothing half-written."""
    complete = sorted(checkpoints.glob("iter_*"))
    # Beyond `iteration` there can only be folders of a course that was abandoned by resuming
    # from an older checkpoint.
    newer = [folder for folder in complete if folder.name > _folder_name(iteration)]
    current = [folder for folder in complete if folder.name <= _folder_name(iteration)]
    leftovers = [*checkpoints.glob(".iter_*.partial"), *checkpoints.glob(".iter_*.replaced")]
    for folder in (*newer, *current[:-KEPT], *leftovers):
        shutil.rmtree(folder, ignore_errors=True)


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
