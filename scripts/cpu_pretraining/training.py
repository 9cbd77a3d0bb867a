"""The training loop: forward, backward, step, one line per iteration, checkpoints."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from commfuse_npu.tools.bench.wire import pace
from mindspeed_patches.fb_overlap.feature import Overlapping
from mindspeed_patches.state_hashes import hash_over_ranks

from .arguments import UsageError
from .checkpoint import load_state, run_facts, save_state
from .data import Corpus
from .exposed_time import ExposedTime, measure_exposed_time
from .layers import Layers, patched_layers
from .megatron_on_cpu import cuda_means_cpu
from .metrics import MetricsLog, Outcome, speed_of
from .model import build_trainee

__all__ = ["TrainingDivergedError", "train"]


class TrainingDivergedError(RuntimeError):
    """The loss is no longer a number; going on would only overwrite good checkpoints."""


def train(
    args: argparse.Namespace,
    corpus: Corpus,
    mode: str,
    folder: Path,
    found: Path | None,
    stop: Event,
) -> Outcome:
    """Train from the seed, or from a checkpoint that was found, and write below ``folder``.

    Needs process groups and `megatron_on_cpu()`. Collective: all ranks call it with the same
    arguments. A rank whose ``stop`` is set ends it for all after the running iteration.

    Args:
        mode: of the layers: ``commfuse`` (the fused form), ``plain`` (collectives, and the fused
            form's GEMMs), ``megatron`` or ``overlap`` (Megatron's own). ``overlap``, and any other
            with ``--commfuse-fb-overlap`` unless it is compared, runs forwards beside backwards:
            how long a rank is blocked is not measured then, since the other micro-batch computes
            while a transfer is waited for.

    Raises:
        TrainingDivergedError: the loss became infinite or not a number.
        CheckpointError: one could not be read or written.
        UsageError: the connections cannot have the ``--link-rate``.
        IncompatibleOptionsError: nothing would be fused.
    """
    model_parallel_cuda_manual_seed(args.seed)
    overlap = mode == "overlap" or (args.commfuse_fb_overlap and not args.compare)
    exposed = nullcontext() if overlap else measure_exposed_time()
    with patched_layers(mode, args) as layers, exposed as collectives:
        loop = _Loop(args, corpus, layers, collectives, folder)
        if found is not None:
            loop.restore(found)
        try:
            return loop.run(stop)
        finally:
            if args.link_rate is not None:
                pace(None)


def _pace_on_all_ranks(rate: float) -> int:
    """Give this process's connections ``rate`` MB/s each; returns how many. Collective.

    On loopback a transfer is a copy, which costs the CPU that should compute meanwhile: nothing can
    be hidden. A paced socket waits in the kernel's timers instead. A link is a pair of ranks, one
    direction and one process group, as each group has connections of its own: one link for all that
    compares, since lanes keep the transfers of a pair and direction together, and collectives are
    of one group.

    Raises:
        UsageError: the kernel of a rank refuses; on every rank, and nothing trains over links that
            only seem to have a rate.
    """
    outcome = pace(rate * 1e6)
    problems = [""] * dist.get_world_size()
    dist.all_gather_object(problems, outcome.problem)
    for rank, problem in enumerate(problems):
        if problem:
            raise UsageError(
                f"--link-rate {rate:g} cannot be set on rank {rank}: {problem}; leave --link-rate "
                "out for the loopback as it is, or run on Linux 4.20 or newer, outside of "
                "sandboxes that replace the kernel's sockets"
            )
    return outcome.sockets


class _Loop:
    def __init__(
        self,
        args: argparse.Namespace,
        corpus: Corpus,
        layers: Layers,
        collectives: ExposedTime | None,
        folder: Path,
    ) -> None:
        self.args, self.corpus, self.folder = args, corpus, folder
        self.layers, self.collectives = layers, collectives
        self.iteration, self.rank = 0, dist.get_rank()
        self.model, self.optimizer, self.scheduler = build_trainee(args)
        if layers.report is not None:
            layers.report.tell([self.model])
        choose = get_forward_backward_func
        if collectives is None:
            overlapping = Overlapping(order_log=args.commfuse_order_log)
            choose = overlapping.get_forward_backward_func_wrapper(choose)
        self.forward_backward = choose()
        # [1, 1, S, S], True where attention is not allowed. Given explicitly because Megatron
        # would build its default mask on the device "cuda" in the middle of the forward pass.
        length = args.seq_length
        self.mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        # Context-parallel ranks have one run of the sequence each, in order: what Ulysses needs.
        rows = length // args.context_parallel_size
        first_row = parallel_state.get_context_parallel_rank() * rows
        self.own_rows = slice(first_row, first_row + rows)
        self.positions = torch.arange(length)[None, self.own_rows].expand(args.micro_batch_size, -1)

    def run(self, stop: Event) -> Outcome:
        args, outcome = self.args, Outcome(iteration=self.iteration)
        log = MetricsLog(self.folder / "metrics.jsonl", self.iteration) if self.rank == 0 else None
        entries: list[dict[str, Any]] = []
        if args.link_rate is not None:
            _pace_on_all_ranks(args.link_rate)
        while self.iteration < args.train_iters and not outcome.stopped:
            entry, outcome.stopped = self._iteration(stop)
            outcome.losses[self.iteration] = entry["lm_loss"]
            outcome.iteration = self.iteration
            entries.append(entry)
            if args.link_rate is not None and len(entries) == 1:
                # Some connections may have come with the first use of their group.
                links = _pace_on_all_ranks(args.link_rate)
                self._say(f" links: {links} connections of rank 0 at {args.link_rate:g} MB/s")
            if log:
                log.append(entry)
            self._say(_iteration_line(args.train_iters, entry))
            last = self.iteration == args.train_iters
            due = args.save_interval and self.iteration % args.save_interval == 0
            if not args.compare and (due or last or outcome.stopped):
                self._save()
        self._finish_parameters()
        outcome.speed = speed_of(entries, args.global_batch_size * args.seq_length, args.link_rate)
        outcome.layers = self.layers.describe()
        outcome.weights_sha256 = hash_over_ranks([self.model.module], self.optimizer)
        return outcome

    def _say(self, line: str) -> None:
        if self.rank == 0:
            print(line, flush=True)

    def _iteration(self, stop: Event) -> tuple[dict[str, Any], bool]:
        """One optimizer step; returns the metrics entry, and whether a rank was told to stop."""
        args = self.args
        blocked_before = self._blocked_seconds()
        start = time.perf_counter()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self._forward_backward()
        blocked = self._blocked_seconds() - blocked_before
        self._check_finite("lm loss", loss)
        with cuda_means_cpu():
            _, grad_norm, _ = self.optimizer.step()
        # Too late for these weights, but before they could replace a good checkpoint.
        self._check_finite("grad norm", float(grad_norm))
        learning_rate = self.optimizer.param_groups[0]["lr"]
        self.scheduler.step(args.global_batch_size)
        self.iteration += 1
        elapsed = time.perf_counter() - start
        # Means over the ranks, which stop together: one that left alone would leave the others in
        # a collective.
        shared = torch.tensor([blocked, elapsed, float(stop.is_set())], dtype=torch.float64)
        dist.all_reduce(shared)
        blocked, elapsed, stopping = (shared / dist.get_world_size()).tolist()
        entry = {
            "iteration": self.iteration,
            "lm_loss": loss,
            "elapsed_ms": elapsed * 1e3,
            "tokens_per_second": args.global_batch_size * args.seq_length / elapsed,
            "exposed_ms": None if self.collectives is None else blocked * 1e3,
            "grad_norm": float(grad_norm),
            "lr": learning_rate,
        }
        return entry, stopping > 0

    def _check_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            raise TrainingDivergedError(
                f"iteration {self.iteration + 1}: {what} is {value}; the weights of this "
                f"iteration were not saved. Lower --lr (now {self.args.lr})"
            )

    def _blocked_seconds(self) -> float:
        if self.collectives is None:
            return 0.0
        return self.layers.blocked_seconds() + self.collectives.seconds

    def _forward_backward(self) -> float:
        """Gradients of a global batch, and its mean loss over all replicas."""
        args = self.args
        # The schedule allocates its token counter on "cuda" and offers no place to leave the mode
        # again; it costs about a microsecond per torch call.
        with cuda_means_cpu():
            losses = self.forward_backward(
                forward_step_func=self._forward_step,
                data_iterator=self._microbatches(),
                model=[self.model],
                num_microbatches=args.num_microbatches,
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                forward_only=False,
            )
        mean = torch.stack([entry["lm loss"] for entry in losses]).mean()
        replicas = args.context_parallel_size * args.data_parallel_size
        if replicas > 1:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            dist.all_reduce(mean, group=group)
            mean /= replicas
        return float(mean)

    def _microbatches(self) -> Iterator[list[torch.Tensor]]:
        """Inputs and labels, ``[B, s]`` each: this rank's rows of this replica's samples.

        The samples of an iteration are the same in every layout.
        """
        args, replica = self.args, parallel_state.get_data_parallel_rank()
        first = self.iteration * args.global_batch_size
        for microbatch in range(args.num_microbatches):
            start = first + (microbatch * args.data_parallel_size + replica) * args.micro_batch_size
            samples = range(start, start + args.micro_batch_size)
            batch = self.corpus.batch(samples, args.seq_length, args.seed)
            yield [tokens[:, self.own_rows].contiguous() for tokens in batch]

    def _forward_step(self, batches: Iterator[Any], model: torch.nn.Module) -> tuple[Any, Any]:
        inputs, labels = next(batches)
        losses = model(inputs, self.positions, self.mask, labels=labels)  # [B, s]
        return losses, self._mean_loss

    def _mean_loss(self, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Mean over the tokens of this rank; the schedule divides by the number of micro-batches.

        The schedule also multiplies by the context-parallel size: it expects what a rank's tokens
        add to the mean of the whole sequence.
        """
        loss = losses.float().mean()
        return loss / self.args.context_parallel_size, {"lm loss": loss.detach().clone()}

    def _finish_parameters(self) -> None:
        """With their gather overlapped, parameters arrive in the next forward; have them now."""
        if self.args.overlap_param_gather:
            self.model.disable_forward_pre_hook(param_sync=True)
            self.model.enable_forward_pre_hook()

    def _save(self) -> None:
        self._finish_parameters()
        training = {
            "model": self.model.module.state_dict(),
            "optimizer": [
                (_parameters(inner), inner.state_dict()["state"])
                for inner in _inner_optimizers(self.optimizer)
            ],
            "scheduler": self.scheduler.state_dict(),
            "rng": torch.get_rng_state(),
            "rng_tracker": get_cuda_rng_tracker().get_states(),
        }
        facts = run_facts(self.args, self.corpus.fingerprint())
        folder = save_state(self.folder / "checkpoints", self.iteration, training, facts)
        self._say(f" saved checkpoint {folder}")

    def restore(self, found: Path) -> None:
        """Continue from ``found`` exactly where it was written."""
        saved = load_state(found, self.rank)
        self.iteration, state = saved["iteration"], saved["training"]
        self.model.module.load_state_dict(state["model"])
        inner_optimizers = _inner_optimizers(self.optimizer)
        for inner, (values, kept) in zip(inner_optimizers, state["optimizer"], strict=True):
            for parameter, value in zip(_parameters(inner), values, strict=True):
                parameter.copy_(value)
            # Groups stay those of this command line: they hold learning rates, not state.
            groups = inner.state_dict()["param_groups"]
            inner.load_state_dict({"state": kept, "param_groups": groups})
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"])
        get_cuda_rng_tracker().set_states(state["rng_tracker"])


def _inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """torch's optimizers inside Megatron's: they own the fp32 parameters and the Adam state."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [one.optimizer for one in chained if one.optimizer is not None]


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [one.detach() for group in optimizer.param_groups for one in group["params"]]


def _iteration_line(of: int, entry: dict[str, Any]) -> str:
    """With Megatron's names, which ``commfuse-npu measure`` reads."""
    exposed = entry["exposed_ms"]
    blocked = "" if exposed is None else f" exposed communication (ms): {exposed:.1f} |"
    return (
        f" iteration {entry['iteration']:8d}/{of:8d} |"
        f" elapsed time per iteration (ms): {entry['elapsed_ms']:.1f} |{blocked}"
        f" learning rate: {entry['lr']:.2E} | lm loss: {entry['lm_loss']:.6E} |"
        f" grad norm: {entry['grad_norm']:.3f} | tokens/s: {entry['tokens_per_second']:.0f} |"
    )
