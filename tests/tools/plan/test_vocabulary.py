"""The vocabulary of a launch that leaves it to its tokenizer."""

from pathlib import Path

import pytest

from commfuse_npu.tools.plan.asked_launch import ask_about
from tests.tools.plan.launches import MODEL


@pytest.mark.parametrize(
    ("folder", "options", "size", "note"),
    [
        ("llama2", "", 32000, "vocabulary 32,000, that of llama2"),
        ("llama31", "--load CHECKPOINT", 128256, "vocabulary 128,256, that of llama3"),
        ("x", "--load /models/Baichuan2-13B --tokenizer-type Llama2Tokenizer", 125696,
         "vocabulary 125,696, that of baichuan2"),
        # The tokenizer of the launch, not the model that it is named after.
        ("llama3", "--tokenizer-model /hf/llama-2-7b-hf/tokenizer.model", 32000,
         "vocabulary 32,000, that of llama2"),
        ("gpt", "--tokenizer-type GPT2BPETokenizer", 50257,
         "vocabulary 50,257, that of gpt2bpetokenizer"),
        ("x", "--tokenizer-type Llama2Tokenizer", 32000,
         "no --vocab-size: simulated with 32,000 tokens; for its own add --padded-vocab-size N to "
         "a copy of the launch"),
        ("llama3", "--padded-vocab-size 1024", 1024, ""),
    ],
)  # fmt: skip
def test_a_known_family_has_its_own_vocabulary(
    tmp_path: Path, folder: str, options: str, size: int, note: str
) -> None:
    script = tmp_path / folder / "pretrain.sh"
    script.parent.mkdir()
    script.write_text(f"torchrun --nproc_per_node 1 pretrain_gpt.py {MODEL} {options}", "utf-8")
    launch = ask_about(None, ["bash", str(script)], {})
    assert launch.config.vocab_size == size
    assert [line for line in launch.command.notes if "vocab" in line] == ([note] if note else [])
