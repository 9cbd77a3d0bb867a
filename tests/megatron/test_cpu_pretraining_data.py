"""Bytes in, samples out: tokenizer, held-out documents, deterministic sampling, errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.cpu_pretraining.data import Corpus, global_batch_samples, load_corpus, tokens_of
from scripts.cpu_pretraining.usage_error import UsageError


def load(path: Path | str | None, fraction: float = 0.1, seq_length: int = 16) -> Corpus:
    return load_corpus(
        None if path is None else str(path),
        valid_fraction=fraction,
        seq_length=seq_length,
        need_valid=fraction > 0,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(40):
        (tmp_path / f"{number:02d}.txt").write_bytes(bytes([number]) * 100)
    return tmp_path


def test_every_byte_is_a_token() -> None:
    assert tokens_of(bytes(range(256))).tolist() == [*range(256), 256]


def test_held_out_documents_are_not_trained_on(folder: Path) -> None:
    corpus = load(folder)
    held_out = set(corpus.valid.tolist()) - {256}
    trained = set(corpus.train.tolist()) - {256}
    assert held_out == {9, 19, 29, 39}
    assert trained == set(range(40)) - held_out


def test_single_file_holds_out_its_tail(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_bytes(bytes(range(200)) * 2)
    corpus = load(file)
    whole = tokens_of(file.read_bytes())
    assert len(corpus.valid) == 40
    assert np.array_equal(np.concatenate([corpus.train, corpus.valid]), whole)


def test_standard_library_is_the_default_and_the_same_every_time() -> None:
    one, two = load(None, 0.05, 256), load(None, 0.05, 256)
    assert one.fingerprint() == two.fingerprint()
    assert len(one.train) > 1_000_000
    assert len(one.valid) > 10_000


def test_labels_are_one_token_ahead(folder: Path) -> None:
    inputs, labels = load(folder).batch("train", range(6), 16, seed=1)
    assert inputs.shape == labels.shape == (6, 16)
    assert torch.equal(inputs[:, 1:], labels[:, :-1])


def test_sample_depends_on_seed_split_and_index_only(folder: Path) -> None:
    corpus = load(folder)
    together = corpus.batch("train", [5, 6], 16, seed=1)[0]
    alone = corpus.batch("train", [6], 16, seed=1)[0]
    assert torch.equal(together[1], alone[0])
    many = range(64)
    assert not torch.equal(
        corpus.batch("train", many, 16, seed=1)[0], corpus.batch("train", many, 16, seed=2)[0]
    )


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_ranks_share_out_the_global_batch(dp_size: int) -> None:
    micro_batches = 8 // (2 * dp_size)
    taken = [
        sample
        for rank in range(dp_size)
        for samples in global_batch_samples(24, micro_batches, 2, rank, dp_size)
        for sample in samples
    ]
    assert sorted(taken) == list(range(24, 32))


def test_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere does not exist"):
        load(tmp_path / "nowhere")


def test_empty_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UsageError, match="holds no data"):
        load(tmp_path)


def test_short_data_names_both_lengths(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(UsageError, match=r"has 4 tokens, but one sample needs 17"):
        load(tmp_path, fraction=0.0)


def test_short_validation_part_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("abcdefgh" * 10)
    with pytest.raises(UsageError, match=r"validation part .* has 8 tokens"):
        load(tmp_path)


def test_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret.txt").write_text("abc")

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UsageError, match=r"cannot read .*secret.txt: Permission denied"):
        load(tmp_path)
