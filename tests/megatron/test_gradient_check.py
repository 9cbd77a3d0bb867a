"""``--commfuse-overlap-check`` finds other gradients, and changes nothing where there are none."""

import io
import os
import re
from contextlib import nullcontext, redirect_stdout
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu.overlap import RandomState, recompute
from mindspeed_patches.fb_overlap import Overlapping, pass_states
from tests.megatron.models import DISTRIBUTED, EXPERTS, RECOMPUTED, Case
from tests.megatron.training import Trainer, layout
from tests.proof.test_planted_faults import altered

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
DENSE = Case(tensor=2, microbatches=4, options=RECOMPUTED | DROPOUT | {"num_layers": 3})
AUXILIARY = {
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "num_layers": 2,
}
CASES = {
    "TP 2, SP, recomputed dropout": DENSE,
    "EP 2, auxiliary losses, distributed optimizer": Case(
        experts=2, replicas=2, microbatches=4, options=EXPERTS | AUXILIARY | DISTRIBUTED
    ),
}


def trained(rank: int, case: Case, fault: str = "") -> str:
    """What was printed, after a comparison of bits with a training without overlap."""
    printed, overlapping = io.StringIO(), Overlapping(check=True)
    with layout(case):
        own = None if fault else Trainer(case).run(3)
        overlapping.start()
        try:
            with redirect_stdout(printed), FAULTS[fault]():
                trainer = Trainer(case)
                if fault == "state that no census sees":
                    hide_state(trainer)
                if fault == "noise":
                    add_noise(trainer)
                ours = trainer.run(3)
        except RuntimeError as error:
            return str(error)
        finally:
            overlapping.stop()
    # Without the numbers of calls for gradients: the step ran three times.
    assert own is None or own.rpartition("[")[0] == ours.rpartition("[")[0]
    return printed.getvalue()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_checked_step_changes_nothing(ranks: Any, case: Case) -> None:
    first, *_ = ranks(case.size).run(trained, case)
    assert "gradients have the same bits as in Megatron's order" in first


def accumulated(rank: int) -> tuple[str, bool]:
    """What was printed in two calls of the schedule that accumulate, and whether bits are equal."""
    printed = io.StringIO()
    overlapping = Overlapping(check=True)
    gradients = []
    with layout(DENSE), redirect_stdout(printed):
        for start, stop in ((lambda: None,) * 2, (overlapping.start, overlapping.stop)):
            trainer = Trainer(DENSE)
            start()
            try:
                trainer.accumulate()
                with mock.patch.object(type(trainer.models[0]), "zero_grad_buffer"):
                    trainer.accumulate()
            finally:
                stop()
            gradients.append([weight.main_grad for weight in trainer.weights().values()])
    return printed.getvalue(), all(map(torch.equal, *gradients))


def test_gradients_that_are_accumulated_over_calls_are_kept(ranks: Any) -> None:
    for printed, same in ranks(2).run(accumulated):
        assert same
        assert "check: " not in printed


def hide_state(trainer: Trainer) -> None:
    """Each forward writes a factor into the environment, which recomputations read."""
    os.environ["FACTOR"] = "1.0"
    for layer in trainer.models[0].module.decoder.layers:
        own = layer.mlp.forward
        layer.mlp.forward = lambda x, own=own, **more: (
            own(x, **more)[0] * float(os.environ["FACTOR"]),
            None,
        )
    step, count = trainer.forward, [0]

    def forward(data: Any, model: Any) -> Any:
        count[0] += 1
        os.environ["FACTOR"] = str(0.5 + 0.25 * (count[0] % 4))
        return step(data, model)

    trainer.forward = forward


def add_noise(trainer: Trainer) -> None:
    """Results change from call to call, as of kernels that add in any order."""
    step, noise = trainer.forward, torch.Generator().manual_seed(1)

    def forward(data: Any, model: Any) -> Any:
        output, loss = step(data, model)
        return output * (1 + torch.rand(1, generator=noise)), loss

    trainer.forward = forward


def wrong_gradients() -> Any:
    """A recomputation that ran ahead is replaced by zeros."""
    joined = recompute._joined

    def zeros(made: Any, before: Any, args: Any) -> Any:
        hidden, *others = made.outputs
        return joined(altered(made, outputs=(hidden * 0, *others)), before, args)

    return mock.patch.object(recompute, "_joined", zeros)


def inputs_of_another_checkpoint() -> Any:
    checkpoint, calls = recompute._Checkpoint, list[Any]()
    run = checkpoint._run

    def run_another(self: Any, args: Any) -> Any:
        calls.append(args)
        return run(self, calls[-2] if len(calls) > 1 else args)

    return mock.patch.object(checkpoint, "_run", run_another)


def without(owner: Any, name: str) -> Any:
    """A function that does nothing."""
    return partial(mock.patch.object, owner, name, return_value=None)


FAULTS = {
    "": nullcontext,
    "noise": nullcontext,
    "state that no census sees": nullcontext,
    "random states that passes share": without(RandomState, "restore"),
    "random states of no forward": without(recompute, "restore_states"),
    "scratch that passes share": without(pass_states, "active_turns"),
    "another output of a recomputation": wrong_gradients,
    "inputs of another checkpoint": inputs_of_another_checkpoint,
}


@pytest.mark.parametrize("fault", list(FAULTS)[2:])
def test_faults_are_noticed_on_all_ranks(ranks: Any, fault: str) -> None:
    for error in ranks(2).run(trained, DENSE, fault):
        assert re.search("differ between Megatron's order and|drew random numbers", error)


def test_a_device_that_is_not_deterministic_is_said(ranks: Any) -> None:
    first, _ = ranks(2).run(trained, DENSE, "noise")
    assert "two runs in Megatron's order have other gradients" in first
    assert "--deterministic-mode" in first
