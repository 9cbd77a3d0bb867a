"""A single bit makes runs differ, and runs that prove nothing are recognized."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from commfuse_npu.tools.launch_script.options import Options
from mindspeed_patches.rehearsal import __main__ as rehearse
from mindspeed_patches.rehearsal.records import (
    NORM,
    Record,
    degeneracies,
    differences,
    largest_loss_difference,
    read_records,
    report_lines,
    weights_hash,
)
from mindspeed_patches.state_hashes import optimizer_hash, weight_hashes


def train(rank: int = 0, flip: bool = False) -> Record:
    """Two steps of a small model; ``flip`` changes the lowest bit of one weight at the end."""
    torch.manual_seed(rank)
    model = torch.nn.Linear(4, 3).to(torch.bfloat16)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    record = Record(rank, iterations=2, weights_before=weight_hashes([model]))
    for number in (1, 2):
        inner.zero_grad()
        loss = model(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().mean()
        loss.backward()
        inner.step()
        record.numbers[f"iteration {number}, lm loss"] = loss.item().hex()
        record.numbers[f"iteration {number}, {NORM}"] = float(model.weight.grad.norm()).hex()
    if flip:
        with torch.no_grad():
            model.weight.view(torch.int16)[1, 2] ^= 1
    record.weights_after = weight_hashes([model])
    record.optimizer_after = optimizer_hash(SimpleNamespace(optimizer=inner))
    return record


def noted(off: float = 0.0, flip: bool = False, **changes: object) -> Record:
    """Record of a second run: losses off by a relative ``off``, and attributes changed."""
    record = train(flip=flip)
    for name, value in record.losses.items():
        record.numbers[name] = (float.fromhex(value) * (1 + off)).hex()
    return replace(record, **{"calls": [("qkv", "fused", 4)], **changes})


def test_what_differs_is_found_and_named() -> None:
    assert differences([train(0), train(1)], [train(0), train(1)]) == []
    assert degeneracies([train(0), train(1)]) == []
    # The optimizer of this model holds the same tensor.
    assert differences([train(0), train(1)], [train(0), train(1, flip=True)]) == [
        "rank 1 differs after the training: 0.weight; optimizer state"
    ]
    assert weights_hash([train(0), train(1)]) != weights_hash([train(0), train(1, flip=True)])
    assert differences([train()], [noted(2**-52)]) == [
        "rank 0 differs in the training: iteration 1, lm loss; iteration 2, lm loss"
    ]
    other = noted(weights_before={}, optimizer_after="other")
    assert [line.split(": ")[1] for line in differences([train()], [other])] == [
        "0.weight; 0.bias", "optimizer state",
    ]  # fmt: skip
    assert differences([other], []) == ["1 ranks against 0"]
    weights = {f"w{number}": "" for number in range(7)}
    for runs in ([Record(0, weights_after=weights), Record(0)],
                 [Record(0), Record(0, weights_after=weights)]):  # fmt: skip
        (more,) = differences(runs[:1], runs[1:])
        assert more.endswith("w0; w1; w2; w3; w4 and 2 more")


def test_the_optimizers_moments_count() -> None:
    model = torch.nn.Linear(2, 2)
    inner = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    inner.step()
    parts = [SimpleNamespace(optimizer=optimizer) for optimizer in (inner, None)]
    chained = SimpleNamespace(chained_optimizers=parts)
    before = optimizer_hash(chained)
    inner.state[model.bias]["exp_avg"][0] += 2.0**-20
    assert optimizer_hash(chained) != before


def test_runs_that_prove_nothing_and_what_cannot_be_compared() -> None:
    record = train()
    norms = {name: value for name, value in record.numbers.items() if name.endswith(NORM)}
    for changes, reason in (
        ({"weights_after": record.weights_before}, "no weight changed on rank 0"),
        ({"numbers": record.losses | dict.fromkeys(norms, "0x0p0")}, "all gradient norms are 0"),
        ({"numbers": {**record.numbers, "x": "nan"}}, "a loss or a gradient norm is not finite"),
        ({"numbers": norms}, "no loss was noted"),
    ):
        assert degeneracies([replace(record, **changes)]) == [reason]
    first, *_ = record.losses
    for change in ({"another": "0x0p0"}, {first: "nan"}):
        other = replace(record, numbers=record.numbers | change)
        assert largest_loss_difference([record], [other]) == math.inf
    assert largest_loss_difference([Record(0)], [Record(0)]) == math.inf


def test_records_survive_their_file(tmp_path: Path) -> None:
    for rank in (1, 0):
        record = train(rank)
        record.calls = [("qkv", "fused", 4), ("proj", "a reason", 4), ("fc1", "fused", 0)]
        record.write(tmp_path)
    records = read_records(tmp_path)
    assert [record.rank for record in records] == [0, 1]
    assert differences([train(0), train(1)], records) == []
    assert [record.fused for record in records] == [{"qkv"}] * 2


def test_the_report_has_counts_of_all_ranks_and_a_hash_per_run() -> None:
    record, other = train(), noted(flip=True, collectives={"tensor: all_reduce": 8})
    other.calls = [("qkv", "fused", 4), ("proj", "a reason", 4)]
    lines = list(report_lines({"reference": [record, record], "commfuse": [other, other]}))
    assert "  qkv             8  fused" in lines
    assert "  proj            8  by Megatron, because a reason" in lines
    assert next(line for line in lines if "all_reduce" in line).split()[-2:] == ["0", "16"]
    hashes = [line.rpartition(" ")[2] for line in lines if line.startswith("sha256 of all weights")]
    assert hashes == [weights_hash([record, record]), weights_hash([other, other])]


LEFT = [("qkv", "a reason", 4)]
ATTENTION = "--commfuse-attention"
STILL = noted(weights_after=train().weights_before)


@pytest.mark.parametrize(
    ("commfuse", "words", "code", "said"),
    [
        (noted(), "", 0, "identical: True"),
        (noted(flip=True), "", 1, "0.weight"),
        (noted(calls=LEFT), "", 1, "commfuse run: nothing was fused"),
        (noted(calls=LEFT, pairs=3), "", 0, "identical: True"),
        (noted(9e-7, flip=True), ATTENTION, 0, "same bits everywhere: False"),
        (noted(1.1e-6), ATTENTION, 1, "relative: False"),
        (noted(9e-7), "--commfuse-ulysses", 0, "relative: True"),
        (noted(1.9e-3), f"{ATTENTION} --bf16", 0, "relative: True"),
        (noted(2e-3), f"{ATTENTION} --fp16", 1, "relative: False"),
        (STILL, "", 1, "inconclusive: commfuse run: no weight changed"),
    ],
)
def test_the_verdict(capsys, commfuse: Record, words: str, code: int, said: str) -> None:
    reference = STILL if commfuse is STILL else train()
    runs = {"reference": [reference], "commfuse": [commfuse]}
    options = Options(words.split())
    assert rehearse._train_and_compare(options, lambda way, *_: runs[way], Path()) == code
    out = capsys.readouterr().out
    assert said in out
    assert "identical" in out or "relative: " in out
