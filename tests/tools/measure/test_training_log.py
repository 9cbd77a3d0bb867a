"""What is read of a training's lines, and what is made of it for MindSpeed-LLM's system tests."""

from __future__ import annotations

from commfuse_npu.tools.measure.training_log import BASELINE, TrainingLog, read_log

MINDSPEED_LLM = """\
time to initialize megatron (seconds): 5.178
 [2026-11-22 22:41:45] iteration        1/      10 | consumed samples:            8 | elapsed \
time per iteration (ms): 5578.3 | throughput per GPU (TFLOP/s/GPU): 17.5 | core attn ratio (%): \
50.0 | learning rate: 1.000000E-08 | global batch size:     8 | lm loss: 8.317678E+00 | loss \
scale: 1.0 | grad norm: 0.526 | num zeros: 0 | number of skipped iterations:   0 | number of nan \
iterations:   0 |
[Rank 1] (after 1 iterations) memory (MB) | allocated: 10350.45 | max allocated: 10366.5 | \
reserved: 1.0 | max reserved: 2.0
[Rank 0] (after 1 iterations) memory (MB) | allocated: 10350.0 | max allocated: 10370.0 | \
reserved: 1.0 | max reserved: 2.0
 [2026-11-22 22:41:46] iteration        2/      10 | consumed samples:           16 | elapsed \
time per iteration (ms): 473.9 | throughput per GPU (TFLOP/s/GPU): 206.0 | core attn ratio (%): \
50.0 | learning rate: 1.000000E-08 | global batch size:     8 | lm loss: 8.217678E+00 | loss \
scale: 1.0 | grad norm: 0.525 | num zeros: 0 | number of skipped iterations:   0 | number of nan \
iterations:   0 |
most memory taken of a device (MB): 20000.5
"""
CPU_PRETRAINING = f"""\
data: the Python standard library, 457 documents, 8042781 tokens to train, 378576 held out
 iteration        1/      10 | consumed samples:            4 | elapsed time per iteration (ms): \
98.4 | throughput per GPU (TFLOP/s/GPU): 0.003 | learning rate: 2.000000E-03 | global batch size: \
    4 | lm loss: 5.545177E+00 | loss scale: 1.0 | grad norm: 2.310 | number of skipped iterations: \
  0 | number of nan iterations:   0 | tokens/s: 5203 | exposed communication (ms): 31.2 |
 validation loss at iteration 1 | lm loss value: 5.000000E+00 | lm loss PPL: 1.000000E+02 |
sha256 of all weights: {"ab" * 32}
"""


def test_a_log_of_mindspeed_llm() -> None:
    log = read_log(MINDSPEED_LLM)
    assert log.losses == [8.317678, 8.217678]
    assert log.grad_norms == [0.526, 0.525]
    assert log.milliseconds == [5578.3, 473.9]
    assert log.teraflops == [17.5, 206.0]
    assert log.megabytes == [(0, 10350.0, 10370.0), (1, 10350.45, 10366.5)]
    assert log.peak == 20000.5
    assert log.weights is None


def test_a_log_of_the_cpu_pretraining() -> None:
    log = read_log(CPU_PRETRAINING)
    assert (log.losses, log.grad_norms, log.milliseconds) == ([5.545177], [2.31], [98.4])
    assert log.weights == "ab" * 32
    assert log.megabytes == []


def test_a_loss_that_is_no_number_is_missing() -> None:
    log = read_log(MINDSPEED_LLM.replace(" lm loss: 8.217678E+00 |", ""))
    assert len(log.milliseconds) == 2
    assert log.losses == [8.317678]


def test_a_log_is_kept_and_found_again() -> None:
    log = read_log(MINDSPEED_LLM)
    assert TrainingLog(**log.as_json()) == log


def test_a_baseline_is_in_mindspeed_llms_form() -> None:
    baseline = read_log(MINDSPEED_LLM).baseline()
    assert tuple(baseline) == BASELINE
    assert baseline["lm loss"] == [8.317678, 8.217678]
    assert baseline["grad norm"] == [0.526, 0.525]
    assert baseline["time info"] == [5578.3, 473.9]
    assert baseline["memo info"][1] == {
        "rank": 1,
        "allocated memory": 10350.45,
        "max allocated memory": 10366.5,
        "format": "megatron",
    }
