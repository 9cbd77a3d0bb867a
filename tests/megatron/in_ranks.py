"""Megatron in the processes of a test: its groups, applied wrappers, and whole trainings."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from mindspeed_patches import PatchManager
from tests.distributed.ranks import Ranks

TINY = (
    "--fp32 --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 "
    "--num-query-groups 2 --seq-length 32 --micro-batch-size 2 --global-batch-size 8 "
    "--train-iters 6 --distributed-timeout-minutes 2"
)
"""Options of the CPU pretraining; later options override them."""

WITHOUT_KERNELS = {
    "use_cpu_initialization": True,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
"""Options of a model configuration that runs on a CPU and is deterministic."""


class Event:
    """An event of the CPU, on which all work is complete when it returns."""

    def synchronize(self) -> None: ...


class Stream(Event):
    def record_event(self) -> Event:
        return Event()

    def wait_stream(self, other: Stream) -> None: ...


def to_host(counts: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return counts.numpy() if as_numpy and isinstance(counts, torch.Tensor) else counts


@contextlib.contextmanager
def megatron(
    tensor_parallel: int = 1, context_parallel: int = 1, minutes: float = 3, **layout: int | None
) -> Iterator[None]:
    """Parallel state of the real Megatron; the remaining ranks are replicas.

    Args:
        layout: more sizes, as Megatron names them.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    from scripts.cpu_pretraining.megatron_on_cpu import cuda_means_cpu, megatron_on_cpu

    warnings.simplefilter("ignore")
    with _left_afterwards():
        parallel_state.initialize_model_parallel(
            tensor_parallel,
            context_parallel_size=context_parallel,
            distributed_timeout_minutes=minutes,
            **layout,
        )
        streams = {"Event": Event, "Stream": Stream, "current_stream": Stream}
        with (
            # Dispatchers of experts copy counts to the host on a stream of their own.
            mock.patch.multiple(torch.cuda, stream=contextlib.nullcontext, **streams),
            # They only copy tensors that are on a GPU.
            mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", to_host),
            # Core 0.16 reads it without having imported it, if there is no TransformerEngine.
            mock.patch.object(moe_utils, "te_general_gemm", None, create=True),
            megatron_on_cpu(),
            cuda_means_cpu(),
        ):
            model_parallel_cuda_manual_seed(1)
            yield


@contextlib.contextmanager
def _left_afterwards() -> Iterator[None]:
    """Destroys Megatron's groups, which it only forgets: a gloo group keeps two threads."""
    from megatron.core import parallel_state
    from torch.distributed import destroy_process_group, distributed_c10d

    before = set(distributed_c10d._world.pg_map)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        # Megatron does not reset these and would use them for the next layout.
        parallel_state._EMBEDDING_GLOBAL_RANKS = None
        parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None
        for group in set(distributed_c10d._world.pg_map) - before:
            destroy_process_group(group)


@contextlib.contextmanager
def patched(*register: Callable[[PatchManager], object]) -> Iterator[None]:
    """Applies the patches that these functions register."""
    manager = PatchManager()
    for function in register:
        function(manager)
    manager.apply_patches()
    try:
        yield
    finally:
        manager.remove_patches()


class NormColumn(torch.nn.Module):
    """MindSpeed's column-parallel layer with norm, as far as the wrappers use it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from megatron.core.tensor_parallel import layers

        super().__init__()
        column = layers.ColumnParallelLinear(*args, **kwargs)
        vars(self).update({k: v for k, v in vars(column).items() if not k.startswith("_")})
        self.weight, self.bias = column.weight, column.bias
        self.norm_weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, column.input_size))
        self._linear_forward_impl = layers.linear_with_grad_accumulation_and_async_allreduce

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        y = self._linear_forward_impl(
            input=torch.nn.functional.rms_norm(x, x.shape[-1:], self.norm_weight),
            weight=self.weight,
            bias=self.bias,
            gradient_accumulation_fusion=self.gradient_accumulation_fusion,
            allreduce_dgrad=self.allreduce_dgrad,
            sequence_parallel=self.sequence_parallel,
            grad_output_buffer=None,
            wgrad_deferral_limit=None,
        )
        return y, None


def asked(rank: int, method: str, args: Sequence[Any]) -> tuple[Any, str]:
    """Calls a method of the worker on one rank; returns its result and its output."""
    from scripts.cpu_pretraining.training import Worker

    out = io.StringIO()
    with _left_afterwards(), contextlib.redirect_stdout(out):
        return getattr(Worker(), method)(*args), out.getvalue()


@dataclass(frozen=True)
class _Asked:
    """Test ranks in place of those that the command line starts."""

    group: Ranks

    def __call__(self, size: int, **_: Any) -> contextlib.AbstractContextManager[Any]:
        assert size == self.group.size
        return contextlib.nullcontext(SimpleNamespace(ask=self.ask))

    def ask(self, method: str, *args: Any) -> list[Any]:
        results = self.group.run(asked, method, args)
        print(results[0][1], end="")
        return [value for value, _ in results]


def pretrained(group: Ranks, output: Path, *options: str, code: int = 0) -> str:
    """What the command line prints with :data:`TINY` and more options, on the ranks of a group."""
    from scripts.cpu_pretraining import __main__ as command

    printed = io.StringIO()
    with (
        mock.patch.object(command, "Ranks", _Asked(group)),
        mock.patch.dict(os.environ),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        done = command.main([*TINY.split(), *options, "--output", str(output)])
    assert done == code, printed.getvalue()
    return printed.getvalue()
