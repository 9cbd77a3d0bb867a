"""What is prepared for MindSpeed-LLM is what this project has now."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from mindspeed_patches.feature import CommFuseFeature
from scripts.upstream import files

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "upstream"


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return dict(files())


def test_the_files_are_up_to_date(made: dict[str, str]) -> None:
    kept = {
        str(path.relative_to(FOLDER)): path.read_text("utf-8")
        for path in FOLDER.rglob("*")
        if path.is_file() and path.name != "README.md"
    }
    assert kept == made, "python -m scripts.upstream writes them again"


def test_pages_lead_nowhere_that_is_not_there(made: dict[str, str]) -> None:
    pages = [text for name, text in made.items() if name.endswith(".md")]
    assert len(pages) == 2
    for page in pages:
        assert page.startswith("# ")
        links = re.findall(r"\]\(([^)]*)\)", page)
        assert links
        assert all(link.startswith("https://") for link in links), links


def test_the_entry_is_features(made: dict[str, str]) -> None:
    found: list[object] = []
    exec(made["features_manager.txt"], {"features_list": found})
    # By name: other tests import the module anew.
    assert [type(one).__name__ for one in found] == [CommFuseFeature.__name__]


def test_the_system_test_is_a_launch_of_its_own(made: dict[str, str], tmp_path: Path) -> None:
    (name,) = (name for name in made if name.endswith(".sh"))
    assert str(FOLDER.parents[1]) not in made[name]
    script = tmp_path / "it.sh"
    # Instead of a launch: its words.
    script.write_text('torchrun() { printf "%s\\n" "$@"; }\n' + made[name])
    environment = {"PATH": "/usr/bin:/bin", "DATA_PATH": "my data", "TOKENIZER_MODEL": "it"}
    command = ["bash", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    assert words[:2] == ["--nproc_per_node", "8"]
    assert words.count("--use-commfuse") == 1
    assert words[words.index("--data-path") + 1] == "my data"
    assert words[words.index("--train-iters") + 1] == "15"
    given = [word for word in words if word.startswith("--")]
    assert len(given) == len(set(given))
    # It tells what it lacks.
    without = subprocess.run(command, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert without.returncode
    assert "DATA_PATH: the data set, without its endings" in without.stderr


def test_the_baseline_has_what_a_run_fills(made: dict[str, str]) -> None:
    (name,) = (name for name in made if name.endswith(".json"))
    assert json.loads(made[name]).keys() >= {"lm loss", "grad norm", "time info", "memo info"}
