"""Files that are complete or not there, and the folder of the cache.

PyTorch, safetensors and ONNX write to a path without protection against a crash, a full disk or a
second writer, so `atomic` is our own.
"""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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

    Raises:
        OSError: The file cannot be written; what was at ``path`` before is still there.

    Examples:
        >>> with atomic("notes.txt") as temporary:
        ...     _ = temporary.write_text("complete")
        >>> Path("notes.txt").read_text()
        'complete'
    """
    path = Path(path)
    # Before the work rather than after it.
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    make_folder(path.parent)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    # The only way to read it is to set it.
    mask = os.umask(0)
    os.umask(mask)
    return mask
