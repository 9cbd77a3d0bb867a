"""The training on one rank, which joins Megatron's groups and trains forms on request."""

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from commfuse_npu.overlap.states import restore_states, save_states
from commfuse_npu.runtime.collective_transport import CollectiveTransport
from commfuse_npu.runtime.order_log import shared_order_log
from mindspeed_patches import LinearWrappers, PatchManager
from mindspeed_patches.fb_overlap import Overlapping
from mindspeed_patches.fb_overlap.pass_states import random_states
from mindspeed_patches.start_report import StartReport
from mindspeed_patches.state_hashes import hash_over_ranks
from mindspeed_patches.training_options import LaunchSettings, register_wrappers

from .compare import TrainingOutcome
from .data import Corpus
from .megatron_on_cpu import megatron_on_cpu
from .model import build_trainee
from .recorder import Recorder
from .ulysses_attention import UlyssesAttention
from .wire import pace

BLOCK = 2
"""Iterations that a form trains before the next form's turn."""


class TrainingWorker:
    """The worker class of `commfuse_npu.tools.ranks.Ranks`, one per rank."""

    def train(
        self, args: argparse.Namespace, corpus: Corpus, forms: Sequence[str]
    ) -> dict[str, TrainingOutcome]:
        """Train each form from the seed; several take turns, :data:`BLOCK` iterations each.

        Collective. Each form has its own model, optimizer and random states. If a training
        diverges, its outcome has the error and all end.

        Args:
            forms: as in ``compare``. ``--commfuse-overlap`` runs forwards beside backwards in any
                form that is not compared.
        """
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=args.tensor_model_parallel_size,
                context_parallel_size=args.context_parallel_size,
                distributed_timeout_minutes=args.distributed_timeout_minutes,
            )
        with ExitStack() as undone, megatron_on_cpu():
            trainings = [CpuTraining(args, corpus, form, undone) for form in forms]
            block = BLOCK if args.compare else args.train_iters
            try:
                for _ in range(0, args.train_iters, block):
                    for training in trainings:
                        training.run(block)
            except FloatingPointError as error:
                training.outcome.error = str(error)
            else:
                for training in trainings:
                    training.finish()
            return {training.form: training.outcome for training in trainings}

    def pace(self, rate: float) -> str:
        """Limit this process's connections to ``rate`` MB/s each; returns why it cannot be done.

        On loopback a transfer is a copy by the CPU that should compute meanwhile, so nothing can be
        hidden. A paced socket waits in the kernel's timers instead. A link is a pair of ranks, one
        direction and one process group; each form sends its bulk data over one of these.
        """
        return pace(rate * 1e6)

    def close_order_log(self, folder: str) -> None:
        """Write the last line of the log: a rank that is ended gets no other call."""
        shared_order_log(folder, dist.get_rank(), dist.get_world_size()).close()


@contextmanager
def fused_layers(
    args: argparse.Namespace, *, collectives: bool = False
) -> Iterator[tuple[PatchManager, LinearWrappers, StartReport]]:
    """Patches of Megatron's layers that these options ask for, to be applied; a collective.

    Args:
        collectives: the fused ops use collectives, one after the other with the GEMMs.
    """
    manager = PatchManager()
    exchange = f"{UlyssesAttention.__module__}.UlyssesAttention"
    wrappers, users, report = register_wrappers(
        manager, LaunchSettings(args), ulysses_attention=exchange
    )
    with ExitStack() as undone:
        for user in users:
            user.open(args.distributed_timeout_minutes)
            undone.callback(user.close)
            if collectives:
                user.transport = CollectiveTransport(user.lanes().group, same_pieces=True)
        yield manager, wrappers, report


class CpuTraining:
    """The training of one form: forward, backward, step, one line per iteration.

    Needs Megatron's process groups and `megatron_on_cpu()`.

    Args:
        undone: closes what the form opened.
    """

    def __init__(
        self, args: argparse.Namespace, corpus: Corpus, form: str, undone: ExitStack
    ) -> None:
        self.args = args
        self.corpus = corpus
        self.form = form
        self.outcome = TrainingOutcome()
        self.iteration = 0
        self.rank = dist.get_rank()
        self._patches = PatchManager()
        self._wrappers: LinearWrappers | None = None
        self._overlapping: Overlapping | None = None
        plain = form == "plain"
        if plain or form == "commfuse":
            # In the plain form Megatron transfers the buckets, and the fused ops have no order to
            # log.
            changes = {"commfuse_dp": False, "commfuse_order_log": None} if plain else {}
            own = argparse.Namespace(**vars(args) | changes)
            layers = fused_layers(own, collectives=plain)
            self._patches, self._wrappers, _ = undone.enter_context(layers)
        if form == "overlap" or (args.commfuse_overlap and not args.compare):
            check = args.commfuse_overlap_check
            self._overlapping = Overlapping(check=check, order_log=args.commfuse_order_log)
        with self._patches.applied():
            model_parallel_cuda_manual_seed(args.seed)
            self.model, self.optimizer, self.scheduler = build_trainee(args)
        self._states = random_states("cpu")
        self._random = save_states(self._states)
        length = args.seq_length
        # Context-parallel ranks have contiguous parts of the sequence, in order, for Ulysses.
        rows = length // args.context_parallel_size
        first = parallel_state.get_context_parallel_rank() * rows
        self.own_rows = slice(first, first + rows)
        self.positions = torch.arange(length).expand(args.micro_batch_size, -1)[:, self.own_rows]

    def run(self, iterations: int) -> None:
        """Run some iterations, or those that are left.

        Raises:
            FloatingPointError: the loss or the norm of the gradients is not finite.
        """
        args = self.args
        with ExitStack() as undone:
            undone.enter_context(self._patches.applied())
            if self._overlapping is not None:
                self._overlapping.start()
                undone.callback(self._overlapping.stop)
            restore_states(self._states, self._random)
            for _ in range(min(iterations, args.train_iters - self.iteration)):
                if args.link_rate is not None and self.iteration < 2:
                    # Some connections are only opened on the first use of their group.
                    pace(args.link_rate * 1e6)
                self._iteration()
            self._random = save_states(self._states)

    def finish(self) -> None:
        """Complete the outcome; a collective."""
        self.outcome.weights_sha256 = hash_over_ranks([self.model.module], self.optimizer)
        self.outcome.layers = ["tensor-parallel linear layers: Megatron's own"]
        if self._wrappers is not None:
            plain = self.form == "plain"
            plan = LaunchSettings(self.args).of_linear_layers().schedule
            self.outcome.layers = [f"tensor-parallel linear layers: {self.form}, plan: {plan}"]
            calls = self._wrappers.describe("by collectives" if plain else "fused")
            self.outcome.layers += [f"  {line}" for line in calls]

    def _iteration(self) -> None:
        """One optimizer step, of which rank 0 prints a line."""
        args = self.args
        recorder = Recorder()
        with ExitStack() as undone:
            if args.compare and self.iteration:
                # Not at first: overlap watches what a model's passes write, also to a recorder.
                undone.enter_context(recorder.recording())
            start = time.perf_counter()
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            loss = self._forward_backward()
            _, grad_norm, _ = self.optimizer.step()
            self.scheduler.step(args.global_batch_size)
            elapsed = time.perf_counter() - start
        self.iteration += 1
        means = torch.tensor([loss, elapsed], dtype=torch.float64)  # over the ranks
        dist.all_reduce(means)
        loss, elapsed = (means / dist.get_world_size()).tolist()
        for name, value in (("lm loss", loss), ("grad norm", float(grad_norm))):
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"iteration {self.iteration}: {name} is {value}; lower --lr (now {args.lr})"
                )
        self.outcome.add(loss, elapsed, recorder.spans)
        if self.rank == 0:
            number = f"{self.iteration:{len(str(args.train_iters))}}/{args.train_iters}"
            form = f"{self.form:8}  " if args.compare else ""
            print(f"{form}iteration {number}  loss {loss:.3f}  {elapsed:.2f} s", flush=True)

    def _forward_backward(self) -> float:
        """Compute the gradients of a global batch; returns the mean loss of this rank's tokens."""
        args = self.args
        losses = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=self._microbatches(),
            model=[self.model],
            num_microbatches=args.num_microbatches,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=False,
        )
        return float(torch.stack([entry["lm loss"] for entry in losses]).mean())

    def _microbatches(self) -> Iterator[list[torch.Tensor]]:
        """This rank's rows of this replica's samples, which are the same in every layout."""
        args = self.args
        replica = parallel_state.get_data_parallel_rank()
        first = self.iteration * args.global_batch_size
        for microbatch in range(args.num_microbatches):
            start = first + (microbatch * args.data_parallel_size + replica) * args.micro_batch_size
            samples = range(start, start + args.micro_batch_size)
            batch = self.corpus.batch(samples, args.seq_length, args.seed)
            yield [tokens[:, self.own_rows].contiguous() for tokens in batch]

    def _forward_step(self, batches: Iterator[Any], model: torch.nn.Module) -> tuple[Any, Any]:
        """The losses ``[B, s]`` of this rank's tokens, and the function that reduces them."""

        def mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = losses.float().mean()
            # The schedule divides by the micro-batches and multiplies by the context-parallel size:
            # it expects the contribution of a rank's tokens to the mean of the full sequence.
            return loss / self.args.context_parallel_size, {"lm loss": loss.detach().clone()}

        inputs, labels = next(batches)
        return model(inputs, self.positions, None, labels=labels), mean
