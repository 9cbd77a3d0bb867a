"""Real trainings with the real Megatron-Core and gloo, at toy size: what they print and leave."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu.proof.verify_log import files_of, verify_logs
from scripts.cpu_pretraining import __main__ as command
from scripts.cpu_pretraining import usage_error
from tests.megatron.in_ranks import TINY, Finished, losses, pretrained, pretraining, recorded

LINE = re.compile(
    r" iteration +(\d+)/ +6 \| consumed samples: +\d+ \| elapsed time per iteration \(ms\): [\d.]+ "
    r"\| throughput per GPU \(TFLOP/s/GPU\): [\d.]+ \| learning rate: \S+ \| "
    r"global batch size: +8 \| lm loss: (\S+) \| loss scale: 1.0 \| grad norm: [\d.]+ \| "
    r"number of skipped iterations: +0 \| number of nan iterations: +0 \| tokens/s: \d+ \| "
    r"exposed communication \(ms\): [\d.]+ \|"
)
SHORT = re.compile(
    r" iteration +(\d+)/ +6 \| lm loss [\d.]+ \| grad norm [\d.]+ \| lr \S+ \| "
    r"\d+ ms, \d+ exposed \| [\d,]+ tokens/s$"
)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def uninterrupted(ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """Folder and end of six iterations on two tensor-parallel ranks."""
    runs = tmp_path_factory.mktemp("uninterrupted")
    return runs / "llama_tiny", pretrained(ranks(2), runs, "--mindspeed-log")


def test_run_prints_a_line_per_iteration(uninterrupted: tuple[Path, Finished]) -> None:
    folder, done = uninterrupted
    assert done.out.splitlines()[-1] == (
        f"written: {folder}/metrics.jsonl, {folder}/loss.png, {folder}/checkpoints"
    )
    lines = [LINE.match(line) for line in done.out.splitlines() if line.startswith(" iteration")]
    assert [int(line.group(1)) for line in lines if line] == [1, 2, 3, 4, 5, 6]
    assert losses(folder)[-1] < losses(folder)[0]
    assert "validation loss at iteration 3 " in done.out
    assert "validation loss at iteration 6 " in done.out


def test_run_leaves_metrics_picture_and_checkpoints(uninterrupted: tuple[Path, Finished]) -> None:
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
    ranks, uninterrupted: tuple[Path, Finished], tmp_path: Path
) -> None:
    """As if killed while writing the checkpoint of iteration 6, metrics line half written."""
    folder, whole = uninterrupted
    killed = tmp_path / "llama_tiny"
    shutil.copytree(folder, killed)
    checkpoints = killed / "checkpoints"
    (checkpoints / "iter_0000006").rename(checkpoints / ".iter_0000006.partial")
    (checkpoints / ".iter_0000006.partial/mp_rank_01_000/model_optim.pt").write_bytes(b"cut off")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("3\n")
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 7, "lm_')

    done = pretrained(ranks(2), tmp_path, "--resume")
    assert "resuming from" in done.out
    assert " iteration        3/" not in done.out
    assert " iteration        4/" in done.out
    assert losses(killed) == losses(folder)
    assert done.weights == whole.weights
    validations = [[e for e in metrics(f) if "validation_loss" in e] for f in (killed, folder)]
    assert validations[0] == validations[1]
    assert not list(checkpoints.glob(".*"))


def test_two_iterations_are_traced(
    ranks, uninterrupted: tuple[Path, Finished], tmp_path: Path
) -> None:
    file = tmp_path / "traces" / "real.json"
    done = pretrained(ranks(2), tmp_path, "--trace", str(file))
    short = [SHORT.match(line) for line in done.out.splitlines() if line.startswith(" iteration")]
    assert [int(line.group(1)) for line in short if line] == [1, 2, 3, 4, 5, 6]
    events = json.loads(file.read_text())["traceEvents"]
    assert f"trace: {sum(e['ph'] == 'X' for e in events)} events in {file}" in done.out
    said = {(e["args"]["iteration"], e["args"].get("layer"), e["name"]) for e in events
            if e["ph"] == "X"}  # fmt: skip
    assert {iteration for iteration, _, _ in said} == {2, 3}
    for layer in (1, 2):
        assert {(2, layer, "fc2 dgrad, own block"), (3, layer, "qkv GEMM, own block"),
                (3, layer, "qkv wgrad")} <= said  # fmt: skip
    assert (2, None, "output wgrad") in said
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["rank 0, measured", "rank 1, measured"]
    work = [e for e in events if e["ph"] == "X" and e["tid"] == 0]
    for operation, layers in (("all_gather_linear", 5), ("linear_reduce_scatter", 4)):
        mine = [e for e in work if e["cat"] == operation]
        pieces = [e for e in mine if " = gemm(" in e["args"]["instruction"]]
        # 2 ranks, 2 iterations of 4 micro-batches, the own block and the other one.
        assert len(pieces) == 2 * 2 * 4 * layers * 2
    # Watching changes nothing.
    assert done.weights == uninterrupted[1].weights


def test_a_trace_that_cannot_be_written_does_not_end_the_training(ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    file = tmp_path / "file" / "real.json"
    done = pretrained(ranks(2), tmp_path, "--trace", str(file), "--train-iters", "3")
    assert f"trace: cannot write {file}" in done.out
    assert done.weights


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (1, 2)], ids=["one rank", "two replicas"])
def test_layouts_agree(
    ranks, uninterrupted: tuple[Path, Finished], tmp_path: Path, tp: int, dp: int
) -> None:
    # Vocabulary padded to 512 in all layouts: the padding takes part in the softmax.
    layout = f"--tensor-model-parallel-size {tp} --data-parallel-size {dp}"
    pretrained(ranks(tp * dp), tmp_path, *layout.split(), "--make-vocab-size-divisible-by", "256")
    expected, actual = losses(uninterrupted[0]), losses(tmp_path / "llama_tiny")
    assert actual[0] == pytest.approx(expected[0], rel=1e-4)
    assert actual == pytest.approx(expected, rel=1e-3)


def test_bf16_recompute_and_distributed_optimizer(ranks, tmp_path: Path) -> None:
    """Two replicas with sharded optimizer state, saved and resumed after three iterations."""
    layout = "--tensor-model-parallel-size 1 --data-parallel-size 2"
    options = f"--bf16 --recompute --use-distributed-optimizer {layout}".split()
    done = pretrained(ranks(2), tmp_path, *options)
    folder = tmp_path / "llama_tiny"
    whole = losses(folder)
    assert whole[-1] < whole[0]
    shutil.rmtree(folder / "checkpoints/iter_0000006")
    resumed = pretrained(ranks(2), tmp_path, *options, "--resume")
    assert losses(folder) == whole
    assert resumed.weights == done.weights


def signalled(rank: int, port: int, argv: list[str], number: int = signal.SIGTERM) -> Finished:
    """The last rank alone gets a signal, in the second iteration."""
    import torch.distributed as dist

    from scripts.cpu_pretraining import training

    begin = training._Loop._iteration

    def iteration(loop: Any, stop: Any) -> Any:
        if loop.iteration == 1 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), number)
        return begin(loop, stop)

    with mock.patch.object(training._Loop, "_iteration", iteration):
        return pretraining(rank, port, argv)


def interrupted(rank: int, port: int, argv: list[str]) -> Finished:
    return signalled(rank, port, argv, signal.SIGINT)


@pytest.mark.parametrize(
    ("work", "size", "code"),
    [(signalled, 2, 143), (interrupted, 1, 130)],
    ids=["SIGTERM", "Ctrl-C"],
)
def test_a_signal_to_one_rank_ends_all_with_a_checkpoint(
    ranks, tmp_path: Path, work: Callable[..., Finished], size: int, code: int
) -> None:
    options = ("--tensor-model-parallel-size", str(size), "--save-interval", "0")
    stopped = pretrained(ranks(size), tmp_path, *options, code=code, work=work)
    assert f"stopped by signal {code - 128} after iteration 2; give the same" in stopped.out
    checkpoints = tmp_path / "llama_tiny/checkpoints"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "2\n"
    assert len(list(checkpoints.glob("iter_0000002/mp_rank_*/model_optim.pt"))) == size
    done = pretrained(ranks(size), tmp_path, *options, "--resume", "--train-iters", "4")
    assert len(losses(tmp_path / "llama_tiny")) == 4
    assert "note: train_iters differs from the checkpoint's" in done.out


def refused(*options: str) -> int:
    """The exit code of a request that is wrong, which shows before ranks meet."""
    with pytest.raises(SystemExit) as ended:
        command.main([*TINY.split(), *options])
    return int(ended.value.code or 0)


def test_resume_refuses_another_shape(
    uninterrupted: tuple[Path, Finished], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    folder = uninterrupted[0].parent
    assert refused("--runs-dir", str(folder), "--resume", "--num-layers", "3") == 2
    assert "written with num_layers 2, but this run has 3" in capsys.readouterr().err


def test_wrong_request_is_answered_once_by_rank_0(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert refused("--seq-length", "33") == 2
    assert "1 processes were started" in capsys.readouterr().err
    # Another rank leaves rank 0 the time to say it.
    slept: list[float] = []
    monkeypatch.setattr(usage_error.time, "sleep", slept.append)
    monkeypatch.setenv("RANK", "1")
    assert refused("--seq-length", "33") == 2
    assert (capsys.readouterr().err, slept) == ("", [usage_error.GRACE_SECONDS])


@pytest.mark.parametrize("option", ["--runs-dir", "--commfuse-order-log"])
def test_unusable_folders_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert refused("--tensor-model-parallel-size", "1", option, str(tmp_path / "file/folder")) == 2
    assert f": Not a directory; choose another {option}" in capsys.readouterr().err


def test_a_full_disk_leaves_the_checkpoint_before(ranks, small_disk: Callable[[int], Path]) -> None:
    """Room for one checkpoint and a half."""
    runs = small_disk(440)
    options = ("--tensor-model-parallel-size", "1", "--hidden-size", "16")
    done = pretrained(ranks(1), runs, *options, code=1)
    assert "could not write " in done.err
    assert "the previous checkpoint is untouched" in done.err
    checkpoints = runs / "llama_tiny/checkpoints"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "3\n"
    assert not (checkpoints / "iter_0000006").exists()
    shutil.rmtree(checkpoints / ".iter_0000006.partial")
    resumed = pretrained(ranks(1), runs, *options, "--resume", "--save-interval", "0", code=1)
    assert "resuming from" in resumed.out
    assert " iteration        6/" in resumed.out


def test_the_order_of_transfers_is_recorded_and_proved(ranks, tmp_path: Path) -> None:
    log = tmp_path / "order log"
    options = ("--commfuse-order-log", str(log), "--train-iters", "3", "--commfuse-chunks", "2")
    pretrained(ranks(2), tmp_path, *options, work=recorded)
    found = verify_logs(files_of([log]))
    assert (found.faults, found.notes) == ([], [])
    assert found.ranks == 2
    assert found.operations > 100


@pytest.mark.parametrize("dtype", ["--fp32", pytest.param("--bf16", marks=pytest.mark.long)])
def test_compare_plain_and_fused(ranks, tmp_path: Path, dtype: str) -> None:
    done = pretrained(ranks(2), tmp_path, "--compare", "--train-iters", "3", dtype)
    assert done.out.splitlines()[-1] == "identical: True"
    hashes = dict(re.findall(r"sha256 of all weights, (\w+): (\w{64})", done.out))
    assert set(hashes) == {"plain", "commfuse", "megatron"}
    assert hashes["plain"] == hashes["commfuse"]
    # Without this the comparison could pass because nothing was fused.
    fused = re.findall(r"commfuse: +(\w+): [1-9]\d* forward calls fused", done.out)
    assert set(fused) == {"qkv", "proj", "fc1", "fc2", "output"}
    folder = tmp_path / "llama_tiny/compare"
    assert losses(folder / "plain") == losses(folder / "commfuse")
