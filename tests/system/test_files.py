"""Files that results go to."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from offload_rt.errors import UsageError
from offload_rt.system.files import check_writable, write_whole


def failing(method: Any, code: int) -> Any:
    """The method, failing once it has done its work."""

    def fail(*arguments: Any, **options: Any) -> None:
        method(*arguments, **options)
        raise OSError(code, os.strerror(code))

    return fail


def test_a_file_is_replaced_by_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with path.open() as reader:
        write_whole(path, "new, ü")
        assert reader.read() == "old"  # who has it open is not disturbed
    assert path.read_bytes() == "new, ü".encode()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_a_link(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "file", tmp_path / "link"
    if exists:
        target.write_text("old")
    link.symlink_to(target)
    write_whole(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    assert list(target.parent.iterdir()) == [target]


def test_a_link_that_leads_nowhere_gives_way(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(link)
    write_whole(link, "new")
    assert link.read_text() == "new"


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read_end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(path, "text")
        assert os.read(read_end, 100) == b"text"
    finally:
        os.close(read_end)
    assert path.is_fifo()


def test_what_was_there_outlives_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", failing(Path.write_text, errno.ENOSPC))
        with pytest.raises(OSError, match="No space left"):
            write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EBUSY])
def test_what_cannot_be_replaced_is_written_in_place(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("old and longer")
    monkeypatch.setattr(Path, "replace", failing(lambda *_: None, code))
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_where_no_file_can_be_is_told_by_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_writable("--out", tmp_path / "new")
    check_writable("--out", Path(os.devnull))
    with pytest.raises(UsageError, match=f"--out {tmp_path}: is a folder; name a file in it"):
        check_writable("--out", tmp_path)
    with pytest.raises(UsageError, match="--json .*/no/file: its folder does not exist; create it first"):
        check_writable("--json", tmp_path / "no" / "file")
    asked: list[Path] = []
    monkeypatch.setattr("offload_rt.system.files.os.access", lambda path, _: asked.append(path))
    (tmp_path / "old").touch()
    for name in ("old", "new"):
        with pytest.raises(UsageError, match=f"--out .*/{name}: may not be written; name a file elsewhere"):
            check_writable("--out", tmp_path / name)
    assert asked == [tmp_path / "old", tmp_path]
