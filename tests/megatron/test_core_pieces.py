"""A Megatron core whose functions differ from those that are used trains by itself."""

import inspect
import io
import pkgutil
from contextlib import redirect_stdout
from inspect import Parameter, Signature
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from mindspeed_patches.core_pieces import Piece
from mindspeed_patches.fb_overlap import Overlapping
from mindspeed_patches.fb_overlap.core_versions import PIECES
from tests.distributed.ranks import on_ranks
from tests.megatron.cores import RECOMPUTED_TP
from tests.megatron.models import Case, gpt, settings
from tests.megatron.training import Trainer, launched, layout, patched

SCHEDULES = "megatron.core.pipeline_parallel.schedules"
NEW = Parameter("novelty", Parameter.KEYWORD_ONLY)


def changed(path: str, without: str = "", add: bool = False) -> Any:
    """A patch after which a function says that it has other arguments."""
    function = inspect.unwrap(pkgutil.resolve_name(path))
    kept = [one for one in inspect.signature(function).parameters.values() if one.name != without]
    variable = [one for one in kept if one.kind == Parameter.VAR_KEYWORD]
    parameters = [*kept[: len(kept) - len(variable)], *[NEW][:add], *variable]
    return mock.patch.object(function, "__signature__", Signature(parameters), create=True)


@pytest.mark.parametrize("path", [piece.path for piece in PIECES])
def test_a_new_argument_is_named_at_the_start(path: str, capsys: Any) -> None:
    from megatron.core.pipeline_parallel import schedules

    original, overlapping = schedules.forward_step, Overlapping()
    with changed(path, add=True):
        overlapping.start()
    assert schedules.forward_step is original
    assert f"overlap: off: {path} requires novelty, which is not known" in capsys.readouterr().out


def test_what_is_missing_is_named(capsys: Any) -> None:
    with changed(f"{SCHEDULES}.forward_step", without="config"):
        Overlapping().start()
    assert f"off: {SCHEDULES}.forward_step takes no config" in capsys.readouterr().out
    with mock.patch.object(pkgutil.resolve_name(SCHEDULES), "backward_step"):
        delattr(pkgutil.resolve_name(SCHEDULES), "backward_step")
        Overlapping().start()
    assert f"off: {SCHEDULES}.backward_step is missing" in capsys.readouterr().out
    row = "megatron.core.tensor_parallel.layers.RowParallelLinear.forward"
    unread = Piece(row, "self input_", read="input_is_parallel novelty")
    assert unread.difference() == f"{row} does not read novelty"


def changed_later(rank: int) -> tuple[int, str]:
    """MindSpeed's patch manager imports Megatron after the registration."""
    printed, overlapping = io.StringIO(), Overlapping()
    with layout(RECOMPUTED_TP):
        own = Trainer(RECOMPUTED_TP).run(2)
        another = changed(f"{SCHEDULES}.backward_step", add=True)
        with patched(overlapping), another, redirect_stdout(printed):
            assert Trainer(RECOMPUTED_TP).run(2) == own
    return overlapping.recomputation.ahead.count, printed.getvalue()


def test_a_new_argument_is_named_at_the_first_step(ranks: Any) -> None:
    (ahead, printed), (ahead_there, _) = ranks(2).run(changed_later)
    assert ahead == ahead_there == 0
    assert f"off: {SCHEDULES}.backward_step requires novelty" in printed


@on_ranks(2)
def test_a_layer_with_other_arguments_stays_megatrons(rank: int) -> None:
    case = Case(tensor=2)
    own = torch.ones(1), None
    with layout(case), launched(case) as (wrappers, _):
        model: Any = gpt(case, settings(case))
        mlp = model.decoder.layers[0].mlp
        for layer, wrap in (
            (mlp.linear_fc1, wrappers.column_forward_wrapper),
            (mlp.linear_fc2, wrappers.row_forward_wrapper),
        ):
            wrappers.calls.clear()
            x = torch.ones(64, 2, layer.weight.shape[1])
            assert wrap(lambda *_, novelty: own)(layer, x, novelty=1) is own
            ((_, path),) = wrappers.calls
            assert path == "its forward gets arguments that are not known"


def test_groups_of_several_modules_are_named(capsys: Any) -> None:
    several = type("MultiModuleProcessGroupCollection", (), {})()
    schedule = Overlapping().get_forward_backward_func_wrapper(lambda: lambda **_: "own losses")()
    step = {"model": torch.nn.Linear(1, 1), "num_microbatches": 4, "pg_collection": several}
    assert schedule(**step) == "own losses"
    assert "off: MultiModuleProcessGroupCollection: the parts" in capsys.readouterr().out
