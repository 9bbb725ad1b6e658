"""Files that are complete or not there, locks on what is being written, and the cache's folder.

PyTorch, safetensors and ONNX write to a path without protection against a crash, a full disk or a
second writer, so `atomic` is our own.
"""

import errno
import importlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

fcntl: Any = None
with suppress(ImportError):  # Windows has none.
    fcntl = importlib.import_module("fcntl")

PART = ".bcosvit-part"
"""Names of temporary files hold this; those of a process that was killed are removed by the next
one that writes into the folder."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says where there is no room for a file."""

LOCK = "-lock"
"""The end of the names of files that are only there to be locked."""

_cleared: set[Path] = set()
"""Folders in which nothing is left of processes that have ended."""


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
        # The system only says that a file exists.
        message = os.strerror(errno.ENOTDIR)
        raise NotADirectoryError(errno.ENOTDIR, message, str(path)) from error


def read_regular(path: str | Path, most: int) -> str:
    """Reads a text of at most ``most`` bytes and of unknown origin, without waiting for a pipe.

    What is not UTF-8 is replaced.

    Raises:
        ValueError: It is larger.
        OSError: It cannot be read, or is no regular file.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} is larger than {most / 1e6:g} MB")
    return content.decode("utf-8", "replace")


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
    try:
        handle, temporary = _locked_file(path)
    except OSError as error:
        raise _error_of(error, path) from error
    try:
        mode = temporary.stat().st_mode
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        # Writers such as safetensors' have put a file of their own in its place.
        os.chmod(temporary, stat.S_IMODE(mode))
        os.replace(temporary, path)
    except OSError as error:
        # The error of a write that fails has no file name.
        full = error.filename is None and error.errno in FULL
        if not full and error.filename != str(temporary):
            raise
        raise _error_of(error, path) from error
    except SafetensorError as error:
        # It has the number of the system's error in its text.
        number = re.search(r"(?:os error|code:?) (\d+)", str(error))
        if number is None:
            raise
        raise _error_of(OSError(int(number[1]), ""), path) from error
    finally:
        temporary.unlink(missing_ok=True)
        _lock_of(temporary).unlink(missing_ok=True)
        os.close(handle)


@contextmanager
def locked_folder(folder: str | Path) -> Iterator[None]:
    """Keeps other processes from writing to a folder, which is made where it is missing.

    The folder itself is locked, so that nothing is left in it. The system unlocks it when the
    process ends, also when it is killed. Network file systems and Windows have no such locks; there
    nothing is checked.

    Args:
        folder: What a command writes all its files to.

    Raises:
        ValueError: Another process, or another thread, writes to it.

    Examples:
        >>> with locked_folder("results"):
        ...     with locked_folder("results"):
        ...         pass
        Traceback (most recent call last):
        ValueError: Another process is writing to results; wait until it ends, or give another \
--out.
    """
    make_folder(folder)
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        _hold(handle, folder)
        yield
    finally:
        _release(handle)


@contextmanager
def locked_file(path: str | Path) -> Iterator[None]:
    """Keeps other processes from writing to a file, as :func:`locked_folder` does for a folder.

    What is locked is a hidden file beside it, which is removed at the end. One that was left by a
    process that was killed is locked by nobody, and goes with the next command.

    Args:
        path: The only file that a command writes.

    Raises:
        ValueError: Another process, or another thread, writes to it.
        OSError: It cannot be written, as for :func:`atomic`.
    """
    if fcntl is None:
        yield
        return
    make_folder(Path(path).parent)
    target = _regular(Path(path))
    make_folder(target.parent)
    hidden = target.with_name(f".{target.name}{PART}{LOCK}")
    while True:
        try:
            handle = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise _error_of(error, Path(path)) from error
        try:
            _hold(handle, path)
            # Before it was locked, the process before may have removed it.
            if hidden.exists() and os.path.samestat(os.fstat(handle), os.stat(hidden)):
                yield
                hidden.unlink(missing_ok=True)
                return
        except BaseException:
            if handle in _held:
                hidden.unlink(missing_ok=True)
            raise
        finally:
            _release(handle)


_held: set[int] = set()
"""Open files with locks of `locked_folder` and `locked_file`."""


def _hold(handle: int, path: str | Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"Another process is writing to {path}; wait until it ends, or give another --out."
        ) from error
    except OSError:
        # Some network file systems have no locks.
        return
    _held.add(handle)


def _release(handle: int) -> None:
    _held.discard(handle)
    os.close(handle)


def _forget_locks() -> None:
    """A child process closes the locks of its parent, which would otherwise outlive the parent."""
    for handle in _held:
        os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


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


def _error_of(error: OSError, path: Path) -> OSError:
    """The same error, about the file that was to be written instead of a temporary one."""
    number = error.errno or errno.EIO
    return OSError(number, os.strerror(number), str(path))


def _locked_file(path: Path) -> tuple[int, Path]:
    """A new temporary file beside ``path``, and its lock, which is held for as long as its writer
    lives. The lock is a file of its own, since writers such as safetensors' put another file in the
    place of the temporary one."""
    while True:
        prefix, suffix = f".{path.name}.", f"{PART}{path.suffix}{LOCK}"
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=prefix, suffix=suffix)
        # Before it is locked, another process may take it for one that was left behind, and hold it
        # until it is removed.
        _lock(handle, wait=True)
        if os.path.exists(name):
            temporary = Path(name.removesuffix(LOCK))
            try:
                temporary.touch(0o666)
            except OSError:
                os.unlink(name)
                os.close(handle)
                raise
            return handle, temporary
        os.close(handle)


def _lock_of(temporary: Path) -> Path:
    return temporary.with_name(temporary.name + LOCK)


def _clear(folder: Path) -> None:
    """Removes the temporary files of processes that have ended."""
    if fcntl is None:
        return
    for left in folder.glob(f".*{PART}*"):
        lock = left if left.name.endswith(LOCK) else _lock_of(left)
        with suppress(OSError):
            try:
                handle = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            except FileNotFoundError:
                # The lock is made first, and removed last.
                left.unlink(missing_ok=True)
                continue
            try:
                if _lock(handle):
                    left.unlink(missing_ok=True)
                    lock.unlink(missing_ok=True)
            finally:
                os.close(handle)


def _lock(handle: int, *, wait: bool = False) -> bool:
    """Locks an open file until it is closed; False where another process has done so, unless that
    is to be waited for."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        # Some network file systems have no locks; nothing is removed there.
        return False
    return True
