"""Files that are complete or not there, and the folder of the cache.

PyTorch, safetensors and ONNX write to a path without protection against a crash, a full disk or a
second writer, so `atomic` is our own.
"""

import errno
import importlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

fcntl: Any = None
with suppress(ImportError):  # Windows has none.
    fcntl = importlib.import_module("fcntl")

PART = ".bcosvit-part"
"""Names of temporary files hold this; those of a process that was killed are removed by the next
one that writes into the folder."""

_cleared: set[Path] = set()
"""Folders without temporary files of processes that are no more."""


def cache_folder(kind: str) -> Path:
    """The folder in which downloads of a kind (weights, shards) are cached.

    Examples:
        >>> cache_folder("weights").parts[-2:]
        ('bcosvit', 'weights')
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "bcosvit" / kind


def make_folder(path: str | Path) -> None:
    """Makes a folder and its parents where they are missing.

    Raises:
        NotADirectoryError: A file is in the way.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        # That a file is in the way, the system would only hint at.
        message = os.strerror(errno.ENOTDIR)
        raise NotADirectoryError(errno.ENOTDIR, message, str(path)) from error


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path beside ``path`` that takes its place once the block succeeds.

    A link stays a link: what it points to is replaced.

    Raises:
        OSError: The file cannot be written, or ``path`` is a folder, a device or a pipe; what was
            there before is still there.

    Examples:
        >>> with atomic("notes.txt") as temporary:
        ...     _ = temporary.write_text("complete")
        >>> Path("notes.txt").read_text()
        'complete'
    """
    make_folder(Path(path).parent)
    path = _regular(Path(path))
    make_folder(path.parent)
    if path.parent not in _cleared:
        _clear(path.parent)
        _cleared.add(path.parent)
    handle, temporary = _locked_file(path)
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
        os.close(handle)


def _regular(path: Path) -> Path:
    """Where ``path`` leads to, if a file may be written there; asked before the work."""
    target = Path(os.path.realpath(path))
    try:
        mode = os.stat(target).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return target
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return target


def _locked_file(path: Path) -> tuple[int, Path]:
    """A new temporary file beside ``path``, open and locked for as long as its writer lives."""
    while True:
        prefix, suffix = f".{path.name}.", f"{PART}{path.suffix}"
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=prefix, suffix=suffix)
        _lock(handle)
        # Before it was locked, another process may have taken it for one that was left behind.
        if os.path.exists(name):
            return handle, Path(name)
        os.close(handle)


def _clear(folder: Path) -> None:
    """Removes the temporary files of processes that are no more."""
    if fcntl is None:
        return
    for left in folder.glob(f".*{PART}*"):
        try:
            handle = os.open(left, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            if _lock(handle):
                left.unlink(missing_ok=True)
        except OSError:
            continue
        finally:
            os.close(handle)


def _lock(handle: int) -> bool:
    """Locks an open file until it is closed; False where another process has done so."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        # Some network file systems know no locks, so nothing there is taken for left behind.
        return False
    return True


def _umask() -> int:
    # The only way to read it is to set it.
    mask = os.umask(0)
    os.umask(mask)
    return mask
