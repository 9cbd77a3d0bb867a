"""``measure --launch`` with the real MindSpeed-LLM on CPU: every form starts, or says why not."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from mindspeed_patches.rehearsal.run import find_stack, worker_environment
from tests.mindspeed.test_rehearsals import (
    ENVIRONMENT,
    LOCAL,
    MODEL,
    PLAIN_WGRAD,
    ROOT,
    SKIPPED,
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(SKIPPED is not None, reason=str(SKIPPED)),
    pytest.mark.timeout(1500),
]

STAND_INS = """
import os

if "LOCAL_RANK" in os.environ:  # a rank of torchrun
    from mindspeed_patches.rehearsal.rehearsed_rank import install_stand_ins

    install_stand_ins()
"""
"""The stand-ins for an NPU that a rehearsal's ranks install."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a measurement, and what it printed."""
    folder = tmp_path_factory.mktemp("measured")
    (folder / "sitecustomize.py").write_text(STAND_INS)
    *_, megatron = stack = find_stack()
    environment = worker_environment(stack, {}, folder / "tools")
    environment["LD_LIBRARY_PATH"] = str(ENVIRONMENT / "cann")
    environment["PYTHONPATH"] = f"{folder}{os.pathsep}{environment['PYTHONPATH']}"
    # Megatron's ranks compile its helpers with what python3 prints: not one with stand-ins.
    helpers = ["make", "-C", str(megatron / "megatron" / "core" / "datasets")]
    path = f"{ENVIRONMENT / 'bin'}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(helpers, env={**os.environ, "PATH": path}, capture_output=True, check=True)
    script = folder / "launch.sh"
    script.write_text(
        f"torchrun --nproc_per_node 2 pretrain_gpt.py {' '.join(MODEL.split())} {LOCAL} "
        f"{PLAIN_WGRAD} --save checkpoints\n"
    )
    command = [str(ENVIRONMENT / "bin" / "python"), "-m", "commfuse_npu", "measure", "--device"]
    command += ["npu", "--ranks", "2", "--steps", "launch", "--folder", str(folder / "found")]
    command += ["--launch", shlex.quote(str(script)), "--timeout", "300"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1400,
        check=False,
    )
    assert done.returncode == 1, done.stdout  # no kernels of MC2 and CoC
    return folder / "found", done.stdout.replace("**", "")


def test_forms_are_launched_as_they_are_named(measured: tuple[Path, str]) -> None:
    folder, printed = measured
    results = json.loads((folder / "measured.json").read_text())["steps"]
    forms = "plain", "megatron", "fb_overlap", "commfuse"
    logs = [results[f"launch_{form}"]["log"] for form in forms]
    assert all(len(log["losses"]) == 10 for log in logs)
    assert logs[0]["weights"] is not None
    assert len({log["weights"] for log in logs}) == 1
    assert "The same weights, bit for bit: Megatron's order;" in printed
    assert "change from run to run" not in printed
    texts = {path.stem: path.read_text() for path in folder.glob("launch_*.log")}
    waited = re.compile(r"^collectives waited for at once: (\d+)$", re.M)
    # In the backward of 5 column-parallel layers a gather and a scatter, 10 times 4 micro-batches.
    assert waited.findall(texts["launch_plain"]) == [str(5 * 2 * 40)]
    assert waited.findall(texts["launch_megatron"]) == []
    assert "CommFuse: qkv: 2 of 2 fused" in texts["launch_commfuse"]
    for form, title in (("mc2", "MC2"), ("coc", "CoC in 4 slices"), ("coc_kernel", "CoC's kernel")):
        assert f"Could not run: {title}: exit code 1" in printed
        assert "CommFuse" not in texts[f"launch_{form}"]
    assert "mc2" in texts["launch_mc2"]
