"""Files are replaced atomically: a failed write leaves the old file."""

import errno
import json
import os
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest

from commfuse_npu.runtime.atomic_write import write_json


def test_written_whole_in_a_folder_of_any_name(tmp_path: Path) -> None:
    path = tmp_path / "ein Ordner" / "目录" / "a file.json"
    mask = os.umask(0o027)
    try:
        write_json(path, {"a": 1})
        write_json(path, {"a": 2})
    finally:
        os.umask(mask)
    assert json.loads(path.read_text()) == {"a": 2}
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [entry.name for entry in path.parent.iterdir()] == ["a file.json"]


@pytest.mark.parametrize("when", ["os.fsync", "json.dump"])
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch, when: str) -> None:
    path = tmp_path / "file.json"
    write_json(path, ["old"])
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(when, Mock(side_effect=full))
    with pytest.raises(OSError, match="No space left"):
        write_json(path, ["new"])
    assert json.loads(path.read_text()) == ["old"]
    assert [entry.name for entry in path.parent.iterdir()] == ["file.json"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "target.json").write_text("old")
    (tmp_path / "link.json").symlink_to("target.json")
    write_json(tmp_path / "link.json", 1)
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "target.json").read_text() == "1\n"


def test_what_is_no_file_is_written_to_and_never_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_json(pipe, [1])
        assert os.read(reader, 100) == b"[1]\n"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    write_json(Path("/dev/null"), [1])
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    with pytest.raises(OSError, match="Is a directory"):
        write_json(tmp_path, [1])
