"""Malformed configuration files: each is an error in one line."""

from pathlib import Path

import pytest

from commfuse_npu.tools.config_file import ConfigError, read_config

BROKEN = {
    "object": ("x: !!python/object/apply:os.system [exit]", "could not determine a constructor"),
    "twice": ("a: 1\nb: 2\na: 3", "line 3: 'a' is there twice"),
    "twice deep": ("a: {b: 1, b: 2}", "'b' is there twice"),
    "no date": ("a: 2026-99-99", "month must be in 1..12"),
    "too deep": ("a: " + "[" * 10_000, "maximum recursion depth"),
    "not a mapping": ("- 1\n- 2", "list, not a mapping"),
    "a list as a key": ("? [1, 2]\n: 3", "unhashable key"),
    "empty": ("", "nothing, not a mapping"),
    "control": ("a: \x07", "special characters are not allowed"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_it_is_refused(tmp_path: Path, case: str) -> None:
    content, words = BROKEN[case]
    path = tmp_path / "eine Datei 目录.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        read_config(tmp_path)
    path = tmp_path / "file.yaml"
    path.write_bytes(b"a: \xff\xfe")
    with pytest.raises(ConfigError, match=r"is not valid yaml: .*decode"):
        read_config(path)
