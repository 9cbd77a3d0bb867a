"""The wheel carries what its commands read, and none of them needs torch to be installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("setup.py", "pyproject.toml", "README.md", "commfuse_npu", "mindspeed_patches", "configs")


@pytest.mark.long
def test_the_wheel_plans_without_torch(tmp_path: Path) -> None:
    source, built, installed = (tmp_path / name for name in ("source", "built", "installed"))
    source.mkdir()
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, source / part)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", built]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, source], check=True)
    (wheel,) = built.glob("commfuse_npu-*.whl")
    zipfile.ZipFile(wheel).extractall(installed)
    program = (
        f"import sys; sys.path.insert(0, {str(installed)!r}); sys.modules['torch'] = None\n"
        "from commfuse_npu.tools import cli\n"
        "from commfuse_npu.config_file import find_config\n"
        "config = str(find_config('llama3_8b'))\n"
        "assert cli.main(['doctor', '--config', config]) in (0, 1)\n"
        "assert cli.main(['plan', '--model', 'llama3_8b', '--npus', '8', '--tp', '4']) == 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Options of pretrain_gpt.py:" in done.stdout
