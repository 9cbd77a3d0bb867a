"""The data by index, and the demonstration at the end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from scripts.cpu_pretraining import __main__ as command
from scripts.cpu_pretraining import data
from scripts.cpu_pretraining.arguments import UsageError, parse_arguments
from scripts.cpu_pretraining.compare import forms
from scripts.cpu_pretraining.data import load_corpus


@pytest.mark.parametrize(("codes", "end"), [([0, 0], 0), ([0, 1], 1), ([0, 2], 0), ([1], 1)])
def test_without_options_the_command_ends_with_a_demonstration(monkeypatch, codes, end) -> None:
    runs: list[Any] = []

    def run(argv: Sequence[str]) -> int:
        runs.append(parse_arguments(argv))
        return codes[len(runs) - 1]

    monkeypatch.setattr(command, "_run", run)
    assert command.main([]) == end
    assert len(runs) == len(codes)
    for demonstration in runs[1:]:
        assert demonstration.link_rate is not None
        assert forms(demonstration) == ["megatron", "overlap"]


def test_links_that_cannot_have_the_rate_are_refused(monkeypatch, tmp_path, capsys) -> None:
    asked = Mock(side_effect=[["", "no socket"]])
    ranks = nullcontext(SimpleNamespace(ask=asked))
    monkeypatch.setattr(command, "Ranks", lambda *_, **__: ranks)
    assert command.main(["--link-rate", "9", "--output", str(tmp_path)]) == 2
    asked.assert_called_once_with("pace", 9.0)  # nothing trains
    message = "error: --link-rate 9 cannot be set: no socket; leave --link-rate out"
    assert message in capsys.readouterr().err


def test_a_sample_depends_on_seed_and_index_only() -> None:
    corpus, indices = load_corpus(16), range(64)
    assert len(corpus.tokens) - (8 << 20) in range(1 << 20)
    inputs, labels = corpus.batch([5, 6], 16, seed=1)
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    assert torch.equal(inputs[1], corpus.batch([6], 16, seed=1)[0][0])
    first, second = (corpus.batch(indices, 16, seed)[0] for seed in (1, 2))
    assert not torch.equal(first, second)
    assert len(first.unique(dim=0)) == 64, "from all of the text"


def test_sources_are_read_as_bytes_in_the_order_of_their_paths(tmp_path, monkeypatch) -> None:
    (tmp_path / "b.py").write_bytes(b"\0\xff" * 500)
    (tmp_path / "a.py").write_bytes(bytes(range(256)))
    for other in ("site-packages/c.py", "d.txt"):
        (tmp_path / other).parent.mkdir(exist_ok=True)
        (tmp_path / other).write_bytes(b"no")
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    corpus = load_corpus(16)
    assert (corpus.documents, len(corpus.tokens)) == (2, 257 + 1001)
    assert corpus.tokens[:260].tolist() == [*range(256), 256, 0, 255, 0]
    with pytest.raises(UsageError, match="has 1258 tokens, but one sample needs 1259; choose a sh"):
        load_corpus(1258)
