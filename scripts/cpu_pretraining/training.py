"""The training on one rank, which joins Megatron's groups and trains in a form on request."""

import argparse
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from commfuse_npu.runtime.collective_transport import CollectiveTransport
from commfuse_npu.runtime.order_log import shared_order_log
from mindspeed_patches import LinearWrappers, PatchManager
from mindspeed_patches.fb_overlap import Overlapping
from mindspeed_patches.start_report import StartReport
from mindspeed_patches.state_hashes import hash_over_ranks
from mindspeed_patches.training_options import linear_options, register_wrappers

from .compare import TrainingOutcome
from .data import Corpus
from .megatron_on_cpu import megatron_on_cpu
from .model import build_trainee
from .ulysses import UlyssesAttention
from .wire import pace


class TrainingWorker:
    """The worker class of `commfuse_npu.tools.ranks.Ranks`, one per rank."""

    def train(self, args: argparse.Namespace, corpus: Corpus, form: str) -> TrainingOutcome:
        """Train from the seed.

        Collective. If the training diverges, the outcome has the error.

        Args:
            form: of the layers, as in ``compare``. ``--commfuse-overlap`` runs forwards beside
                backwards in any form that is not compared.
        """
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=args.tensor_model_parallel_size,
                context_parallel_size=args.context_parallel_size,
                distributed_timeout_minutes=args.distributed_timeout_minutes,
            )
        plain = form == "plain"
        wrappers = None
        # In the plain form Megatron transfers the buckets, and the fused ops have no order to log.
        changes = {"commfuse_dp": False, "commfuse_order_log": None} if plain else {}
        with ExitStack() as undone, megatron_on_cpu(), timed_waits() as log:
            if plain or form == "commfuse":
                layers = fused_layers(argparse.Namespace(**vars(args) | changes), collectives=plain)
                wrappers, _ = undone.enter_context(layers)
            model_parallel_cuda_manual_seed(args.seed)
            if form == "overlap" or (args.commfuse_overlap and not args.compare):
                check = args.commfuse_overlap_check
                overlapping = Overlapping(check=check, order_log=args.commfuse_order_log)
                overlapping.start()
                undone.callback(overlapping.stop)
            training = CpuTraining(args, corpus, log)
            try:
                outcome = training.run()
            except FloatingPointError as error:
                return TrainingOutcome(error=str(error))
        outcome.layers = ["tensor-parallel linear layers: Megatron's own"]
        if wrappers is not None:
            plan = linear_options(args).schedule
            outcome.layers = [f"tensor-parallel linear layers: {form}, plan: {plan}"]
            calls = wrappers.describe("by collectives" if plain else "fused")
            outcome.layers += [f"  {line}" for line in calls]
        return outcome

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
) -> Iterator[tuple[LinearWrappers, StartReport]]:
    """Patch Megatron's layers as these options ask, and undo it at the end; a collective.

    Args:
        collectives: the fused ops use collectives, one after the other with the GEMMs.
    """
    manager = PatchManager()
    exchange = f"{UlyssesAttention.__module__}.UlyssesAttention"
    wrappers, users, report = register_wrappers(manager, args, ulysses_attention=exchange)
    with ExitStack() as undone:
        for user in users:
            user.open(args.distributed_timeout_minutes)
            undone.callback(user.close)
            if collectives:
                user.transport = CollectiveTransport(user.lanes().group, same_pieces=True)
        manager.apply_patches()
        undone.callback(manager.remove_patches)
        yield wrappers, report


@contextmanager
def timed_waits() -> Iterator[list[tuple[float, float]]]:
    """Record when this rank started and ended waiting for transfers, in any layer or form.

    All collectives and point-to-point transfers of torch end in ``Work.wait()``, and gloo's own
    threads carry them out. Waiting for a slower rank is included.
    """
    waits: list[tuple[float, float]] = []
    wait = dist.Work.wait

    def timed(work: dist.Work, *args: Any) -> Any:
        begin = time.perf_counter()
        try:
            return wait(work, *args)
        finally:
            waits.append((begin, time.perf_counter()))

    with mock.patch.object(dist.Work, "wait", timed):
        yield waits


class CpuTraining:
    """Forward, backward, step, one line per iteration.

    Needs Megatron's process groups, `megatron_on_cpu()` and `timed_waits()`.
    """

    def __init__(
        self, args: argparse.Namespace, corpus: Corpus, waits: list[tuple[float, float]]
    ) -> None:
        self.args = args
        self.corpus = corpus
        self.waits = waits
        self.iteration = 0
        self.rank = dist.get_rank()
        self.model, self.optimizer, self.scheduler = build_trainee(args)
        self.forward_backward = get_forward_backward_func()
        length = args.seq_length
        # Context-parallel ranks have contiguous parts of the sequence, in order, for Ulysses.
        rows = length // args.context_parallel_size
        first = parallel_state.get_context_parallel_rank() * rows
        self.own_rows = slice(first, first + rows)
        self.positions = torch.arange(length).expand(args.micro_batch_size, -1)[:, self.own_rows]

    def run(self) -> TrainingOutcome:
        """Run all iterations.

        Raises:
            FloatingPointError: the loss or the norm of the gradients is not finite.
        """
        args = self.args
        outcome = TrainingOutcome()
        while self.iteration < args.train_iters:
            if args.link_rate is not None and self.iteration < 2:
                # Some connections are only opened on the first use of their group.
                pace(args.link_rate * 1e6)
            loss, seconds, waits = self._iteration()
            outcome.losses.append(loss)
            outcome.times.append(seconds)
            outcome.waits.append(waits)
        outcome.weights_sha256 = hash_over_ranks([self.model.module], self.optimizer)
        return outcome

    def _iteration(self) -> tuple[float, float, list[tuple[float, float]]]:
        """One optimizer step: its loss, its seconds as a mean over the ranks, this rank's waits.

        Rank 0 prints a line with Megatron's names, which ``commfuse-npu measure`` parses.
        """
        args = self.args
        self.waits.clear()
        start = time.perf_counter()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self._forward_backward()
        _, grad_norm, _ = self.optimizer.step()
        learning_rate = self.optimizer.param_groups[0]["lr"]
        self.scheduler.step(args.global_batch_size)
        self.iteration += 1
        elapsed = time.perf_counter() - start
        waits = [(begin - start, end - start) for begin, end in self.waits]
        blocked = sum(end - begin for begin, end in waits)
        means = torch.tensor([loss, blocked, elapsed], dtype=torch.float64)  # over the ranks
        dist.all_reduce(means)
        loss, blocked, elapsed = (means / dist.get_world_size()).tolist()
        for name, value in (("lm loss", loss), ("grad norm", float(grad_norm))):
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"iteration {self.iteration}: {name} is {value}; lower --lr (now {args.lr})"
                )
        if self.rank == 0:
            tokens = args.global_batch_size * args.seq_length
            print(
                f" iteration {self.iteration:8d}/{args.train_iters:8d} |"
                f" elapsed time per iteration (ms): {elapsed * 1e3:.1f} |"
                f" exposed communication (ms): {blocked * 1e3:.1f} |"
                f" learning rate: {learning_rate:.2E} | lm loss: {loss:.6E} |"
                f" grad norm: {grad_norm:.3f} | tokens/s: {tokens / elapsed:.0f} |",
                flush=True,
            )
        return loss, elapsed, waits

    def _forward_backward(self) -> float:
        """Compute the gradients of a global batch; returns the mean loss of this rank's tokens."""
        args = self.args
        losses = self.forward_backward(
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
