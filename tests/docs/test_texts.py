"""Links, anchors, paths and options in the texts exist; what is stated twice agrees."""

import argparse
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commfuse_npu.launch.options import OPTIONS, OVERLAP_OPTIONS, option_name
from commfuse_npu.launch.refusals import BESIDE, REFUSALS_OF
from commfuse_npu.tools import cli
from commfuse_npu.tools.option_types import Parser
from scripts.cpu_pretraining.__main__ import main as pretraining
from scripts.evidence import layers, pictures, steps
from scripts.evidence.measured.__main__ import main as measured

ROOT = Path(__file__).resolve().parents[2]
AT_THE_TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
TEXTS = [*AT_THE_TOP, *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [file for file in TEXTS if file.name != "CHANGELOG.md"]  # which names what is removed

_CODE = re.compile(r"^ *```(?:\w*)\n.*?^ *```$", re.M | re.S)
_QUOTED = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\]\((?![a-z]+:)([^)\s]+)\)")
_PATH = re.compile(
    r"(?<![\w./-])(?:commfuse_npu|mindspeed_patches|scripts|configs|docs|tests)/[\w./*-]*[\w*/]"
)
_ASKED: dict[str, Callable[[list[str]], int]] = {
    "commfuse-npu ": cli.main,
    **{f"python -m {tool.__name__} ": tool.main for tool in (layers, pictures, steps)},
    "python -m scripts.evidence.measured": measured,
    "bash scripts/pretrain_llama_cpu.sh": pretraining,
}


def anchors(text: str) -> set[str]:
    """The anchors of the headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", _CODE.sub("", text), re.M)
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.fixture
def only_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command whose options are accepted exits with 0, before it does anything."""
    for parser in (argparse.ArgumentParser, Parser):

        def parse_args(self: Any, *given: Any, parse: Any = parser.parse_args) -> None:
            parse(self, *given)
            self.exit()

        monkeypatch.setattr(parser, "parse_args", parse_args)


@pytest.mark.parametrize("file", TEXTS, ids=lambda file: file.name)
def test_links_lead_somewhere(file: Path) -> None:
    """Anchors of the API pages are created when the site is built, and checked there."""
    for link in _LINK.findall(_QUOTED.sub("", _CODE.sub("", file.read_text("utf-8")))):
        name, _, anchor = link.partition("#")
        target = file.parent / name if name else file
        assert target.exists(), link
        if anchor and target.suffix == ".md" and target.parent.name != "api":
            assert anchor in anchors(target.read_text("utf-8")), link


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_commands_are_understood_paths_exist_and_lines_fit(file: Path, only_parsed: None) -> None:
    text = file.read_text("utf-8")
    code = "\n".join(_CODE.findall(text)).replace("\\\n", " ").splitlines()
    quoted = (" ".join(words.split()) for words in _QUOTED.findall(_CODE.sub("", text)))
    for line in [*code, *quoted]:
        for start in filter(line.startswith, _ASKED):
            with pytest.raises(SystemExit) as ended:
                _ASKED[start](shlex.split(line.removeprefix(start), comments=True))
            assert not ended.value.code, line
    assert [path for path in _PATH.findall(text) if not list(ROOT.glob(path.rstrip("/")))] == []
    lines = [line for line in text.splitlines() if not line.startswith("|")]
    assert file.stem.endswith("_zh") or [line for line in lines if len(line) > 120] == []
    for paths, word in re.findall(r"pytest ((?:tests/\S+ )+)-k (\w+)", text):
        files = [ROOT / path for path in paths.split() if path.endswith(".py")]
        assert any(re.search(rf"def test_\w*{word}", at.read_text("utf-8")) for at in files), word


def test_every_launch_option_is_explained_or_refused() -> None:
    options, limits, chinese = (
        (ROOT / "docs" / page).read_text("utf-8").replace("\n", " ")
        for page in ("options.md", "limits.md", "options_zh.md")
    )
    names = set(map(option_name, OPTIONS | OVERLAP_OPTIONS))
    assert [
        name for name in names if f"`{name}`" not in options or f"`{name}`" not in chinese
    ] == []
    in_words = {"--context-parallel-size", "--position-embedding-type alibi"}
    refused = {
        refusal.option
        for ours in REFUSALS_OF.keys() - {"--commfuse-overlap", BESIDE}  # in fb_overlap.md
        for refusal in REFUSALS_OF[ours]
    } - in_words
    assert [name for name in refused if name not in limits or name not in chinese] == []


def test_the_first_lines_name_the_versions_of_setup_py() -> None:
    setup = (ROOT / "setup.py").read_text("utf-8")
    stated = re.findall(r'(?:python_requires|license)="(.+)"', setup)
    pinned = re.findall(r'"(torch|torch-npu|megatron-core)==([\d.]+)"', setup)
    assert (len(stated), len(pinned)) == (2, 4)
    for file in ("README.md", "docs/readme_zh.md"):
        badges = (ROOT / file).read_text("utf-8").splitlines()[4]
        assert [words for words in (*stated, *map(" ".join, pinned)) if words not in badges] == []


def _code(text: str) -> list[str]:
    """The lines of the code blocks without their comments."""
    lines = "\n".join(_CODE.findall(text)).splitlines()
    return [code for line in lines if (code := re.split(r"\s*#", line)[0])]


def test_the_first_page_says_the_same_in_chinese() -> None:
    english = (ROOT / "README.md").read_text("utf-8")
    chinese = (ROOT / "docs" / "readme_zh.md").read_text("utf-8")
    headings = [re.findall(r"^#+ ", _CODE.sub("", text), re.M) for text in (english, chinese)]
    assert headings[0] == headings[1]
    assert _code(english) == _code(chinese)
    values = re.findall(r"[\d.]+ %", english)
    assert len(values) >= 2
    assert values == re.findall(r"[\d.]+ %", chinese)
    assert english.splitlines()[0] == "English | [中文](docs/readme_zh.md)"
