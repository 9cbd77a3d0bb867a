"""verl's Megatron engine trains with overlap, on a CPU over gloo: the same bits as without.

It runs in an environment of its own, beside ``.venv``::

    python3.12 -m venv .venv-verl && . .venv-verl/bin/activate
    pip install torch==2.13.0
    pip install --no-deps verl==0.9.1 mbridge==0.15.1 megatron-core==0.16.1
    rm -r .venv-verl/lib/python3.12/site-packages/scripts  # of verl's wheel: it hides ours
    pip install 'transformers>=5.5.3,<5.11' tensordict==0.10.0 ray hydra-core codetiming peft \\
        accelerate pandas torchdata datasets pillow einops pytest
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(f"{os.environ.get('COMMFUSE_VENV') or ROOT / '.venv'}-verl") / "bin/python"
NEEDED = "verl", "mbridge", "megatron.core", "tensordict", "transformers"

TENSOR, EXPERTS = {"tensor_model": 2}, {"expert_model": 2}
RUNS: list[dict[str, Any]] = [
    {"name": "TP 2, packed", "layout": TENSOR},
    {"name": "EP 2, recomputed", "layout": EXPERTS, "sparse": True, "recomputed": True},
    {
        "name": "EP 2, routers replayed, recomputed",
        "layout": EXPERTS,
        "sparse": True,
        "recomputed": True,
        "replay": "R2",
    },
    {
        "name": "actor, critic and reference, dynamic batches",
        "layout": TENSOR,
        "models": ["reference", "actor", "critic"],
        "recomputed": True,
        "dynamic": True,
        "loss": "ppo",
        "samples": [5, 8, 3],
    },
]


def obstacle() -> str | None:
    """Why verl cannot run here, if so."""
    if not PYTHON.exists():
        return f"no {PYTHON}: this file says how to create it, with Python 3.12"
    asked = f"import importlib.util as u; print([n for n in {NEEDED} if not u.find_spec(n)])"
    found = subprocess.run([PYTHON, "-c", asked], capture_output=True, text=True, timeout=100)
    if found.returncode or found.stdout.strip() != "[]":
        return f"{PYTHON} does not have {found.stdout.strip() or found.stderr[-200:]}"
    return None


@pytest.mark.long
@pytest.mark.timeout(900)
def test_verl_ends_with_the_weights_of_megatrons_order() -> None:
    reason = obstacle()
    if reason is not None:
        pytest.skip(reason)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [PYTHON, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    command += ["-m", "tests.clients.verl_training", json.dumps(RUNS)]
    ran = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=800
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
    results = {one["name"]: one for one in (json.loads(line[7:]) for line in lines)}
    assert results.keys() == {run["name"] for run in RUNS}, ran.stdout[-3000:] + ran.stderr[-3000:]
    for name, result in results.items():
        assert result["overlapped"] == result["in order"], name
        assert result["same losses"], name
        assert result["pairs"] > 0, name
        assert result["forwards handed over"] > 0, name
        assert ("recomputed" in name) <= (result["recomputations ahead"] > 0), name
