"""Trainings with Megatron's schedules in the ranks of a test, with CommFuse or without."""

import contextlib
import hashlib
import io
import itertools
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from mindspeed_patches import LinearWrappers
from mindspeed_patches.fb_overlap import Overlapping
from mindspeed_patches.patching import PatchManager
from mindspeed_patches.rehearsal.devices import Finished, _Stream
from mindspeed_patches.start_report import StartReport
from mindspeed_patches.state_hashes import optimizer_hash, weight_hashes
from tests.attention_masks import ends_of, seen
from tests.megatron.models import BATCH, LENGTH, VOCABULARY, Case, NormColumn, gpt, settings


def to_host(counts: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return counts.numpy() if as_numpy and isinstance(counts, torch.Tensor) else counts


@contextlib.contextmanager
def experts_on_cpu() -> Iterator[None]:
    """Megatron on a CPU, its experts included."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    from scripts.cpu_pretraining.megatron_on_cpu import megatron_on_cpu

    # Dispatchers of experts copy counts to the host on a stream of their own.
    streams = {"stream": Finished, "Stream": _Stream, "current_stream": _Stream, "Event": Finished}
    # Stages that exchange shapes synchronize their devices.
    calls = streams | {"synchronize": lambda *_: None}
    with (
        mock.patch.multiple(torch.cuda, **calls),
        # They only copy tensors that are on a GPU.
        mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", to_host),
        # Core 0.16 reads it without having imported it, if there is no TransformerEngine.
        mock.patch.object(moe_utils, "te_general_gemm", None, create=True),
        megatron_on_cpu(),
    ):
        yield


@contextlib.contextmanager
def layout(case: Case) -> Iterator[None]:
    """The groups of a case on a CPU; the remaining ranks are replicas."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    warnings.simplefilter("ignore")
    with without_groups_afterwards(), experts_on_cpu():
        parallel_state.initialize_model_parallel(
            case.tensor,
            context_parallel_size=case.context,
            pipeline_model_parallel_size=case.stages,
            virtual_pipeline_model_parallel_size=case.virtual,
            expert_model_parallel_size=case.experts,
            distributed_timeout_minutes=case.args().distributed_timeout_minutes,
        )
        model_parallel_cuda_manual_seed(1)
        yield


@contextlib.contextmanager
def patched(registrar: Any) -> Iterator[None]:
    """In the block, what ``registrar`` registers with a patch manager is in effect."""
    manager = PatchManager()
    registrar.register(manager)
    manager.apply_patches()
    try:
        yield
    finally:
        manager.remove_patches()


@contextlib.contextmanager
def started(overlapping: Overlapping) -> Iterator[None]:
    """In the block, Megatron's schedules overlap."""
    overlapping.start()
    try:
        yield
    finally:
        overlapping.stop()


def in_both_orders(case: Case, train: Callable[[], Any]) -> tuple[Overlapping, str]:
    """Train in Megatron's own order, and overlapped; both return the same bits.

    Returns:
        What overlapped the second training, and what it printed.
    """
    overlapping, printed = Overlapping(), io.StringIO()
    with layout(case):
        own = train()
        with started(overlapping), contextlib.redirect_stdout(printed):
            assert train() == own
    return overlapping, printed.getvalue()


@contextlib.contextmanager
def without_groups_afterwards() -> Iterator[None]:
    """Destroys Megatron's groups, which it only forgets: a gloo group keeps two threads."""
    from megatron.core import parallel_state
    from torch.distributed import destroy_process_group, distributed_c10d

    groups = distributed_c10d._world.pg_map
    before = set(groups)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        # Megatron does not reset these and would use them for the next layout.
        for name in ("_EMBEDDING_GLOBAL_RANKS", "_POSITION_EMBEDDING_GLOBAL_RANKS"):
            setattr(parallel_state, name, None)
        for group in set(groups) - before:
            destroy_process_group(group)


@contextlib.contextmanager
def launched(case: Case, collectives: bool = False) -> Iterator[tuple[LinearWrappers, StartReport]]:
    """Wraps what the launch asks for, over lanes or over collectives."""
    from scripts.cpu_pretraining.training_worker import fused_layers

    with contextlib.ExitStack() as undone:
        layers = fused_layers(case.args(), collectives=collectives)
        patches, linears, report = undone.enter_context(layers)
        undone.enter_context(patches.applied())
        if case.tensor > 1:
            init = linears.norm_column_init_wrapper(NormColumn.__init__)
            undone.enter_context(mock.patch.object(NormColumn, "__init__", init))
        yield linears, report


def told(report: StartReport, models: Any) -> list[str]:
    """The lines of the report, which only rank 0 prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        report.tell(models)
    return out.getvalue().splitlines()


class Trainer:
    """The model chunks of this rank, and their optimizer.

    Args:
        packed: documents are passed as MindSpeed does.
    """

    def __init__(self, case: Case, packed: bool = False) -> None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        from scripts.cpu_pretraining.model import with_optimizer

        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1)
        self.case, self.packed, self.config = case, packed, settings(case)
        nets = [gpt(case, self.config, chunk) for chunk in range(case.chunks)]
        self.models, self.optimizer = with_optimizer(case.args(), self.config, nets)
        self.noted = [mock.Mock(wraps=model.no_sync) for model in self.models]
        self.config.no_sync_func = self._each(self.noted)
        ddp = self.models[0].ddp_config
        if ddp.overlap_grad_reduce:
            starts = [mock.Mock(wraps=model.start_grad_sync) for model in self.models]
            self.config.grad_sync_func = self._each(starts)
            self.noted = [*self.noted, *starts]
        self.overlaps_gathers = ddp.overlap_param_gather
        if self.overlaps_gathers and case.virtual:
            self.config.param_sync_func = [model.start_param_sync for model in self.models]
        seed = 7 + parallel_state.get_data_parallel_rank()
        self.data = [self._batches(seed) for _ in self.models]
        rows = LENGTH // case.context
        first = parallel_state.get_context_parallel_rank() * rows
        self.rows = slice(first, first + rows)
        self._set_positions(nets[0])
        self.losses: list[torch.Tensor] = []

    def _each(self, items: list[Any]) -> Any:
        return items if self.case.virtual else items[0]

    def _batches(self, seed: int) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        for length in itertools.cycle(self.case.lengths):
            yield torch.randint(VOCABULARY, (BATCH, length + 1), generator=generator)

    def _set_positions(self, net: Any) -> None:
        """Embeddings of positions in the case's form; of documents as MindSpeed has them."""
        case, rope = self.case, getattr(net, "rotary_pos_emb", None)
        self.numbers = torch.arange(LENGTH).repeat(BATCH)
        first = 0
        resets = case.options.get("reset_position_ids", False)
        for end in ends_of("documents", LENGTH, BATCH) if resets else ():
            self.numbers[first:end] = torch.arange(end - first)
            first = end
        self.numbers = self.numbers.view(BATCH, LENGTH).t()[self.rows].contiguous()
        if rope is None:
            return
        own = rope.forward
        if case.documents:
            table = own(LENGTH, packed_seq=True)
            picked = table[self.numbers.flatten()].view(-1, BATCH, 1, table.shape[-1])
            own = lambda *_, **__: table if self.packed else picked  # noqa: E731
        if case.rotary == "two":
            rope.forward = lambda *given, **more: (own(*given, **more), 0.5 * own(*given, **more))
        else:
            rope.forward = own

    def forward(self, data: Iterator[torch.Tensor], model: Any) -> Any:
        """Megatron's ``forward_step_func``."""
        case, batch, packed = self.case, next(data), {}
        of_data = case.documents or case.options.get("attention_mask_type") == "general"
        mask = ~seen("documents", LENGTH, BATCH) if of_data else None
        if self.packed:
            mask = None
            ends = torch.tensor(ends_of("documents", LENGTH, BATCH))
            lengths = {"max_seqlen_q": LENGTH, "max_seqlen_kv": LENGTH, "qkv_format": "sbhd"}
            packed["packed_seq_params"] = SimpleNamespace(
                cu_seqlens_q=ends,
                cp_group=None,
                position_ids=self.numbers if case.options.get("reset_position_ids") else None,
                **lengths,
            )
        tokens, labels = (
            whole[:, self.rows].contiguous() for whole in (batch[:, :-1], batch[:, 1:])
        )
        positions = torch.arange(batch.shape[1] - 1).expand(BATCH, -1)[:, self.rows]
        output = model(tokens, positions, mask, labels=labels, **packed)

        def loss(output: torch.Tensor) -> Any:
            mean = output.float().mean()
            return mean, {"lm loss": mean.detach().clone()}

        return output, loss

    def accumulate(self, forward_only: bool = False) -> None:
        """All micro-batches of a step, in the schedule that Megatron chooses."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for model in self.models:
            model.zero_grad_buffer()
            model.train(not forward_only)
        self.optimizer.zero_grad()
        reduced = get_forward_backward_func()(
            forward_step_func=self.forward,
            data_iterator=self._each(self.data),
            model=self._each(self.models),
            num_microbatches=self.case.microbatches,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            forward_only=forward_only,
            **(self._groups() if self.case.groups else {}),
        )
        self.losses += [loss["lm loss"] for loss in reduced]

    def step(self) -> None:
        self.accumulate()
        updated, _, _ = self.optimizer.step()
        assert updated

    def run(self, steps: int) -> str:
        """Train these steps, which change weights; returns losses, the bits of this rank and of its
        random numbers, and how often the schedule called the functions for gradients."""
        start = self.sha256()
        for _ in range(steps):
            self.step()
        # The last gathers would be overlapped with the next forward.
        for model in self.models if self.overlaps_gathers else ():
            model.disable_forward_pre_hook(param_sync=True)
            model.enable_forward_pre_hook()
        assert self.sha256() != start
        assert all(map(torch.isfinite, self.losses))
        losses = [loss.item() for loss in self.losses]
        random = hashlib.sha256(torch.get_rng_state().numpy().data).hexdigest()
        return f"{losses} {self.sha256()} {random} {[noted.call_count for noted in self.noted]}"

    def sha256(self) -> str:
        """Hashes of parameters, main parameters and optimizer state of this rank."""
        weights = sorted(weight_hashes([model.module for model in self.models]).items())
        return f"{weights} {optimizer_hash(self.optimizer)}"

    def weights(self) -> dict[str, torch.Tensor]:
        named = (item for model in self.models for item in model.module.named_parameters())
        return {f"{number} {name}": p for number, (name, p) in enumerate(named)}

    def gradients(self) -> dict[str, torch.Tensor]:
        """Losses and gradients, summed over the replicas."""
        trained = {name: p.main_grad for name, p in self.weights().items() if p.requires_grad}
        return {f"loss {number}": loss for number, loss in enumerate(self.losses)} | trained

    def _groups(self) -> dict[str, Any]:
        """Arguments of a caller with its own groups; empty if the version does not take them."""
        try:
            from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
            from megatron.core.process_groups_config import ProcessGroupCollection
        except ImportError:
            return {}
        groups = ProcessGroupCollection.use_mpu_process_groups()
        own = P2PCommunicator(groups.pp, self.config)
        return {"p2p_communicator": own, "pg_collection": groups}
