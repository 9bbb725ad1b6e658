"""Which tar shards an address means, and where they lie on this machine.

`webdataset` is used for what it is the authority on: brace patterns and ``::`` lists, and opening
remote addresses (``https://``, ``gs://``, ``pipe:`` commands, …). A remote shard is streamed once
into a local cache and is a file from then on, since training reads pictures in any order.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

from bcosvit.data.images import EXTENSIONS
from bcosvit.data.splits import SourceError
from bcosvit.files import atomic, cache_folder

__all__ = ["is_shards", "local_shards", "webdataset"]

_REMOTE = re.compile(r"(pipe:|\w+://)")


def is_shards(data: str) -> bool:
    """Whether an address means tar shards: by its ending, its scheme, or the folder's content."""
    if _REMOTE.match(data) or re.search(r"\.(tar(\.\w+)?|tgz)$", data):
        return True
    folder = Path(data)
    # An archive lying beside the pictures that came out of it is no shard.
    return folder.is_dir() and bool(_find(folder)) and not _holds_pictures(folder)


def _holds_pictures(folder: Path) -> bool:
    names = (name for _, _, files in os.walk(folder) for name in files)
    return any(os.path.splitext(name)[1].lower() in EXTENSIONS for name in names)


def _find(folder: Path) -> list[Path]:
    """The shards in a folder, or one level below it (``train/0.tar``)."""
    found = [path for pattern in ("*.tar", "*/*.tar") for path in folder.glob(pattern)]
    return sorted(path for path in found if not path.name.startswith("."))


def local_shards(data: str, cache: Path | None) -> list[Path]:
    """The local shards that an address means, fetching remote ones into the cache."""
    if Path(data).is_dir():
        return _find(Path(data))
    addresses: list[str] = [data]
    # A command may hold braces of its own, and an existing file is never a pattern.
    if not data.startswith("pipe:") and not Path(data).exists():
        try:
            addresses = webdataset("shardlists").expand_urls(data)
        except (AssertionError, ValueError) as error:
            raise SourceError(
                f"The pattern {data} cannot be expanded ({error}): write a-{{000..012}}.tar."
            ) from error
    addresses = [address.removeprefix("file://") for address in addresses]
    paths = [_fetch(a, cache) if _REMOTE.match(a) else Path(a) for a in addresses]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise SourceError(
            f"{len(missing)} of {len(paths)} shards are missing, the first is {missing[0]}: "
            "check the path or the pattern."
        )
    return paths


def _fetch(address: str, cache: Path | None) -> Path:
    """Copy a remote shard into the cache, completely or not at all; a second run finds it there."""
    # The name says which split it is; the hash tells addresses apart.
    names = re.findall(r"[\w.-]+\.tar\b", address) or ["shard.tar"]
    folder = hashlib.sha256(address.encode()).hexdigest()[:16]
    target = (cache or cache_folder("shards")) / folder / names[-1][-100:]
    if target.exists():
        return target
    try:
        with (
            atomic(target) as partial,
            webdataset("gopen").gopen(address) as stream,
            partial.open("wb") as file,
        ):
            shutil.copyfileobj(stream, file)
    except Exception as error:
        raise SourceError(
            f"The shard {address} cannot be fetched ({error}): check the address and the network."
        ) from error
    return target


def webdataset(module: str) -> Any:
    """A module of the library, imported when first needed: it is an optional dependency."""
    try:
        return importlib.import_module(f"webdataset.{module}")
    except ImportError as error:
        raise SourceError(
            "Tar shards need the package webdataset: install bcosvit[train]."
        ) from error
