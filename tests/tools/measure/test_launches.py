"""The command and the options of each form of a launch, and what its training leaves."""

import os
import sys
from pathlib import Path

import pytest

from commfuse_npu.tools.launch_script import UsageError, short_run
from commfuse_npu.tools.launch_script.option_words import Options
from commfuse_npu.tools.measure import measured_launches as module
from commfuse_npu.tools.measure.measured_launches import (
    FORMS,
    Launches,
    TrainingError,
    launches,
    train,
)
from tests.limits import LIMIT
from tests.processes import ended, wait_for

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of MindSpeed-LLM with the files that a launch reads."""
    (tmp_path / "pretrain_gpt.py").touch()
    monkeypatch.setenv("MINDSPEED_LLM_HOME", str(tmp_path))
    for name in ("DATA_PATH", "TOKENIZER_MODEL", "USE_COMMFUSE", "TP", "NPUS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def of(found: Launches, name: str) -> Options:
    """The options of a form."""
    words = list(found.commands[f"launch_{name}"])
    at = words.index("mindspeed_patches.measured") + 1
    return Options(words[at + 1 + (words[at] == "--blocking") :])


def test_forms_of_one_of_our_launch_scripts(checkout: Path) -> None:
    script = ROOT / "scripts" / "pretrain_llama3_8b_ptd.sh"
    words = f"{script} --mock-data --tokenizer-type NullTokenizer --commfuse-lanes 3"
    result = launches(words, 8)
    assert list(result.commands) == list(FORMS)
    assert result.folder == checkout
    assert str(ROOT) in result.environment["PYTHONPATH"]
    assert result.environment["HCCL_CONNECT_TIMEOUT"] == "3600"
    for name in FORMS:
        form = name.removeprefix("launch_")
        command, options = result.commands[name], of(result, form)
        assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
        assert ("--blocking" in command) == (form == "plain")
        expected = {"train-iters": "10", "num-layers": "32", "vocab-size": "128255"}
        for option, value in {**expected, "log-interval": "1"}.items():
            assert options.text(f"--{option}") == value
        assert "--log-throughput" in options
        assert ("--use-commfuse" in options) == (form == "commfuse")
        assert (options.text("--commfuse-lanes") == "3") == (form == "commfuse")
        assert ("--commfuse-overlap" in options) == (form == "fb_overlap")
    assert "--use-ascend-mc2" in of(result, "mc2")
    assert of(result, "coc").text("--coc-parallel-num") == "4"
    assert "--coc-fused-kernel" in of(result, "coc_kernel")
    assert of(result, "plain").words == of(result, "megatron").words


def test_flags_of_a_launch_are_not_those_of_a_form(checkout: Path) -> None:
    (checkout / "my.sh").write_text(
        "export PYTHONPATH=/mine:$PYTHONPATH\n"
        "torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers 2 --use-ascend-coc "
        "--coc-parallel-num 8 --save checkpoints --train-samples 9 --tokenizer-type "
        "NullTokenizer --vocab-size 5000 --mock-data --transformer-impl transformer_engine\n"
    )
    result = launches(f"{checkout / 'my.sh'}", 2)
    assert "--use-ascend-coc" not in of(result, "megatron")
    assert "--coc-parallel-num" not in of(result, "coc_kernel")
    assert of(result, "coc").text("--coc-parallel-num") == "4"
    assert "--save" not in of(result, "megatron")
    assert of(result, "commfuse").text("--transformer-impl") == "transformer_engine"
    assert result.environment["PYTHONPATH"].startswith(f"{ROOT}:/mine:")
    assert any(note.startswith("--save checkpoints -> (dropped)") for note in result.notes)
    with pytest.raises(UsageError, match="asks for 2 processes, and here"):
        launches(f"{checkout / 'my.sh'}", 1)


# ------------------------------------------------------------------- trainings


LINE = " iteration  1/ 10 | elapsed time per iteration (ms): 98.4 | lm loss: 5.5E+00 |"


@pytest.mark.parametrize(
    ("script", "limit", "said"),
    [
        (f"yes '{LINE}' | head -4; echo end", LIMIT, r"^4 of 10 iterations with a loss \(.*\nend$"),
        (
            "echo no library; exit 3",
            LIMIT,
            r"^exit code 3 \(.*/launch_megatron\.log\)\nno library$",
        ),
        ("sleep 600", 0.5, r"^did not end within 0 s; give more with --timeout \("),
    ],
)
def test_a_form_that_fails_says_why(script: str, limit: float, said: str, tmp_path: Path) -> None:
    launched = Launches({"launch_megatron": ["bash", "-c", script]}, tmp_path, os.environ)
    with pytest.raises(TrainingError, match=f"(?s){said}"):
        train("launch_megatron", launched, tmp_path, limit)


def test_what_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where /proc shows no process."""
    monkeypatch.setattr(short_run, "_GRACE", 0.1)
    monkeypatch.setattr(short_run, "_marked", lambda mark: [])
    words = ["bash", "-c", "trap '' TERM; sleep 600 & echo $! > pid; wait"]
    options = {"folder": tmp_path, "environment": os.environ, "log": tmp_path / "log"}
    with pytest.raises(TimeoutError, match="did not end within 0 s"):
        short_run.run_bounded(words, **options, seconds=0.5)
    wait_for(lambda: ended(int((tmp_path / "pid").read_text())))


def test_what_a_launch_leaves_behind_is_ended(tmp_path: Path) -> None:
    """A rank in its own session, as torchrun starts them, whose launcher has exited."""
    words = ["bash", "-c", "setsid sleep 600 & echo $! > pid; exit 3"]
    options = {"folder": tmp_path, "environment": os.environ, "log": tmp_path / "log"}
    assert short_run.run_bounded(words, **options, seconds=LIMIT) == 3
    wait_for(lambda: ended(int((tmp_path / "pid").read_text())))


def test_logs_of_mindspeed_llm(tmp_path: Path, monkeypatch) -> None:
    (log := tmp_path / "log").write_text(
        " [2026-11-22 22:41:45] iteration        1/      10 | elapsed time per iteration (ms): "
        "5578.3 | throughput per GPU (TFLOP/s/GPU): 17.5 | lm loss: 8.317678E+00 | grad norm: 0.5 |"
        "\nmost memory taken of a device (MB): 20000.5\n"
        " iteration        2/      10 | consumed samples:            4 | elapsed time per "
        "iteration (ms): 98.4 | lm loss: 5.545177E+00 | loss scale: 1.0 | grad norm: 2.310 |\n"
        " validation loss at iteration 1 | lm loss value: 5.000000E+00 |\n"
        f"sha256 of all weights: {'a' * 64}\n"
    )
    monkeypatch.setattr(module, "ITERATIONS", 2)
    launched = Launches({"launch_megatron": ["cat", str(log)]}, tmp_path, os.environ)
    times = [5578.3, 98.4]
    expected = {"losses": [8.317678, 5.545177], "milliseconds": times, "peak": 20000.5}
    assert train("launch_megatron", launched, tmp_path, LIMIT) == {**expected, "weights": "a" * 64}
