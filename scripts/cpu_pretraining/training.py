"""The training loop: forward, backward, step, one line per iteration, checkpoints, validation."""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from commfuse_npu.runtime.trace import Trace
from commfuse_npu.tools.trace_file import linears_of, write
from mindspeed_patches.fb_overlap.feature import Overlapping

from .checkpoint import FoundCheckpoint, load_state, save_state, shape_of_run
from .data import Corpus, global_batch_samples
from .exposed_time import ExposedTime, measure_exposed_time
from .interrupt import StopRequest
from .linears import LinearsInUse, tensor_parallel_linears
from .link_rate import paced_links
from .megatron_on_cpu import cuda_means_cpu
from .metrics import MetricsLog, plot_loss
from .model import Trainee, build_trainee, model_flops_per_iteration
from .speed import Speed, speed_of

__all__ = ["Outcome", "TrainingDiverged", "train"]

_TRACED = 2
"""Iterations in a trace."""


class TrainingDiverged(RuntimeError):
    """The loss is no longer a number; going on would only overwrite good checkpoints."""


@dataclass
class Outcome:
    """How a training ended: its losses by iteration, the weights' hash, and why it stopped.

    `speed` is `None` if no iteration came after the warm-up.
    """

    losses: dict[int, float] = field(default_factory=dict)
    weights_sha256: str = ""
    linears: list[str] = field(default_factory=list)
    stopped_by: int = 0
    iteration: int = 0
    speed: Speed | None = None


def train(
    args: argparse.Namespace,
    corpus: Corpus,
    *,
    mode: str,
    folder: Path,
    stop: StopRequest,
    resume_from: FoundCheckpoint | None = None,
    checkpoints: bool = True,
    overlap: bool = False,
) -> Outcome:
    """Train from the seed, or from `resume_from`, with the linear layers of `mode`.

    `overlap` runs forwards beside backwards (`--commfuse-fb-overlap`).  How long a rank is blocked
    is not measured then: the other micro-batch computes while a transfer is waited for.

    Writes below `folder` (rank 0, except for checkpoints). Needs process groups and
    `megatron_on_cpu()`. Collective: all ranks call it with the same arguments.

    Raises `TrainingDiverged` if the loss becomes infinite or not a number, and `UsageError` if the
    connections cannot have the `--link-rate` that was asked for, or if nothing would be fused.
    """
    model_parallel_cuda_manual_seed(args.seed)
    exposed = nullcontext() if overlap else measure_exposed_time()
    with tensor_parallel_linears(mode, args) as linears, exposed as collectives:
        trainee = build_trainee(args)
        linears.tell(trainee.model)
        loop = _Loop(args, corpus, trainee, linears, collectives, folder)
        if resume_from is not None:
            loop.restore(resume_from)
        # Not before: what sets the model up is not part of the training and needs no wire.
        with paced_links(args.link_rate) as pace:
            return loop.run(stop, checkpoints, pace)


class _Loop:
    def __init__(
        self,
        args: argparse.Namespace,
        corpus: Corpus,
        trainee: Trainee,
        linears: LinearsInUse,
        collectives: ExposedTime | None,
        folder: Path,
    ) -> None:
        self.args = args
        self.corpus = corpus
        self.trainee = trainee
        self.linears = linears
        self.collectives = collectives
        self.folder = folder
        self.iteration = 0
        self.first = dist.get_rank() == 0
        self.tp_rank = parallel_state.get_tensor_model_parallel_rank()
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.state_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        choose = get_forward_backward_func
        if collectives is None:
            choose = Overlapping(
                order_log=args.commfuse_order_log
            ).get_forward_backward_func_wrapper(choose)
        self.forward_backward = choose()
        # [1, 1, S, S], True where attention is not allowed. Given explicitly because Megatron
        # would build its default mask on the device "cuda" in the middle of the forward pass.
        length = args.seq_length
        self.mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        # Context-parallel ranks have one run of the sequence each, in order: what Ulysses needs.
        rows = length // args.context_parallel_size
        first_row = parallel_state.get_context_parallel_rank() * rows
        self.own_rows = slice(first_row, first_row + rows)
        positions = torch.arange(length)[None, self.own_rows]
        self.positions = positions.expand(args.micro_batch_size, -1)

    # -- the loop ----------------------------------------------------------------------------

    def run(self, stop: StopRequest, checkpoints: bool, pace: Callable[[], int]) -> Outcome:
        args, outcome = self.args, Outcome(iteration=self.iteration)
        metrics = None
        if self.first:
            metrics = MetricsLog(self.folder / "metrics.jsonl", keep_until=self.iteration)
        bar = _progress_bar(args.train_iters, self.iteration, self.first)
        since_line: list[float] = []
        entries: list[dict[str, Any]] = []
        while self.iteration < args.train_iters and not outcome.stopped_by:
            entry, outcome.stopped_by = self._iteration(stop)
            outcome.losses[self.iteration] = entry["lm_loss"]
            outcome.iteration = self.iteration
            since_line.append(entry["elapsed_ms"])
            entries.append(entry)
            if len(entries) == 1:
                self._pace_again(pace, bar)
                self._begin_trace()
            elif len(entries) == 1 + _TRACED:
                self._end_trace(bar)
            if metrics:
                metrics.append(entry)
            last = self.iteration == args.train_iters or bool(outcome.stopped_by)
            if self.first and (last or self.iteration % args.log_interval == 0):
                elapsed = sum(since_line) / len(since_line)
                _print_line(_iteration_line(args, entry, elapsed), bar)
                since_line.clear()
            if bar is not None:
                bar.update()
            if self._due(args.eval_interval, last and not outcome.stopped_by):
                self._validate(metrics, bar)
            if checkpoints and self._due(args.save_interval, last, always_last=True):
                self._save(bar)
        self._end_trace(bar)
        if bar is not None:
            bar.close()
        self._finish_parameters()
        outcome.speed = speed_of(
            entries, tokens=args.global_batch_size * args.seq_length, link_rate=args.link_rate
        )
        outcome.linears = self.linears.describe()
        outcome.weights_sha256 = self._weights_sha256()
        if self.first:
            problem = plot_loss(self.folder / "metrics.jsonl", self.folder / "loss.png")
            if problem:
                print(problem, flush=True)
        return outcome

    def _pace_again(self, pace: Callable[[], int], bar: Any) -> None:
        """Some connections may have come with the first use of their group."""
        connections = pace()
        if self.first and connections:
            _print_line(
                f" links: {connections} connections of rank 0 at {self.args.link_rate:g} MB/s", bar
            )

    def _begin_trace(self) -> None:
        transport = self.linears.transport
        if self.args.trace and transport is not None and 0 in transport.ranks:
            transport.trace = Trace(linears=linears_of(self.trainee.model))

    def _end_trace(self, bar: Any) -> None:
        """Write what was traced, if it was; a collective of the traced group."""
        transport = self.linears.transport
        if transport is None or transport.trace is None:
            return
        try:
            count = write(transport, self.args.trace)
        except OSError as error:
            # The training is worth more than its trace.
            _print_line(f" trace: cannot write {self.args.trace}: {error.strerror}", bar)
        else:
            if self.first:
                _print_line(f" trace: {count} events in {self.args.trace}", bar)
        transport.trace = None

    def _due(self, interval: int, last: bool, always_last: bool = False) -> bool:
        if last and (interval or always_last):
            return True
        return bool(interval) and self.iteration % interval == 0

    def _iteration(self, stop: StopRequest) -> tuple[dict[str, Any], int]:
        """One optimizer step; returns the metrics entry and the agreed stop signal (0: go on)."""
        args, trainee = self.args, self.trainee
        blocked_before = self._blocked_seconds()
        start = time.perf_counter()
        trainee.model.train()
        trainee.model.zero_grad_buffer()
        trainee.optimizer.zero_grad()
        if self.linears.transport is not None and self.linears.transport.trace is not None:
            self.linears.transport.trace.iteration = self.iteration + 1
        loss = self._forward_backward("train", self.iteration * args.global_batch_size)
        blocked = self._blocked_seconds() - blocked_before
        self._check_finite("lm loss", loss)
        with cuda_means_cpu():
            _, grad_norm, _ = trainee.optimizer.step()
        # Too late for these weights, but before they could replace a good checkpoint.
        self._check_finite("grad norm", float(grad_norm or 0.0))
        learning_rate = trainee.optimizer.param_groups[0]["lr"]
        trainee.scheduler.step(args.global_batch_size)
        self.iteration += 1
        elapsed = time.perf_counter() - start
        blocked, elapsed, signal_number = _agree(blocked, elapsed, stop.signal_number)
        entry = {
            "iteration": self.iteration,
            "lm_loss": loss,
            "elapsed_ms": elapsed * 1e3,
            "tokens_per_second": args.global_batch_size * args.seq_length / elapsed,
            "exposed_ms": None if self.collectives is None else blocked * 1e3,
            "grad_norm": float(grad_norm or 0.0),
            "lr": learning_rate,
        }
        return entry, signal_number

    def _check_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            raise TrainingDiverged(
                f"iteration {self.iteration + 1}: {what} is {value}; the weights of this "
                f"iteration were not saved. Lower --lr (now {self.args.lr}) or raise "
                f"--lr-warmup-iters (now {self.args.lr_warmup_iters})"
            )

    def _blocked_seconds(self) -> float:
        if self.collectives is None:
            return 0.0
        return self.linears.blocked_seconds() + self.collectives.seconds

    def _validate(self, metrics: MetricsLog | None, bar: Any) -> None:
        """Loss of the held-out data on the same samples every time."""
        args = self.args
        self.trainee.model.eval()
        total = 0.0
        with torch.no_grad():
            for batch in range(args.eval_iters):
                total += self._forward_backward("valid", batch * args.global_batch_size)
        loss = total / args.eval_iters
        if metrics:
            metrics.append({"iteration": self.iteration, "validation_loss": loss})
            line = f" validation loss at iteration {self.iteration} | {loss:.4f}"
            if args.mindspeed_log:
                line = (
                    f" validation loss at iteration {self.iteration} | lm loss value: {loss:.6E} | "
                    f"lm loss PPL: {math.exp(min(20.0, loss)):.6E} |"
                )
            _print_line(line, bar)

    # -- forward and backward ----------------------------------------------------------------

    def _forward_backward(self, split: str, first_sample: int) -> float:
        """Mean loss of a global batch over all replicas; gradients too for the training split."""
        args = self.args
        # The schedule allocates its token counter on "cuda" and offers no place to leave the mode
        # again; it costs about a microsecond per torch call.
        with cuda_means_cpu():
            losses = self.forward_backward(
                forward_step_func=self._forward_step,
                data_iterator=self._microbatches(split, first_sample),
                model=[self.trainee.model],
                num_microbatches=args.num_microbatches,
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                forward_only=split != "train",
            )
        mean = torch.stack([entry["lm loss"] for entry in losses]).mean()
        replicas = args.context_parallel_size * args.data_parallel_size
        if replicas > 1:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            dist.all_reduce(mean, group=group)
            mean /= replicas
        return float(mean)

    def _microbatches(
        self, split: str, first_sample: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        args = self.args
        for samples in global_batch_samples(
            first_sample,
            args.num_microbatches,
            args.micro_batch_size,
            self.dp_rank,
            args.data_parallel_size,
        ):
            inputs, labels = self.corpus.batch(split, samples, args.seq_length, args.seed)
            yield inputs[:, self.own_rows].contiguous(), labels[:, self.own_rows].contiguous()

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

    # -- state -------------------------------------------------------------------------------

    def _finish_parameters(self) -> None:
        """With their gather overlapped, parameters arrive in the next forward; have them now."""
        model = self.trainee.model
        if self.args.overlap_param_gather:
            model.disable_forward_pre_hook(param_sync=True)
            model.enable_forward_pre_hook()

    def _save(self, bar: Any) -> None:
        args = self.args
        self._finish_parameters()
        state = {
            "iteration": self.iteration,
            "consumed_samples": self.iteration * args.global_batch_size,
            "model": self.trainee.model.module.state_dict(),
            "optimizer": [
                {
                    "main_params": [p.detach() for p in _parameters(inner)],
                    "state": inner.state_dict()["state"],
                }
                for inner in _inner_optimizers(self.trainee.optimizer)
            ],
            "scheduler": self.trainee.scheduler.state_dict(),
            "rng": torch.get_rng_state(),
            "rng_tracker": get_cuda_rng_tracker().get_states(),
            "args": {k: v for k, v in vars(args).items() if k != "config"},
        }
        facts = shape_of_run(args, self.corpus.fingerprint())
        folder = save_state(
            self.folder / "checkpoints", self.iteration, state, facts, self.tp_rank, self.state_rank
        )
        if self.first:
            _print_line(f" saved checkpoint {folder}", bar)

    def restore(self, found: FoundCheckpoint) -> None:
        """Continue from `found` exactly where it was written."""
        state = load_state(found, self.tp_rank, self.state_rank)
        self.trainee.model.module.load_state_dict(state["model"])
        inner_optimizers = _inner_optimizers(self.trainee.optimizer)
        for inner, saved in zip(inner_optimizers, state["optimizer"], strict=True):
            with torch.no_grad():
                for parameter, value in zip(_parameters(inner), saved["main_params"], strict=True):
                    parameter.copy_(value)
            # Groups stay those of this command line: they hold learning rates, not state.
            groups = inner.state_dict()["param_groups"]
            inner.load_state_dict({"state": saved["state"], "param_groups": groups})
        self.trainee.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"])
        get_cuda_rng_tracker().set_states(state["rng_tracker"])
        self.iteration = state["iteration"]

    def _weights_sha256(self) -> str:
        """SHA-256 over all ranks' parameters and main (fp32) parameters, in rank order."""
        digest = hashlib.sha256()
        for name, parameter in sorted(self.trainee.model.module.named_parameters()):
            digest.update(name.encode())
            digest.update(_raw_bytes(parameter))
        for inner in _inner_optimizers(self.trainee.optimizer):
            for parameter in _parameters(inner):
                digest.update(_raw_bytes(parameter))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, digest.hexdigest())
        return hashlib.sha256("".join(everyone).encode()).hexdigest()


def _inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """torch's optimizers inside Megatron's: they own the fp32 parameters and the Adam state."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [one.optimizer for one in chained if one.optimizer is not None]


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _agree(blocked: float, elapsed: float, signal_number: int) -> tuple[float, float, int]:
    """Mean blocked and elapsed seconds over the ranks, and the highest signal number of any."""
    everyone = torch.zeros(dist.get_world_size(), 3, dtype=torch.float64)
    own = [blocked, elapsed, float(signal_number)]
    everyone[dist.get_rank()] = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(everyone)
    return float(everyone[:, 0].mean()), float(everyone[:, 1].mean()), int(everyone[:, 2].max())


def _iteration_line(args: argparse.Namespace, entry: dict[str, Any], elapsed_ms: float) -> str:
    iteration = entry["iteration"]
    seconds = elapsed_ms / 1e3
    exposed = entry["exposed_ms"]
    if not args.mindspeed_log:
        return (
            f" iteration {iteration:8d}/{args.train_iters:8d} | lm loss {entry['lm_loss']:.4f} | "
            f"grad norm {entry['grad_norm']:.3f} | lr {entry['lr']:.2e} | {elapsed_ms:.0f} ms"
            f"{'' if exposed is None else f', {exposed:.0f} exposed'} | "
            f"{args.global_batch_size * args.seq_length / seconds:,.0f} tokens/s"
        )
    teraflops = model_flops_per_iteration(args) / seconds / dist.get_world_size() / 1e12
    tokens_per_second = args.global_batch_size * args.seq_length / seconds
    return (
        f" iteration {iteration:8d}/{args.train_iters:8d} |"
        f" consumed samples: {iteration * args.global_batch_size:12d} |"
        f" elapsed time per iteration (ms): {elapsed_ms:.1f} |"
        f" throughput per GPU (TFLOP/s/GPU): {teraflops:.3f} |"
        f" learning rate: {entry['lr']:.6E} |"
        f" global batch size: {args.global_batch_size:5d} |"
        f" lm loss: {entry['lm_loss']:.6E} |"
        f" loss scale: 1.0 |"
        f" grad norm: {entry['grad_norm']:.3f} |"
        f" number of skipped iterations: {0:3d} |"
        f" number of nan iterations: {0:3d} |"
        f" tokens/s: {tokens_per_second:.0f} |"
        + ("" if exposed is None else f" exposed communication (ms): {exposed:.1f} |")
    )


def _progress_bar(total: int, done: int, first: bool) -> Any:
    if not first or not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, initial=done, unit="it", dynamic_ncols=True)


def _print_line(line: str, bar: Any) -> None:
    if bar is None:
        print(line, flush=True)
    else:
        # Through the bar, which otherwise ends up in the middle of the line.
        bar.write(line, file=sys.stdout)
        sys.stdout.flush()
