"""Malformed configuration files: each reader reports an error in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from commfuse_npu.config_file import ConfigError, read_config
from commfuse_npu.hardware.description import Hardware
from commfuse_npu.tools.model_config import ModelConfig

ROOT = Path(__file__).resolve().parents[1]
MODEL, HARDWARE = ROOT / "configs/llama3_8b.yaml", ROOT / "configs/hardware/ascend_910b_server.yaml"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"x: !!python/object/apply:os.system [exit]", "could not determine a constructor"),
        (b"a: 1\nb: 2\na: 3", "'a' is there twice"),
        (b"a: {b: 1, b: 2}", "'b' is there twice"),
        (b"a: 2026-99-99", "month must be in 1..12"),
        (b"a: " + b"[" * 10_000, "maximum recursion depth"),
        (b"- 1\n- 2", "list, not a mapping"),
        (b"? [1, 2]\n: 3", "unhashable key"),
        (b"", "nothing, not a mapping"),
        (b"a: \x07", "special characters are not allowed"),
        (b"a: \xff\xfe", "codec can't decode"),
    ],
    ids=lambda given: given.decode(errors="replace")[:20] if isinstance(given, bytes) else "",
)
def test_it_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "eine Datei 目录.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(("reader", "file"), [(ModelConfig, MODEL), (Hardware, HARDWARE)])
def test_every_reader_refuses_it(tmp_path: Path, reader: Any, file: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        reader.load(tmp_path)
    path = tmp_path / file.name
    path.write_bytes(file.read_bytes())
    assert reader.load(path)
    path.write_text("a: 1\na: 2\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="'a' is there twice"):
        reader.load(path)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("lr", ".nan", "lr: nan is not a finite number"),
        ("lr", ".inf", "lr: inf is not a finite number"),
        ("hidden_size", "9" * 30, "is not a whole number from 1 of at most 12 digits"),
        ("hidden_size", ".nan", "hidden_size: nan is not a whole number"),
        ("hidden_size", "[[1]]", "is not a whole number"),
        ("gemm_efficiency", ".nan", "npu.gemm_efficiency.high"),
        ("gemm_efficiency", "9" * 39, "npu.gemm_efficiency.high"),
        ("gemm_efficiency", "-1", "npu.gemm_efficiency.high"),
    ],
)
def test_numbers_that_are_none(tmp_path: Path, key: str, value: str, words: str) -> None:
    file, reader = (MODEL, ModelConfig) if "npu" not in words else (HARDWARE, Hardware)
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    where = content if key in content else content["npu"][key]
    where[key if key in content else "high"] = yaml.safe_load(value)
    path = tmp_path / "file.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        reader.load(path)
    assert words in str(caught.value)


def test_what_people_write_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("a: 1\nb: 1.0e+9\nc: 0x10\nd: [1, x]\ne: {a: 2}\nf: null\ng: yes\nh: 1_000\n")
    expected = {"a": 1, "b": 1e9, "c": 16, "d": [1, "x"], "e": {"a": 2}, "f": None, "g": True}
    assert read_config(path) == {**expected, "h": 1000}
