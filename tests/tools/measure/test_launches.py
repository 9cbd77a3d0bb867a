"""The command and the options with which each form of a launch is started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.launch_script.options import Options
from commfuse_npu.tools.measure.launches import FORMS, Launches, launches

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of MindSpeed-LLM with the files that a launch reads."""
    (tmp_path / "pretrain_gpt.py").touch()
    monkeypatch.setenv("MINDSPEED_LLM_HOME", str(tmp_path))
    for name in ("DATA_PATH", "TOKENIZER_MODEL", "USE_COMMFUSE", "TP", "NPUS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def of(found: Launches, form: str) -> Options:
    """The options of a form."""
    words = list(found.commands[form])
    at = words.index("mindspeed_patches.measured") + 1
    return Options(words[at + 1 + (words[at] == "--blocking") :])


def test_forms_of_one_of_our_launch_scripts(checkout: Path, tmp_path: Path) -> None:
    script = ROOT / "scripts" / "pretrain_llama3_8b_ptd.sh"
    words = f"{script} --mock-data --tokenizer-type NullTokenizer --commfuse-lanes 3"
    result = launches(words, "npu", 8, tmp_path)
    assert [form.name for form in result.forms] == [form.name for form in FORMS]
    assert result.folder == checkout
    assert str(ROOT) in result.environment["PYTHONPATH"]
    assert result.environment["HCCL_CONNECT_TIMEOUT"] == "3600"
    for form in FORMS:
        command, options = result.commands[form.name], of(result, form.name)
        assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
        assert ("--blocking" in command) == (form.name == "plain")
        expected = {"train-iters": "10", "num-layers": "32", "vocab-size": "128255"}
        for name, value in {**expected, "log-interval": "1"}.items():
            assert options.text(f"--{name}") == value
        assert "--log-throughput" in options
        assert ("--use-commfuse" in options) == (form.name == "commfuse")
        assert (options.text("--commfuse-lanes") == "3") == (form.name == "commfuse")
        assert ("--commfuse-fb-overlap" in options) == (form.name == "fb_overlap")
    assert "--use-ascend-mc2" in of(result, "mc2")
    assert of(result, "coc").text("--coc-parallel-num") == "4"
    assert "--coc-fused-kernel" in of(result, "coc_kernel")
    assert of(result, "plain").words == of(result, "megatron").words


def test_flags_of_a_launch_are_not_those_of_a_form(checkout: Path, tmp_path: Path) -> None:
    (checkout / "my.sh").write_text(
        "export PYTHONPATH=/mine:$PYTHONPATH\n"
        "torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers 2 --use-ascend-coc "
        "--coc-parallel-num 8 --save checkpoints --train-samples 9 --tokenizer-type "
        "NullTokenizer --vocab-size 5000 --mock-data --transformer-impl transformer_engine\n"
    )
    result = launches(f"{checkout / 'my.sh'}", "npu", 2, tmp_path)
    assert "--use-ascend-coc" not in of(result, "megatron")
    assert "--coc-parallel-num" not in of(result, "coc_kernel")
    assert of(result, "coc").text("--coc-parallel-num") == "4"
    assert "--save" not in of(result, "megatron")
    assert of(result, "commfuse").text("--transformer-impl") == "transformer_engine"
    assert result.environment["PYTHONPATH"].startswith(f"{ROOT}:/mine:")
    assert any(note.startswith("--save checkpoints -> (dropped)") for note in result.notes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("torchrun --nproc_per_node 16 pretrain_gpt.py --bf16", "asks for 16 processes, and here"),
        ("sleep 5", "none that can be read"),
        ("'my.sh", "No closing quotation; quote it as for a shell"),
    ],
)
def test_what_is_no_launch_is_refused(checkout: Path, tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        launches(text, "npu", 8, tmp_path)


def test_forms_of_the_cpu_pretraining(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "pretrain_llama_cpu.sh"
    result = launches(f"{script} --num-layers 2", "cpu", 2, tmp_path)
    assert [form.name for form in result.forms] == ["megatron", "fb_overlap", "commfuse", "plain"]
    for name, command in result.commands.items():
        assert command[:4] == ["bash", str(script), "--num-layers", "2"]
        options = Options(command[2:])
        assert options.text("--train-iters") == "10"
        assert options.text("--output") == str(tmp_path)
        assert ("--plain" in options) == (name == "plain")
        assert ("--no-use-commfuse" in options) == (name in ("megatron", "fb_overlap"))
