"""Stand-in files for fine-tuning, in the formats that Megatron and tokenizers read."""

import json
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

from commfuse_npu.tools.launch_script.option_words import Options
from mindspeed_patches.rehearsal.instruction_files import replace_missing_instructions

LAUNCH = (
    "--is-instruction-dataset --data-path d --tokenizer-type PretrainedFromHF "
    "--tokenizer-name-or-path t --padded-vocab-size 152064 --seq-length 32"
)

FIELDS = ("input_ids", "labels")
"""What MindSpeed-LLM reads of each answer of a pair."""


def replaced(text: str, folder: Path) -> Options:
    options = Options(text.split())
    replace_missing_instructions(options, folder, folder)
    return options


def rows(options: Options, *fields: str) -> list[tuple[np.ndarray, ...]]:
    prefix = options.text("--data-path")
    fields = fields or ("input_ids", "attention_mask", "labels")
    sets = [IndexedDataset(f"{prefix}_packed_{field}_document") for field in fields]
    return [tuple(dataset.get(at).copy() for dataset in sets) for at in range(len(sets[0]))]


def test_rows_are_shorter_than_the_sequence(tmp_path: Path) -> None:
    options = replaced(LAUNCH, tmp_path)
    samples = rows(options)
    assert len(samples) == 64
    assert len({len(tokens) for tokens, _, _ in samples}) > 1
    for tokens, mask, labels in samples:
        assert 16 <= len(tokens) == len(mask) == len(labels) < 32
        assert set(mask) == {1}
        assert list(labels[:4]) == [-100] * 4
        assert np.array_equal(labels[4:], tokens[4:])
    folder = Path(options.values("--tokenizer-name-or-path")[0])
    tokenizer, config = (json.loads(path.read_text("utf-8")) for path in sorted(folder.iterdir()))
    words = tokenizer["model"]["vocab"]
    assert [words[config[f"{name}_token"]] for name in ("pad", "eos", "unk")] == [0, 1, 2]
    used = {int(token) for tokens, _, _ in samples for token in tokens}
    assert used <= set(range(3, len(words)))
    # A chat template adds more tokens.
    assert len(words) < options.number("--padded-vocab-size", 0)
    assert any(line.startswith("--data-path d -> (dropped)") for line in options.changes)


def test_packed_rows_are_full_and_number_their_documents(tmp_path: Path) -> None:
    for tokens, mask, labels in rows(replaced(f"{LAUNCH} --neat-pack", tmp_path)):
        assert (len(tokens), set(mask)) == (32, {1, 2})
        assert (np.diff(mask) >= 0).all()
        for document in (1, 2):
            at = np.flatnonzero(mask == document)
            assert (labels[at[:4]] == -100).all()
            assert np.array_equal(labels[at[4:]], tokens[at[4:]])


def test_pairs_of_answers_share_their_prompt(tmp_path: Path) -> None:
    pairwise = LAUNCH.replace("--is-instruction-dataset", "--is-pairwise-dataset")
    names = [f"{answer}_{field}" for answer in ("chosen", "rejected") for field in FIELDS]
    for chosen, labels, rejected, others in rows(replaced(pairwise, tmp_path), *names):
        assert np.array_equal(chosen[:4], rejected[:4])
        for tokens, marked in ((chosen, labels), (rejected, others)):
            assert 12 <= len(tokens) == len(marked) < 32
            assert list(marked[:4]) == [-100] * 4
            assert np.array_equal(marked[4:], tokens[4:])


def test_files_that_are_here_and_pretraining_are_left(tmp_path: Path) -> None:
    pretraining = LAUNCH.replace("--is-instruction-dataset", "")
    assert replaced(pretraining, tmp_path).words == pretraining.split()
    for name in ("d_packed_labels_document.idx", "t"):
        (tmp_path / name).touch()
    assert replaced(LAUNCH, tmp_path).words == LAUNCH.split()
