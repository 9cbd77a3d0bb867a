"""A single bit decides, and runs that prove nothing are told apart."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from commfuse_npu.tools.launch_script.options import Options
from mindspeed_patches.rehearsal import __main__ as rehearse
from mindspeed_patches.rehearsal import report
from mindspeed_patches.rehearsal.compare import (
    degeneracies,
    differences,
    fused_paths,
    gathers_and_scatters,
    largest_loss_difference,
)
from mindspeed_patches.rehearsal.records import Record, read_records
from mindspeed_patches.rehearsal.run import Run
from mindspeed_patches.state_hashes import optimizer_hash, weight_hashes


def train(rank: int = 0, flip: bool = False) -> Record:
    """Two steps of a small model; ``flip`` changes the lowest bit of one weight at the end."""
    torch.manual_seed(rank)
    model = torch.nn.Linear(4, 3).to(torch.bfloat16)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = SimpleNamespace(optimizer=inner)
    record = Record(rank, weights_before=weight_hashes([model]))
    for _ in range(2):
        inner.zero_grad()
        loss = model(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().mean()
        loss.backward()
        inner.step()
        record.losses.append({"lm loss": loss.item().hex()})
        record.grad_norms.append(float(model.weight.grad.float().norm()).hex())
    if flip:
        with torch.no_grad():
            model.weight.view(torch.int16)[1, 2] ^= 1
    record.weights_after = weight_hashes([model])
    record.optimizer_after = optimizer_hash(optimizer)
    record.finished = True
    return record


def test_equal_runs_are_equal() -> None:
    assert differences([train(0), train(1)], [train(0), train(1)]) == []
    assert degeneracies([train(0), train(1)]) == []


def test_one_bit_of_one_weight_is_found_and_named() -> None:
    found = differences([train(0), train(1)], [train(0), train(1, flip=True)])
    assert found[0] == "rank 1: weights differ after the training: 0.weight"
    # The optimizer of this model steps on the very same tensor.
    assert len(found) == 2
    assert train(1).weights_hash != train(1, flip=True).weights_hash


def test_losses_differ_in_their_last_digit() -> None:
    one, other = train(), train()
    loss = float.fromhex(other.losses[1]["lm loss"])
    other.losses[1]["lm loss"] = (loss * (1 + 2**-52)).hex()
    assert differences([one], [other]) == ["rank 0: losses differ, from iteration 2 on"]


def test_other_beginnings_other_optimizers_other_ranks() -> None:
    one, other = train(), train()
    other.weights_before = {}
    other.optimizer_after = "other"
    assert len(differences([one], [other])) == 2
    assert differences([one], []) == ["1 ranks against 0"]


def test_the_optimizers_moments_count() -> None:
    model = torch.nn.Linear(2, 2)
    inner = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    inner.step()
    chained = SimpleNamespace(
        chained_optimizers=[SimpleNamespace(optimizer=inner), SimpleNamespace(optimizer=None)]
    )
    before = optimizer_hash(chained)
    inner.state[model.bias]["exp_avg"][0] += 2.0**-20
    assert optimizer_hash(chained) != before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda r: setattr(r, "weights_after", r.weights_before), "no weight changed on rank 0"),
        (lambda r: setattr(r, "grad_norms", [(0.0).hex()] * 2), "all gradient norms are 0"),
        (lambda r: r.losses[1].update(x="nan"), "a loss is not finite"),
        (lambda r: r.grad_norms.append("inf"), "a gradient norm is not finite"),
        (lambda r: setattr(r, "losses", [{}, {}]), "no loss was noted"),
    ],
)
def test_degenerate_runs(change: object, reason: str) -> None:
    record = train()
    assert callable(change)
    change(record)
    assert degeneracies([record]) == [reason]


def test_records_survive_their_file(tmp_path: Path) -> None:
    for rank in (1, 0):
        record = train(rank)
        record.calls = [("qkv", "fused", 4)]
        record.collectives = [("tensor", "all_gather", 2)]
        record.write(tmp_path)
    records = read_records(tmp_path)
    assert [record.rank for record in records] == [0, 1]
    assert differences([train(0), train(1)], records) == []
    assert fused_paths(records) == {"qkv"}
    assert gathers_and_scatters(records, "tensor") == 4


# ------------------------------------------------------- the command's own verdict


def test_collectives_of_a_group_are_counted_and_shown() -> None:
    record = train()
    record.collectives = [
        ("data parallel with cp", "reduce_scatter_tensor", 4),
        ("data parallel with cp", "all_gather_into_tensor", 2),
        ("data parallel", "all_reduce", 16),
        ("tensor", "_all_gather_base", 8),
        ("tensor", "all_gather_object", 32),
    ]
    assert gathers_and_scatters([record, record], "data parallel") == 2 * (4 + 2)
    assert gathers_and_scatters([record], "tensor") == 8
    lines = report.collective_lines({"reference": [train()], "commfuse": [record]})
    assert [line.split()[-2:] for line in lines[-2:]] == [["0", "8"], ["0", "32"]]
    assert lines[-1].startswith("  tensor: all_gather_object ")


def verdict(
    monkeypatch: pytest.MonkeyPatch,
    reference: Record,
    commfuse: Record,
    only: str | None = None,
    tolerance: float | None = None,
    words: str = "",
) -> int:
    """What the command answers when its two runs note these records."""
    commfuse.calls = commfuse.calls or [("qkv", "fused", 4)]
    noted = {"reference": [reference], "commfuse": [commfuse]}
    monkeypatch.setattr(rehearse, "run_script", lambda run, way, words, folder: noted[way])
    given = SimpleNamespace(only=only, loss_tolerance=tolerance)
    run = Run(Path("pretrain_gpt.py"), 1, Path(), {}, 1.0)
    launch = SimpleNamespace(options=Options(words.split()))
    return rehearse._train_and_compare(given, launch, run, Path())  # type: ignore[arg-type]


def test_identical(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict(monkeypatch, train(), train()) == 0
    assert capsys.readouterr().out.endswith("identical: True\n")


def test_not_identical(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict(monkeypatch, train(), train(flip=True)) == 1
    out = capsys.readouterr().out
    assert out.endswith("identical: False\n")
    assert "0.weight" in out


def test_equal_but_still(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    still = train()
    still.weights_after = still.weights_before
    assert verdict(monkeypatch, still, copy.deepcopy(still)) == 1
    assert "proves nothing: commfuse run: no weight changed" in capsys.readouterr().out


def test_equal_but_not_fused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = train()
    other.calls = [("qkv", "a reason", 4)]
    assert verdict(monkeypatch, train(), other) == 1
    out = capsys.readouterr().out
    assert "nothing was fused" in out
    assert "by Megatron, because a reason" in out


def a_little_off(by: float) -> Record:
    record = train(flip=True)
    for step in record.losses:
        step["lm loss"] = (float.fromhex(step["lm loss"]) * (1 + by)).hex()
    return record


@pytest.mark.parametrize(
    ("words", "within", "beyond"),
    [
        ("--commfuse-attention", 9e-7, 1.1e-6),
        ("--commfuse-ulysses", 9e-7, 1.1e-6),
        ("--commfuse-attention --bf16", 1.9e-3, 2e-3),
    ],
)
def test_attention_is_compared_by_its_losses(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    within: float,
    beyond: float,
) -> None:
    assert verdict(monkeypatch, train(), a_little_off(within), words=words) == 0
    out = capsys.readouterr().out
    assert "same bits everywhere: False" in out
    assert "relative: True" in out
    assert verdict(monkeypatch, train(), a_little_off(beyond), words=words) == 1
    assert "relative: False" in capsys.readouterr().out


def test_a_tolerance_is_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict(monkeypatch, train(), a_little_off(1e-3), tolerance=1e-2) == 0
    assert verdict(monkeypatch, train(), a_little_off(1e-3), tolerance=1e-4) == 1
    words = "--commfuse-attention"
    assert verdict(monkeypatch, train(), train(flip=True), tolerance=0.0, words=words) == 1


def test_what_cannot_be_compared_is_not_equal() -> None:
    short, none, nan = train(), train(), train()
    short.losses = short.losses[:1]
    none.losses[0] = {}
    nan.losses[0]["lm loss"] = "nan"
    for other in (short, none, nan):
        assert largest_loss_difference([train()], [other]) == math.inf
    silent = train()
    silent.losses = [{}, {}]
    assert largest_loss_difference([silent], [silent]) == math.inf


def test_one_run_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict(monkeypatch, train(), train(flip=True), only="reference") == 0
    assert "identical" not in capsys.readouterr().out


def test_losses_are_shown_with_all_digits() -> None:
    one, other = train(), train()
    other.losses[0]["lm loss"] = (float.fromhex(other.losses[0]["lm loss"]) + 2**-50).hex()
    other.grad_norms[1] = (float.fromhex(str(one.grad_norms[1])) * 1.25).hex()
    lines = report.loss_lines({"reference": [one], "commfuse": [other]})
    assert lines[1].endswith("differs")
    assert repr(float.fromhex(one.losses[1]["lm loss"])) in lines[2]
    assert lines[-1] == "largest difference of the gradient norm: 0.25 relative"
    same = report.loss_lines({"reference": [one], "commfuse": [one]})
    assert not any(line.endswith("differs") for line in same)
