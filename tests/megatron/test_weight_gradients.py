"""Weight gradients that wait leave all weights as Megatron's own order does."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu.overlap import ForwardBackwardOverlap
from commfuse_npu.overlap import weight_gradients as queues
from commfuse_npu.overlap.weight_gradients import WeightGradients
from mindspeed_patches.fb_overlap import late_weight_gradients
from mindspeed_patches.fb_overlap.late_weight_gradients import WeightGradientDeferral
from tests.megatron.models import BF16, DISTRIBUTED, RECOMPUTED, Case, settings
from tests.megatron.training import Trainer, layout, patched

LAYERS, MICROBATCHES, STEPS = 2, 3, 2
LINEARS = 4 * LAYERS
"""Those of the layers; there is one more for the output."""
TP = Case(tensor=2, microbatches=MICROBATCHES, options=BF16 | {"num_layers": LAYERS})
PLAIN = {"sequence_parallel": False, "add_bias_linear": True, "add_qkv_bias": True}
FUSED = {"gradient_accumulation_fusion": True}
WATCHED = STEPS * MICROBATCHES - 1
"""Micro-batches without the first one, in which nothing waits."""
CASES = {
    "SP": (TP, WATCHED * (LINEARS + 1)),
    "SP, fusion, recomputed": (TP.but(FUSED | RECOMPUTED), WATCHED * (LINEARS + 1)),
    "biases": (TP.but(PLAIN), WATCHED * (LINEARS + 1)),
    "biases, fusion, a frozen layer": (
        TP.but(PLAIN | FUSED, frozen="layers.0.mlp.linear_fc1"),
        WATCHED * LINEARS,
    ),
    # The output layer has the weight of the embedding.
    "tied": (TP.but({}, tied=True), WATCHED * LINEARS),
    # In the last micro-batch, hooks start the reduction.
    "overlapped reduction": (
        replace(TP.but(DISTRIBUTED), tensor=1, replicas=2),
        (WATCHED - STEPS) * (LINEARS + 1),
    ),
}
"""Layouts, and how many gradients of all steps wait."""


class Runs:
    """Backwards as only passes of runs.

    Attributes:
        waited: of each backward, how many gradients waited.
        points: names of all points of the backwards.
    """

    def __init__(self, group: Any) -> None:
        self.waited: list[int] = []
        self.points: list[str] = []
        self._overlap = ForwardBackwardOverlap([group])
        self._overlap.at_point = self.points.append

    def __call__(self, backward: Callable[[], Any]) -> Any:
        def counted() -> Any:
            result = backward()
            self.waited.append(self._overlap.weight_gradients.deferred)
            return result

        return self._overlap.run_together(backward=counted)[0]


@contextlib.contextmanager
def running(wrap: bool = True) -> Iterator[Runs]:
    """Every backward step of Megatron's schedule is a run; gradients wait if ``wrap``."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

    plain, run = schedules.backward_step, Runs(parallel_state.get_tensor_model_parallel_group())

    def backward_step(*args: Any, **kwargs: Any) -> Any:
        return run(lambda: plain(*args, **kwargs))

    with contextlib.ExitStack() as stack:
        if wrap:
            stack.enter_context(patched(WeightGradientDeferral()))
        stack.enter_context(mock.patch.object(schedules, "backward_step", backward_step))
        yield run


def compare(rank: int, case: Case) -> int:
    with layout(case):
        own = Trainer(case).run(STEPS)
        with running() as run:
            assert Trainer(case).run(STEPS) == own
        return sum(run.waited)


@pytest.mark.parametrize(("case", "count"), CASES.values(), ids=CASES)
def test_weights_of_megatrons_own_order(ranks: Any, case: Case, count: int) -> None:
    assert ranks(2).run(compare, case) == [count, count]


def collectives(rank: int) -> tuple[list[str], list[str]]:
    """Those of backwards, in order, without and with gradients that wait."""
    began = []
    with layout(TP):
        for wrap in (False, True):
            with running(wrap) as run:
                Trainer(TP).run(STEPS)
            began.append([point for point in run.points if not point.startswith("wait")])
    return began[0], began[1]


def test_backwards_start_the_same_collectives(ranks: Any) -> None:
    for own, ours in ranks(2).run(collectives):
        assert own == ours
        assert any(point.startswith("all_gather") for point in own)


def shared_buffer(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Gather into the buffer that Megatron's layers share."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    memory = parallel_state.get_global_memory_buffer()
    shape = (x.shape[0] * group.size(), *x.shape[1:])
    total = memory.get_tensor(shape, x.dtype, "mpu")
    return total, dist.all_gather_into_tensor(total, x, group=group, async_op=True)


def lost(*_: Any) -> None:
    """Instead of ``WeightGradients.add``."""


def doubled(queue: WeightGradients, *waiting: Any) -> None:
    add(queue, *waiting)
    add(queue, *waiting)


add = WeightGradients.add
FAULTS = {
    "lost": (WeightGradients, "add", lost),
    "twice": (WeightGradients, "add", doubled),
    "a buffer that others use": (late_weight_gradients, "_gathered", shared_buffer),
}


def faulty(rank: int) -> list[str]:
    """The faults after which the weights are those of Megatron's order."""
    unnoticed = []
    with layout(TP):
        own = Trainer(TP).run(STEPS)
        for fault, patch in FAULTS.items():
            with running(), mock.patch.object(*patch), contextlib.suppress(RuntimeError):
                if Trainer(TP).run(STEPS) == own:
                    unnoticed.append(fault)
    return unnoticed


def test_planted_faults_change_weights(ranks: Any) -> None:
    assert ranks(2).run(faulty) == [[], []]


class Layer:
    """Megatron's linear layer in its gradient buffer, on one rank."""

    def __init__(self, fused: bool) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.tensor_parallel import ColumnParallelLinear

        config = settings(Case().but(BF16 | {"gradient_accumulation_fusion": fused}))
        torch.manual_seed(1)
        self.linear = ColumnParallelLinear(
            8, 4, config=config, init_method=torch.nn.init.normal_, bias=False
        )
        self.weight: Any = self.linear.weight
        buckets = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.calls = 0
        self.model = DistributedDataParallel(config, buckets, self.linear)

    def loss(self, after: Callable[..., Any] | None = None) -> torch.Tensor:
        """Of random inputs; ``after`` is called between the layer's backward and what follows."""
        y, _ = self.model(torch.randn(64, 1, 8, dtype=torch.bfloat16))
        if after is not None:
            y.grad_fn.register_hook(after)
        return y.float().pow(2).sum()

    def backward(self, **how: Any) -> None:
        self.loss().backward(**how)

    def backward_of_two_uses(self) -> None:
        (self.loss() + self.loss()).backward()

    def backward_three_times(self, run: Callable[[Any], Any]) -> None:
        """The second one fails before the gradient arrives at the weight."""
        run(self.backward)
        with contextlib.suppress(ZeroDivisionError):
            run(self.loss(lambda *_: 1 // 0).backward)
        self.backward_elsewhere()
        run(self.backward)

    def backward_elsewhere(self) -> None:
        """Of an embedding, with gradients so small that the order of sums shows."""
        rows = torch.nn.functional.embedding(torch.arange(4), self.weight)
        rows.float().pow(3).mul(1e-5).sum().backward()

    def backward_and_one_elsewhere(self) -> None:
        self.backward()
        self.backward_elsewhere()

    def backward_and_later_one_elsewhere(self) -> None:
        self.backward()
        self.calls += 1
        if self.calls > 1:
            self.backward_elsewhere()

    def backward_in_another_stream(self) -> None:
        with mock.patch.object(WeightGradients, "in_this_stream", False):
            self.backward()

    def backward_of_quantized_weights(self) -> None:
        with mock.patch.object(late_weight_gradients, "_LAYERS", "not this module"):
            self.backward()

    def backward_of_checkpoint(self) -> None:
        torch.utils.checkpoint.checkpoint(self.loss, use_reentrant=False).backward()

    def loss_of_autocast(self) -> torch.Tensor:
        torch.set_autocast_enabled("cuda", True)
        loss = self.loss()
        torch.set_autocast_enabled("cuda", False)
        return loss

    def backward_of_autocast(self) -> None:
        self.loss_of_autocast().backward()

    def backward_in_autocast(self) -> None:
        loss = self.loss()
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()

    def backward_of_two_kinds(self) -> None:
        """That of the use that waits runs first."""
        (self.loss_of_autocast() + self.loss()).backward()

    def backward_with(self, hook: str) -> None:
        getattr(self.weight, hook)(lambda *_: None)
        self.backward()

    def backward_with_zeros(self) -> None:
        self.weight.zero_out_wgrad = True
        self.backward()

    def backward_that_megatron_defers(self) -> None:
        self.linear.config.defer_embedding_wgrad_compute = True
        self.linear.embedding_activation_buffer = []
        self.linear.grad_output_buffer = []
        self.backward()


RULES: dict[str, tuple[bool, Callable[[Layer], None], list[int]]] = {
    "one use": (False, Layer.backward, [0, 1]),
    "two uses": (False, Layer.backward_of_two_uses, [0, 0]),
    "two uses, fusion": (True, Layer.backward_of_two_uses, [0, 2]),
    "two uses, fusion, one waits": (True, Layer.backward_of_two_kinds, [0, 1]),
    "another use in a backward of its own": (False, Layer.backward_and_one_elsewhere, [0, 0]),
    "the same, but new": (False, Layer.backward_and_later_one_elsewhere, [0, 1]),
    "a graph that is kept": (False, lambda layer: layer.backward(retain_graph=True), [0, 0]),
    "double backward": (
        False,
        lambda layer: layer.backward(create_graph=True, retain_graph=False),
        [0, 0],
    ),
    "another stream": (True, Layer.backward_in_another_stream, [0, 0]),
    "quantized weights": (True, Layer.backward_of_quantized_weights, [0, 0]),
    # It unpacks a saved tensor only once, and the weight as another tensor.
    "torch's checkpoint": (False, Layer.backward_of_checkpoint, [0, 0]),
    "autocast": (False, Layer.backward_of_autocast, [0, 0]),
    "autocast in the backward": (False, Layer.backward_in_autocast, [0, 0]),
    "hook": (False, lambda layer: layer.backward_with("register_hook"), [0, 0]),
    "later hook": (
        True,
        lambda layer: layer.backward_with("register_post_accumulate_grad_hook"),
        [0, 0],
    ),
    "zero_out_wgrad": (True, Layer.backward_with_zeros, [0, 0]),
    "wgrad_deferral_limit": (True, Layer.backward_that_megatron_defers, [0, 0]),
}
"""Whether there is fusion, a backward, and how many gradients wait when it runs first and again."""


def of_rules(rank: int) -> dict[str, list[int]]:
    """How many gradients waited; those of weights are compared."""
    counts = {}
    with layout(Case()):
        for name, (fused, backward, _) in RULES.items():
            own = Layer(fused)
            for _ in range(3):
                backward(own)
            with patched(WeightGradientDeferral()):
                ours = Layer(fused)
                run = Runs(dist.group.WORLD)
                for _ in range(2):
                    run(lambda: backward(ours))  # noqa: B023
                counts[name] = run.waited
                backward(ours)  # outside of a run
            assert torch.equal(ours.weight.main_grad, own.weight.main_grad), name
    return counts


def test_gradients_that_may_not_wait(ranks: Any) -> None:
    (counts,) = ranks(1).run(of_rules)
    assert counts == {name: count for name, (_, _, count) in RULES.items()}


class LastFirst(deque[Any]):
    """The queue of a planted fault."""

    popleft = deque.pop


def with_faults(rank: int) -> tuple[bool, bool, str]:
    """Whether bits are the same after a swap of two uses, and after a backward that failed; the
    error of a use that is new."""
    with layout(Case()):
        two, failed = Layer(fused=True), Layer(fused=False)
        for _ in range(2):
            two.backward_of_two_uses()
        failed.backward_three_times(lambda backward: backward())
        with patched(WeightGradientDeferral()):
            run = Runs(dist.group.WORLD)
            swapped, recovered, other = (Layer(fused) for fused in (True, False, False))
            with mock.patch.object(queues, "deque", LastFirst):
                faulty_run = Runs(dist.group.WORLD)
                for _ in range(2):
                    faulty_run(swapped.backward_of_two_uses)
            recovered.backward_three_times(run)
            run(other.backward)
            with pytest.raises(RuntimeError) as error:
                run(other.backward_of_two_uses)
    return (
        torch.equal(two.weight.main_grad, swapped.weight.main_grad),
        torch.equal(failed.weight.main_grad, recovered.weight.main_grad),
        str(error.value),
    )


def test_order_failures_and_uses_that_are_new(ranks: Any) -> None:
    ((swapped, recovered, error),) = ranks(1).run(with_faults)
    assert not swapped
    assert recovered
    assert "a weight of shape (4, 8) was used once in its first backward" in error
