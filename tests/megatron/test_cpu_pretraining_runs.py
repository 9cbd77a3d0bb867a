"""Real trainings with the real Megatron-Core, gloo and one process per rank, at toy size."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu.proof.verify_log import files_of, verify_logs
from scripts.free_port import free_port

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 120
TINY = (
    "--fp32 --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 "
    "--num-query-groups 2 --seq-length 32 --micro-batch-size 2 --global-batch-size 8 "
    "--train-iters 6 --lr-warmup-iters 1 --eval-interval 3 --eval-iters 1 --save-interval 3 "
    "--distributed-timeout-minutes 2"
)
LINE = re.compile(
    r" iteration +(\d+)/ +6 \| consumed samples: +\d+ \| elapsed time per iteration \(ms\): [\d.]+ "
    r"\| throughput per GPU \(TFLOP/s/GPU\): [\d.]+ \| learning rate: \S+ \| "
    r"global batch size: +8 \| lm loss: (\S+) \| loss scale: 1.0 \| grad norm: [\d.]+ \| "
    r"number of skipped iterations: +0 \| number of nan iterations: +0 \| tokens/s: \d+ \| "
    r"exposed communication \(ms\): [\d.]+ \|"
)


def environment() -> dict[str, str]:
    # One thread per rank, whatever the machine, so that ranks do not fight over the cores.
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def command(processes: int, *argv: str) -> list[str]:
    launcher = ["torch.distributed.run", "--nproc_per_node", str(processes)]
    launcher += ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    return [sys.executable, "-m", *launcher, "-m", "scripts.cpu_pretraining", *TINY.split(), *argv]


def run(processes: int, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(processes, *argv),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def run_alone(*argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Without torchrun: a world of one, or one rank of a world that never comes together."""
    return subprocess.run(
        [sys.executable, "-m", "scripts.cpu_pretraining", *TINY.split(), *argv],
        cwd=ROOT,
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [entry["lm_loss"] for entry in metrics(folder) if "lm_loss" in entry]


def weights_hash(output: str) -> str:
    found = re.search(r"^sha256 of all weights: (\w{64})$", output, re.MULTILINE)
    assert found, output
    return found.group(1)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder and output of six iterations on two tensor-parallel ranks."""
    runs = tmp_path_factory.mktemp("uninterrupted")
    done = run(2, "--runs-dir", str(runs))
    assert done.returncode == 0, done.stdout + done.stderr
    return runs / "llama_tiny", done.stdout


def test_run_prints_a_line_per_iteration(uninterrupted: tuple[Path, str]) -> None:
    folder, output = uninterrupted
    lines = [LINE.match(line) for line in output.splitlines() if line.startswith(" iteration")]
    assert [int(line.group(1)) for line in lines if line] == [1, 2, 3, 4, 5, 6]
    assert losses(folder)[-1] < losses(folder)[0]
    assert "validation loss at iteration 3 " in output
    assert "validation loss at iteration 6 " in output


def test_run_leaves_metrics_picture_and_checkpoints(uninterrupted: tuple[Path, str]) -> None:
    folder, _ = uninterrupted
    entries = metrics(folder)
    expected = {"iteration", "lm_loss", "elapsed_ms", "tokens_per_second", "exposed_ms"}
    assert {*expected, "grad_norm", "lr"} == set(entries[0])
    assert [entry["iteration"] for entry in entries if "validation_loss" in entry] == [3, 6]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    checkpoints = folder / "checkpoints"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "6\n"
    for rank in range(2):
        assert (checkpoints / f"iter_0000006/mp_rank_{rank:02d}_000/model_optim.pt").is_file()


def test_resume_after_a_kill_equals_the_uninterrupted_run(
    uninterrupted: tuple[Path, str], tmp_path: Path
) -> None:
    """As if killed while writing the checkpoint of iteration 6, metrics line half written."""
    folder, output = uninterrupted
    killed = tmp_path / "llama_tiny"
    shutil.copytree(folder, killed)
    checkpoints = killed / "checkpoints"
    (checkpoints / "iter_0000006").rename(checkpoints / ".iter_0000006.partial")
    (checkpoints / ".iter_0000006.partial/mp_rank_01_000/model_optim.pt").write_bytes(b"cut off")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("3\n")
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 7, "lm_')

    done = run(2, "--runs-dir", str(tmp_path), "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming from" in done.stdout
    assert " iteration        3/" not in done.stdout
    assert " iteration        4/" in done.stdout
    assert losses(killed) == losses(folder)
    assert weights_hash(done.stdout) == weights_hash(output)
    validations = [[e for e in metrics(f) if "validation_loss" in e] for f in (killed, folder)]
    assert validations[0] == validations[1]
    assert not list(checkpoints.glob(".*"))


def test_two_iterations_are_traced(tmp_path: Path) -> None:
    file = tmp_path / "traces" / "real.json"
    done = run(2, "--runs-dir", str(tmp_path), "--use-commfuse", "--trace", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    events = json.loads(file.read_text())["traceEvents"]
    assert f"trace: {sum(e['ph'] == 'X' for e in events)} events in {file}" in done.stdout
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["rank 0, measured", "rank 1, measured"]
    work = [e for e in events if e["ph"] == "X" and e["tid"] == 0]
    for operation, layers in (("all_gather_linear", 5), ("linear_reduce_scatter", 4)):
        pieces = [e for e in work if e["cat"] == operation]
        # 2 ranks, 2 iterations of 4 micro-batches, the own block and the other one.
        assert len(pieces) == 2 * 2 * 4 * layers * 2
    # Watching changes nothing.
    plain = run(2, "--runs-dir", str(tmp_path), "--name", "fused", "--use-commfuse")
    assert weights_hash(done.stdout) == weights_hash(plain.stdout)


def test_a_trace_that_cannot_be_written_does_not_end_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    file = tmp_path / "file" / "real.json"
    done = run(2, "--runs-dir", str(tmp_path), "--use-commfuse", "--trace", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"trace: cannot write {file}" in done.stdout
    assert weights_hash(done.stdout)


def test_resume_refuses_another_shape(uninterrupted: tuple[Path, str]) -> None:
    # As rank 0 of two: the refusal comes before the ranks meet, so the other one is not needed.
    folder, _ = uninterrupted
    done = run_alone(
        "--runs-dir", str(folder.parent), "--resume", "--num-layers", "3", RANK="0", WORLD_SIZE="2"
    )
    assert done.returncode == 2
    assert "written with num_layers 2, but this run has 3" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("processes", "tp", "dp"), [(1, 1, 1), (2, 1, 2)], ids=["one rank", "two replicas"]
)
def test_layouts_agree(
    uninterrupted: tuple[Path, str], tmp_path: Path, processes: int, tp: int, dp: int
) -> None:
    # Vocabulary padded to 512 in all layouts: the padding takes part in the softmax.
    done = run(
        processes,
        *f"--runs-dir {tmp_path} --tensor-model-parallel-size {tp} --data-parallel-size {dp} "
        "--make-vocab-size-divisible-by 256".split(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    expected = losses(uninterrupted[0])
    actual = losses(tmp_path / "llama_tiny")
    assert actual[0] == pytest.approx(expected[0], rel=1e-4)
    assert actual == pytest.approx(expected, rel=1e-3)


def test_bf16_recompute_and_distributed_optimizer(tmp_path: Path) -> None:
    """Two replicas with sharded optimizer state, saved and resumed after three iterations."""
    argv = (
        f"--runs-dir {tmp_path} --bf16 --recompute --use-distributed-optimizer "
        "--tensor-model-parallel-size 1 --data-parallel-size 2"
    ).split()
    done = run(2, *argv)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "llama_tiny"
    whole = losses(folder)
    assert whole[-1] < whole[0]
    shutil.rmtree(folder / "checkpoints/iter_0000006")
    resumed = run(2, *argv, "--resume")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert losses(folder) == whole
    assert weights_hash(resumed.stdout) == weights_hash(done.stdout)


def wait_for_line(process: subprocess.Popen[str], text: str) -> Iterator[str]:
    assert process.stdout is not None
    deadline = time.monotonic() + TIMEOUT
    for line in process.stdout:
        yield line
        if text in line or time.monotonic() > deadline:
            return


def interrupt(argv: list[str], number: signal.Signals) -> tuple[int, str]:
    """Start, wait for the second iteration, send the signal; returns exit code and output."""
    with subprocess.Popen(
        argv,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output = "".join(wait_for_line(process, " iteration        2/"))
            process.send_signal(number)
            rest, _ = process.communicate(timeout=TIMEOUT)
        except BaseException:
            process.kill()
            raise
    return process.returncode, output + rest


def test_sigterm_leaves_a_resumable_checkpoint(tmp_path: Path) -> None:
    argv = command(2, "--runs-dir", str(tmp_path), "--train-iters", "100000")
    _, output = interrupt([*argv, "--save-interval", "0", "--eval-interval", "0"], signal.SIGTERM)
    stopped = re.search(r"stopped by signal 15 after iteration (\d+)", output)
    assert stopped, output
    checkpoints = tmp_path / "llama_tiny/checkpoints"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text().strip() == stopped[1]
    folder = checkpoints / f"iter_{int(stopped[1]):07d}"
    assert len(list(folder.glob("mp_rank_*/model_optim.pt"))) == 2


def test_ctrl_c_saves_and_answers_130(tmp_path: Path) -> None:
    argv = f"--runs-dir {tmp_path} --tensor-model-parallel-size 1 --save-interval 0".split()
    whole = ["--train-iters", "100000", "--eval-interval", "0"]
    alone = [sys.executable, "-m", "scripts.cpu_pretraining", *TINY.split(), *argv, *whole]
    code, output = interrupt(alone, signal.SIGINT)
    assert code == 130, output
    assert "give the same command with --resume to go on" in output
    assert "Traceback" not in output
    reached = len(losses(tmp_path / "llama_tiny"))
    done = run_alone(*argv, *whole, "--resume", "--train-iters", str(reached + 2))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(losses(tmp_path / "llama_tiny")) == reached + 2
    assert "note: train_iters differs from the checkpoint's" in done.stdout


def test_wrong_request_is_answered_once_by_rank_0() -> None:
    done = run(2, "--seq-length", "33")
    assert done.returncode != 0
    message = "sequence length 33 is not divisible by the tensor-parallel size 2"
    assert done.stderr.count(message) == 1
    alone = run_alone("--seq-length", "33")
    assert alone.returncode == 2
    assert "Traceback" not in alone.stderr
    assert "1 processes were started" in alone.stderr


def test_a_full_disk_leaves_the_checkpoint_before(small_disk: Callable[[int], Path]) -> None:
    """Room for one checkpoint and a half."""
    runs = small_disk(440)
    argv = f"--tensor-model-parallel-size 1 --runs-dir {shlex.quote(str(runs))}"
    done = run_alone(*shlex.split(argv), "--hidden-size", "16")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "could not write " in done.stderr
    assert "the previous checkpoint is untouched" in done.stderr
    assert "Traceback" not in done.stderr
    checkpoints = runs / "llama_tiny/checkpoints"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "3\n"
    assert not (checkpoints / "iter_0000006").exists()
    shutil.rmtree(checkpoints / ".iter_0000006.partial")
    resumed = run_alone(
        *shlex.split(argv), *(["--hidden-size", "16", "--resume", "--save-interval", "0"])
    )
    assert "resuming from" in resumed.stdout
    assert " iteration        6/" in resumed.stdout


def test_unusable_runs_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run_alone(
        "--runs-dir", str(tmp_path / "file"), "--tensor-model-parallel-size", "1", RANK="0"
    )
    assert done.returncode == 2
    assert "for this run: Not a directory; choose another --runs-dir" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_order_of_transfers_is_recorded_and_proved(tmp_path: Path) -> None:
    log = tmp_path / "order log"
    done = run(
        2,
        *("--runs-dir", str(tmp_path), "--commfuse-order-log", str(log), "--train-iters", "3"),
        *("--commfuse-chunks", "2"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = verify_logs(files_of([log]))
    assert (found.faults, found.notes) == ([], [])
    assert found.ranks == 2
    assert found.operations > 100


def test_an_order_log_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run_alone(
        *("--runs-dir", str(tmp_path / "runs"), "--tensor-model-parallel-size", "1"),
        *("--commfuse-order-log", str(tmp_path / "file" / "log")),
    )
    assert done.returncode == 2
    assert "of the log: Not a directory; choose another --commfuse-order-log" in done.stderr
    assert "Traceback" not in done.stderr


def test_compare_plain_and_fused(tmp_path: Path) -> None:
    done = run(2, "--runs-dir", str(tmp_path), "--compare", "--train-iters", "3", "--bf16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "identical: True"
    hashes = dict(re.findall(r"sha256 of all weights, (\w+): (\w{64})", done.stdout))
    assert set(hashes) == {"plain", "commfuse", "megatron"}
    assert hashes["plain"] == hashes["commfuse"]
    # Without this the comparison could pass because nothing was fused.
    fused = re.findall(r"commfuse: +(\w+): [1-9]\d* forward calls fused", done.stdout)
    assert set(fused) == {"qkv", "proj", "fc1", "fc2", "output"}
    assert losses(tmp_path / "llama_tiny/compare/plain") == losses(
        tmp_path / "llama_tiny/compare/commfuse"
    )
