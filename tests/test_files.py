"""Files that are complete or not there."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from bcosvit import files
from bcosvit.files import atomic

WRITER = """
import sys, time
from bcosvit.files import atomic
with atomic(sys.argv[1]) as temporary:
    temporary.write_text("half")
    print("writing", flush=True)
    time.sleep(100)
"""


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(files, "_cleared", set())


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.txt", tmp_path / "link.txt"
    for content in ("dangling", "existing"):
        link.unlink(missing_ok=True)
        link.symlink_to(real)
        with atomic(link) as temporary:
            temporary.write_text(content)
        assert link.is_symlink()
        assert real.read_text() == content


def test_permissions_are_those_of_new_files_and_other_threads_keep_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    umask, path = os.umask, tmp_path / "model.safetensors"
    before = umask(0o027)
    try:
        # It belongs to the whole process, and reading it is setting it.
        monkeypatch.setattr(os, "umask", None)
        with atomic(path) as temporary:
            save_file({"weight": torch.zeros(1)}, temporary)
    finally:
        umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_devices_and_pipes_are_refused_before_the_work(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    link = tmp_path / "link"
    link.symlink_to("/dev/null")
    for path in (Path("/dev/null"), pipe, link):
        with pytest.raises(OSError, match="Not a regular file"), atomic(path):
            pytest.fail("The work was begun.")
    assert not Path("/dev/null").is_file()
    with pytest.raises(IsADirectoryError), atomic(tmp_path):
        pytest.fail("The work was begun.")


@pytest.mark.parametrize("again", ["out.txt", "other.txt"])
def test_what_a_killed_process_left_is_removed_by_the_next(
    again: str, tmp_path: Path, fresh: None
) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "out.txt")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        # It lives, so its file is left alone.
        with atomic(tmp_path / again) as temporary:
            temporary.write_text("first")
        assert len(list(tmp_path.glob(".out.txt.*.txt"))) == 1
        writer.send_signal(signal.SIGKILL)
    files._cleared.clear()
    with atomic(tmp_path / again) as temporary:
        temporary.write_text("second")
    assert [path.name for path in tmp_path.iterdir()] == [again]
    assert (tmp_path / again).read_text() == "second"


def test_a_new_file_is_not_taken_for_one_that_was_left(
    tmp_path: Path, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")
    make, taken = tempfile.mkstemp, []

    def made(**options: Any) -> tuple[int, str]:
        handle, name = make(**options)
        if not taken:
            # Another process clears the folder: it holds the file, and removes it a little later.
            taken.append(os.open(name, os.O_RDWR))
            fcntl.flock(taken[0], fcntl.LOCK_EX)

            def clear() -> None:
                Path(name).unlink()
                os.close(taken[0])

            threading.Timer(0.2, clear).start()
        return handle, name

    monkeypatch.setattr(files.tempfile, "mkstemp", made)
    with atomic(tmp_path / "a.txt") as temporary:
        temporary.write_text("complete")
        time.sleep(0.4)
    assert (tmp_path / "a.txt").read_text() == "complete"
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt"]


def test_a_file_that_is_replaced_while_it_is_written_is_still_its_writers(
    tmp_path: Path, fresh: None
) -> None:
    with atomic(tmp_path / "one.safetensors") as temporary:
        before = temporary.stat().st_ino
        save_file({"a": torch.zeros(3)}, temporary)
        assert temporary.stat().st_ino != before
        # Another process begins to write into the folder.
        files._cleared.clear()
        with atomic(tmp_path / "two.txt") as other:
            other.write_text("x")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["one.safetensors", "two.txt"]


def test_what_older_versions_left_is_removed(tmp_path: Path, fresh: None) -> None:
    (tmp_path / f".out.txt.abc{files.PART}.txt").write_text("half")
    (tmp_path / f".out.txt.abd{files.PART}.txt{files.LOCK}").touch()
    with atomic(tmp_path / "out.txt") as temporary:
        temporary.write_text("x")
    assert [each.name for each in tmp_path.iterdir()] == ["out.txt"]


def test_files_of_others_are_left_alone(tmp_path: Path, fresh: None) -> None:
    (tmp_path / ".hidden.txt").write_text("mine")
    with atomic(tmp_path / "out.txt") as temporary:
        temporary.write_text("x")
    assert (tmp_path / ".hidden.txt").exists()


def test_errors_are_about_the_file_and_not_about_its_temporary(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(OSError, match="No space left") as said, atomic(path) as temporary:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(temporary))
    assert said.value.filename == str(path)
    # safetensors has an error of its own, with the system's number in its text.
    with pytest.raises(OSError, match="No space left") as said, atomic(path):
        raise SafetensorError("Error while serializing: No space left on device (os error 28)")
    assert said.value.errno == errno.ENOSPC and said.value.filename == str(path)
    with pytest.raises(OSError, match="No space left") as said, atomic(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert said.value.filename == str(path)
    with pytest.raises(SafetensorError, match="header"), atomic(path):
        raise SafetensorError("The header is wrong.")
    other = tmp_path / "other.txt"
    with pytest.raises(OSError, match="No such file") as said, atomic(path):
        other.read_text()
    assert said.value.filename == str(other)
    assert list(tmp_path.iterdir()) == []
