"""A measured run: collectives that are waited for immediately, and the weights' hash."""

import re
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from mindspeed_patches import measured
from mindspeed_patches.measured import MeasuredRun


def test_collectives_of_the_tensor_parallel_group_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, other, run, waits = object(), object(), MeasuredRun(blocking=True), []
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
    # Before the groups exist.
    state.get_tensor_model_parallel_group = lambda check_initialized: None
    posted(async_op=True)
    assert len(waits) == len(run.waited) == 1


def test_its_wrapper_comes_after_those_of_the_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Mock()
    features = SimpleNamespace(apply_features_patches=calls.apply_features_patches)
    for name, content in {
        "features_manager.features_manager": {"MindSpeedFeaturesManager": features},
        "patch_utils": {"MindSpeedPatchesManager": calls},
    }.items():
        monkeypatch.setitem(sys.modules, f"mindspeed.{name}", SimpleNamespace(**content))
    monkeypatch.setattr(measured, "install", calls.install)
    monkeypatch.setattr(measured, "die_with_parent", int)
    monkeypatch.setattr(measured.launch, "main", lambda words, prepare: prepare())
    with pytest.raises(RuntimeError, match="never called"):
        measured.main(["pretrain_gpt.py"])
    features.apply_features_patches("options")
    names = "install", "apply_features_patches", "register_patch", "apply_patches"
    assert tuple(name for name, *_ in calls.mock_calls) == names
    assert calls.apply_features_patches.call_args == call("options")
    path, _ = calls.register_patch.call_args.args
    assert path == "megatron.training.training.setup_model_and_optimizer"


def test_the_bits_are_those_of_the_end(one_rank: None, capsys: Any, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2 << 20, 10 << 20))
    run, model = MeasuredRun(blocking=True), torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="never called setup_model_and_optimizer"):
        run.tell()
    optimizer = SimpleNamespace(optimizer=torch.optim.SGD(model.parameters()))
    run.setup_model_and_optimizer_wrapper(lambda: ([model], optimizer, None))()
    for weight in (0.5, 0.5, 0.25):
        torch.nn.init.constant_(model.weight, weight)
        run.tell()
    printed = capsys.readouterr().out
    assert printed.count("collectives waited for at once: 0\n") == 3
    assert printed.count("most memory taken of a device (MB): 8.0\n") == 3
    bits = re.findall(r"^sha256 of all weights: (\w{64})$", printed, re.M)
    assert bits[0] == bits[1] != bits[2]
