"""Malformed configuration files: each reader reports an error in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from commfuse_npu.config_file import ConfigError, read_config
from commfuse_npu.hardware.description import Hardware
from commfuse_npu.tools.model_config import ModelConfig

ROOT = Path(__file__).resolve().parents[1]
BROKEN = {
    "object": ("x: !!python/object/apply:os.system [exit]", "could not determine a constructor"),
    "name": ("x: !!python/name:os.system", "could not determine a constructor"),
    "twice": ("a: 1\nb: 2\na: 3", "'a' is there twice"),
    "twice deep": ("a: {b: 1, b: 2}", "'b' is there twice"),
    "no date": ("a: 2026-99-99", "month must be in 1..12"),
    "too deep": ("a: " + "[" * 10_000, "maximum recursion depth"),
    "not a mapping": ("- 1\n- 2", "list, not a mapping"),
    "a list as a key": ("? [1, 2]\n: 3", "unhashable key"),
    "empty": ("", "nothing, not a mapping"),
    "control": ("a: \x07", "special characters are not allowed"),
}


MODEL, HARDWARE = ROOT / "configs/llama3_8b.yaml", ROOT / "configs/hardware/ascend_910b_server.yaml"
Reader = Callable[[Path], Any]
readers = pytest.mark.parametrize(
    ("reader", "file"), [(ModelConfig.load, MODEL), (Hardware.load, HARDWARE)]
)


@pytest.mark.parametrize("case", BROKEN)
def test_it_is_refused(tmp_path: Path, case: str) -> None:
    content, words = BROKEN[case]
    path = tmp_path / "eine Datei 目录.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 1000


@readers
def test_every_reader_refuses_it(tmp_path: Path, reader: Reader, file: Path) -> None:
    path = tmp_path / "eine Datei 目录.yaml"
    path.write_bytes(file.read_bytes())
    assert reader(path)
    path.write_bytes(b"a: \xff\xfe")
    with pytest.raises(ConfigError, match=r"is not valid yaml: .*decode"):
        reader(path)
    with pytest.raises(ConfigError, match="cannot read"):
        reader(tmp_path)
    path.write_text("a: 1\na: 2\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="'a' is there twice"):
        reader(path)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("lr", ".nan", "lr: nan is not a finite number"),
        ("lr", ".inf", "lr: inf is not a finite number"),
        ("hidden_size", "9" * 30, "is not a whole number from 1 of at most 12 digits"),
        ("hidden_size", ".nan", "hidden_size: nan is not a whole number"),
        ("hidden_size", "[[1]]", "is not a whole number"),
    ],
)
def test_numbers_that_are_none(tmp_path: Path, key: str, value: str, words: str) -> None:
    lines = MODEL.read_text(encoding="utf-8").splitlines()
    lines = [f"{key}: {value}" if line.startswith(f"{key}:") else line for line in lines]
    path = tmp_path / "file.yaml"
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        ModelConfig.load(path)
    assert words in str(caught.value)


@pytest.mark.parametrize("number", [".nan", ".inf", "9" * 39, "-1"])
def test_figures_that_are_none(tmp_path: Path, number: str) -> None:
    content = yaml.safe_load(HARDWARE.read_text(encoding="utf-8"))
    content["npu"]["gemm_efficiency"]["high"] = yaml.safe_load(number)
    path = tmp_path / "file.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"npu\.gemm_efficiency\.high"):
        Hardware.load(path)


def test_what_people_write_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("a: 1\nb: 1.0e+9\nc: 0x10\nd: [1, x]\ne: {a: 2}\nf: null\ng: yes\nh: 1_000\n")
    expected = {"a": 1, "b": 1e9, "c": 16, "d": [1, "x"], "e": {"a": 2}, "f": None, "g": True}
    assert read_config(path) == {**expected, "h": 1000}
