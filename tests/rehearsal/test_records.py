"""A single bit makes runs differ, and runs that prove nothing are recognized."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commfuse_npu.tools.launch_script.option_words import Options
from mindspeed_patches.rehearsal.__main__ import report
from mindspeed_patches.rehearsal.records import (
    NORM,
    Record,
    read_records,
    report_lines,
)
from mindspeed_patches.state_hashes import optimizer_hash, weight_hashes

LOSSES = [f"iteration {number}, lm loss" for number in (1, 2)]
BEFORE, AFTER = {"w": "start", "b": "start"}, {"w": "end", "b": "end", "optimizer state": "end"}
FUSED = [("qkv", "fused", 4), ("proj", "a reason", 4), ("fc1", "fused", 0)]


def noted(off: float = 0.0, rank: int = 0, **changes: Any) -> Record:
    """The record of two steps, with losses off by a relative ``off``, and attributes changed."""
    numbers = {name: (3.0 * (1 + off)).hex() for name in LOSSES}
    numbers |= {name.replace("lm loss", NORM): (0.5).hex() for name in LOSSES}
    return replace(Record(rank, 2, numbers, BEFORE, AFTER, calls=FUSED), **changes)


def test_one_bit_of_a_weight_or_a_moment_is_another_hash() -> None:
    model = torch.nn.Linear(2, 2).to(torch.bfloat16)
    inner = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    inner.step()
    parts = [SimpleNamespace(optimizer=optimizer) for optimizer in (inner, None)]
    hashes = [(weight_hashes([model]), optimizer_hash(SimpleNamespace(chained_optimizers=parts)))]
    for tensor in (inner.state[model.bias]["exp_avg"], model.weight.data):
        tensor.view(torch.int16).view(-1)[1] ^= 1
        hash_of_state = optimizer_hash(SimpleNamespace(chained_optimizers=parts))
        hashes.append((weight_hashes([model]), hash_of_state))
    (weights, moments), (same, other), (changed, _) = hashes
    assert weights == same != changed
    assert moments != other
    assert [name for name in weights if weights[name] != changed[name]] == ["0.weight"]


def test_records_survive_their_file(tmp_path: Path) -> None:
    for rank in (1, 0):
        noted(rank=rank).write(tmp_path)
    assert [replace(r, calls=FUSED) for r in read_records(tmp_path)] == [noted(), noted(rank=1)]
    assert [record.fused for record in read_records(tmp_path)] == [{"qkv"}] * 2


def test_the_report_has_counts_of_all_ranks_and_a_hash_per_run() -> None:
    record, other = noted(), noted(after=BEFORE, collectives={"tensor: all_reduce": 8})
    lines = list(report_lines({"reference": [record, record], "commfuse": [other, other]}))
    assert "  qkv             8  fused" in lines
    assert "  proj            8  by Megatron, because a reason" in lines
    assert next(line for line in lines if "all_reduce" in line).split()[-2:] == ["0", "16"]
    hashes = [line.rpartition(" ")[2] for line in lines if line.startswith("sha256 of all weights")]
    assert len(set(hashes)) == 2


def verdict(reference: list[Record], commfuse: list[Record], words: str) -> int:
    """The exit code of a rehearsal whose runs have these records."""
    return report(Options(words.split()), {"reference": reference, "commfuse": commfuse})


LEFT = [("qkv", "a reason", 4)]
SEVEN = {f"w{number}": "" for number in range(7)}
MORE = "rank 0 differs after the training: w0; w1; w2; w3; w4 and"
NUMBERS = noted().numbers
NORMS = {name: value for name, value in NUMBERS.items() if name not in LOSSES}
ATTENTION, ULYSSES = "--commfuse-attention", "--commfuse-ulysses"


@pytest.mark.parametrize(
    ("commfuse", "words", "code", "said"),
    [
        (noted(), "", 0, "identical: True"),
        (noted(after=AFTER | {"w": "x"}), "", 1, "differs after the training: w\n"),
        (noted(before={}), "", 1, "rank 0 differs before the training: w; b\n"),
        (noted(2**-52), "", 1, f"differs in the training: {LOSSES[0]}; {LOSSES[1]}\n"),
        (noted(after=AFTER | SEVEN), "", 1, f"{MORE} 2 more\n"),
        (noted(calls=LEFT), "", 1, "inconclusive: commfuse run: nothing was fused\n"),
        (noted(calls=LEFT, overlapped=3), "", 0, "identical: True"),
        (noted(9e-7, after=SEVEN), ATTENTION, 0, "same bits everywhere: False"),
        (noted(1.1e-6), ATTENTION, 1, "relative: False"),
        (noted(9e-7), ULYSSES, 0, "relative: True"),
        (noted(1.9e-3), f"{ATTENTION} --bf16", 0, "relative: True"),
        (noted(2e-3), f"{ATTENTION} --fp16", 1, "relative: False"),
        (noted(numbers=NUMBERS | {"x": "0x0p0"}), ULYSSES, 1, "relative: False (inf)"),
        (noted(numbers=NUMBERS | {LOSSES[0]: "nan"}), ULYSSES, 1, "relative: False (inf)"),
        (noted(numbers=NUMBERS | {"x": "inf"}), "", 1, "run: a loss or a gradient norm is not fin"),
        (noted(numbers=NORMS), ULYSSES, 1, "commfuse run: no loss was noted\n"),
        (
            noted(numbers=NUMBERS | dict.fromkeys(NORMS, "0x0p0")),
            ULYSSES,
            1,
            "inconclusive: commfuse run: all gradient norms are 0\n",
        ),
        (noted(numbers=NUMBERS | {next(iter(NORMS)): "0x0p0"}), ULYSSES, 0, "relative: True"),
        (
            noted(after=BEFORE | {"optimizer state": "end"}),
            ULYSSES,
            1,
            "inconclusive: commfuse run: no weight changed on rank 0\n",
        ),
    ],
)
def test_the_verdict(capsys, commfuse: Record, words: str, code: int, said: str) -> None:
    assert verdict([noted()], [commfuse], words) == code
    out = capsys.readouterr().out
    assert said in out
    assert "identical" in out or "relative: " in out


def test_all_ranks_count_and_none_may_be_missing(capsys) -> None:
    for ranks, said in ((1, "2 ranks against 1"), (2, "rank 1 differs in the training: iteration")):
        other = [noted(), noted(0.1, 1)]
        assert verdict([noted(), noted(rank=1)], other[:ranks], "") == 1
        assert said in capsys.readouterr().out
