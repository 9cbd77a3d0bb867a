"""Writes ``docs/upstream``: the files that a merge request to MindSpeed-LLM would add.

    python -m scripts.upstream [FOLDER]

Made from this project's own pages, launch and feature, so that they cannot fall behind; a test
compares them.  Prepared, not submitted, and not run on an NPU.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from commfuse_npu.tools.measure.trainings import BASELINE
from mindspeed_patches.feature import CommFuseFeature

__all__ = ["files", "main"]

_ROOT = Path(__file__).resolve().parents[1]
_FOLDER = _ROOT / "docs" / "upstream"
_PAGE = "docs/{language}/pytorch/features/mcore/commfuse.md"
_TEST = "llama3_8b_tp8_commfuse"
_SHORT = {"--num-layers": 4, "--micro-batch-size": 1, "--global-batch-size": 8, "--train-iters": 15}
"""Of the system test: a minute on eight NPUs, as long as its neighbours."""


def files() -> Iterator[tuple[str, str]]:
    """Where each file belongs in a checkout of MindSpeed-LLM, and what is in it."""
    yield "features_manager.txt", _entry()
    for language, source in (("zh", "commfuse_zh.md"), ("en", "commfuse.md")):
        yield _PAGE.format(language=language), _page((_ROOT / "docs" / source).read_text("utf-8"))
    yield "features_table_row.html", _row()
    yield f"tests/st/shell_scripts/{_TEST}.sh", _system_test()
    empty: dict[str, list[float]] = {name: [] for name in BASELINE}
    yield f"tests/st/baseline_results/{_TEST}.json", json.dumps(empty, indent=4) + "\n"


def _entry() -> str:
    feature = CommFuseFeature
    return (
        "# mindspeed_llm/features_manager/__init__.py: an import, and an entry in the list of\n"
        "# add_tensor_parallel_features, behind those of CoC and MC2.\n"
        f"from {feature.__module__} import {feature.__name__}\n\n"
        f"features_list.append({feature.__name__}())\n"
    )


def _page(text: str) -> str:
    """Without the link to the other language, and without links and pictures of other files."""
    text = re.sub(r"\A\[[^]]*\]\([^)]*\)\n+|\n*\[[^]]*\]\(commfuse(_zh)?\.md\)\n", "\n", text)
    text = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    text = re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", text)
    return text.lstrip("\n")


def _row() -> str:
    """Beside those of MC2 and CoC; the columns: the link, for Megatron, released for products."""
    cells = '<a href="mcore/commfuse.md">CommFuse</a>', "✅", "❌"
    return "\n".join(("  <tr>", *(f"    <td>{cell}</td>" for cell in cells), "  </tr>", ""))


def _system_test() -> str:
    environment, launcher, options = _launch()
    exports = "\n".join(f"export {name}={value}" for name, value in environment)
    lines = "\n".join(f"    {option}" for option in options)
    return f"""#!/bin/bash
# Llama 3 8B with {_SHORT["--num-layers"]} layers, TP 8, sequence parallelism, --use-commfuse.
# The same launch without the flag has the same losses and gradient norms.
{exports}

DATA_PATH=${{DATA_PATH:?the data set, without its endings}}
TOKENIZER_MODEL=${{TOKENIZER_MODEL:?the folder of the tokenizer}}

OPTIONS=(
{lines}
)

{launcher} "${{OPTIONS[@]}}"
"""


def _launch() -> tuple[list[tuple[str, str]], str, list[str]]:
    """Variables, what comes before the options, and these, each with its values."""
    script = _ROOT / "scripts" / "pretrain_llama3_8b_ptd.sh"
    extra = [str(word) for option in _SHORT.items() for word in option]
    done = subprocess.run(
        ["bash", str(script), *extra],
        env={"PATH": os.environ["PATH"], "DRY_RUN": "1", "PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    words = shlex.split(done.stdout.strip().splitlines()[-1])
    variables = []
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        if name != "PYTHONPATH":
            variables.append((name, value))
    # Merged, the feature registers itself.
    at = words.index("-m")
    assert words[at + 1] == "mindspeed_patches.launch"
    options: dict[str, list[str]] = {}
    for word in words[at + 3 :]:
        if word.startswith("--"):
            values = options[word] = []
        else:
            stands = re.sub(r"<(\w+)>", r'"$\1"', word)
            values.append(stands if stands != word else shlex.quote(word))
    lines = [" ".join((name, *values)) for name, values in options.items()]
    return variables, shlex.join([*words[:at], words[at + 2]]), lines


def main(folder: Path = _FOLDER) -> int:
    """Write the files, and what they are."""
    for name, text in files():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
