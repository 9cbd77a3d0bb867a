"""A measured run: the same script, bits at its end, and collectives that are waited for."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from mindspeed_patches import measured
from tests.patches.test_registration import STAND_INS, forget

SCRIPT = """
import sys
import torch
import mindspeed_llm
from megatron.training import training

model, optimizer, scheduler = training.setup_model_and_optimizer(int(sys.argv[2]))
with torch.no_grad():
    model[0].weight[0, 0] = float(sys.argv[4])  # after the set-up: what counts is the end
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A pretraining of one rank, with stand-ins for MindSpeed and for Megatron's training."""
    forget()

    def setup_model_and_optimizer(seed: int) -> tuple[Any, Any, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(2, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        return [model], SimpleNamespace(optimizer=inner), None

    import megatron

    package, training = ModuleType("megatron.training"), ModuleType("training")
    training.setup_model_and_optimizer = setup_model_and_optimizer  # type: ignore[attr-defined]
    package.training = training  # type: ignore[attr-defined]
    monkeypatch.setattr(megatron, "training", package, raising=False)
    monkeypatch.setitem(sys.modules, "megatron.training", package)
    monkeypatch.setitem(sys.modules, "megatron.training.training", training)
    monkeypatch.syspath_prepend(STAND_INS)
    # It is for ranks of torchrun, not for who runs the tests.
    monkeypatch.setattr(measured, "die_with_parent", lambda: None)
    monkeypatch.setattr(sys, "path", ["replaced by the script's folder", *sys.path])
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    path = tmp_path / "pretrain.py"
    path.write_text(SCRIPT)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield path
    dist.destroy_process_group()
    forget()


def test_the_bits_are_those_of_the_end(script: Path, capsys: Any) -> None:
    found = []
    for seed, weight in (("1", "0.5"), ("1", "0.5"), ("1", "0.25"), ("2", "0.5")):
        measured.main([str(script), "--seed", seed, "--weight", weight])
        found += re.findall(r"^sha256 of all weights: (\w{64})$", capsys.readouterr().out, re.M)
        forget()
    assert found[0] == found[1]
    assert (len(found), len(set(found))) == (4, 3)
    script.write_text("import mindspeed_llm\n")
    with pytest.raises(RuntimeError, match=r"never called .*\.setup_model_and_optimizer"):
        measured.main([str(script)])


def test_collectives_of_the_tensor_parallel_group_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, other, run, waits = object(), object(), measured._Run(), []
    state = SimpleNamespace(get_tensor_model_parallel_group=lambda check_initialized: group)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)

    def all_gather_into_tensor(**given: Any) -> Any:
        return SimpleNamespace(wait=lambda: waits.append(given))

    posted = run.posted_wrapper(all_gather_into_tensor)
    posted(group=group, async_op=True)
    assert waits == [{"group": group, "async_op": True}]
    assert run.waited == ["all_gather_into_tensor"]
    for given in ({"group": other, "async_op": True}, {"group": group}, {"async_op": True}):
        posted(**given)
    # Before there are groups.
    state.get_tensor_model_parallel_group = lambda check_initialized: None
    posted(async_op=True)
    assert len(waits) == len(run.waited) == 1
