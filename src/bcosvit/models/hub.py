"""Where weights come from and go to: shipped files, paths, web addresses, the Hugging Face hub.

``locate`` turns any of these into a local file, so that everything that takes weights takes them
all. What is downloaded is pinned: an address carries the SHA-256 of its file, a repository may
carry a revision. Nothing is ever unpickled on the way.
"""

import hashlib
import http.client
import os
import re
import urllib.request
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

import torch

from bcosvit.files import cache_folder, make_folder
from bcosvit.messages import require
from bcosvit.shipped import DEFAULT, shipped, shipped_file

HUB_FILE = "model.safetensors"
"""What a repository of the hub calls its weights, unless the address names a file."""


def is_file(where: object) -> bool:
    """Whether this names a weights file, shipped or elsewhere, by what it looks like."""
    if isinstance(where, str):
        return where in shipped() or bool({*"./"} & {*where})
    return isinstance(where, Path)


def locate(where: str | Path) -> Path:
    """Finds the local file that ``where`` means, and downloads it if need be.

    Args:
        where: The name of a shipped model; the path of a file, or of a folder that
            ``save_pretrained`` wrote; ``file://PATH``; ``https://ADDRESS#sha256=SUM``; or
            ``hf://OWNER/REPOSITORY[@REVISION][/FILE]``. The last two are downloaded once.

    Returns:
        The path of a file that exists.

    Raises:
        ValueError: There is no such file, or it cannot be downloaded or is not the expected one.
    """
    if isinstance(where, str):
        if where in shipped():
            return shipped_file(where)
        scheme = where.partition("://")[0].lower() if "://" in where else ""
        try:
            urlsplit(where if scheme else "")
        except ValueError as error:
            raise ValueError(f"{where} is no address ({error}); give {_allowed()}.") from error
        if scheme in ("https", "http"):
            return _download(where)
        if scheme == "hf":
            return _from_hub(where)
        if scheme == "file":
            return _from_file_address(where)
        if scheme:
            raise ValueError(
                f"{where} cannot be downloaded: {scheme}:// is not known here; give {_allowed()}."
            )
    if not isinstance(where, str | os.PathLike):
        raise ValueError(f"Weights cannot be read from {type(where).__name__}; give {_allowed()}.")
    path = Path(where)
    # A name that is too long for the system is no file.
    with suppress(OSError):
        if path.is_dir():
            path = path / HUB_FILE
        if path.is_file():
            return path
    if where == DEFAULT:
        raise ValueError(
            f"There is no weights file for the default model {DEFAULT}: this copy of bcosvit was "
            f"installed without it; name other weights, e.g. --weights best.safetensors."
        )
    raise ValueError(f"There is no weights file {path}; give {_allowed()}.")


def _allowed() -> str:
    ways = "a path, https://ADDRESS#sha256=SUM or hf://OWNER/REPOSITORY"
    return f"{ways}, or a shipped model: {', '.join(shipped())}" if shipped() else ways


def _from_file_address(where: str) -> Path:
    parts = urlsplit(where)
    path = Path(urllib.request.url2pathname(parts.path))
    if not path.is_file():
        raise ValueError(f"There is no weights file {path} as {where} says; check the path.")
    if parts.fragment and (found := _sum_of(path)) != _wanted_sum(where):
        raise ValueError(f"{path} has the SHA-256 {found}, not the one in {where}; check both.")
    return path


def _download(where: str) -> Path:
    wanted = _wanted_sum(where)
    parts = urlsplit(where)
    name = Path(unquote(parts.path)).name.lstrip(".")[-100:] or HUB_FILE
    target = cache_folder("weights") / wanted[:16] / name
    if target.is_file() and _sum_of(target) == wanted:
        return target
    address = urlunsplit(parts._replace(fragment=""))
    make_folder(target.parent)
    try:
        # Writes to a temporary file first, and checks the sum before it is renamed.
        torch.hub.download_url_to_file(address, str(target), hash_prefix=wanted, progress=False)
    except (OSError, http.client.HTTPException, RuntimeError) as error:
        raise ValueError(
            f"{address} cannot be downloaded ({error}); check the address, the network, and "
            f"whether the file was replaced."
        ) from error
    return target


def _wanted_sum(where: str) -> str:
    match = re.fullmatch(r"sha256=([0-9a-f]{64})", urlsplit(where).fragment.lower())
    if match is None:
        raise ValueError(
            f"{where} does not say which file it expects; append #sha256= and the 64 hexadecimal "
            f"digits of the file's SHA-256."
        )
    return match[1]


def _sum_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


_HUB = re.compile(r"hf://(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?(?:/(?P<file>.+))?", re.I)


def _from_hub(where: str) -> Path:
    match = _HUB.fullmatch(where)
    if match is None:
        raise ValueError(
            f"{where} is no address of the hub; write hf://OWNER/REPOSITORY[@REVISION][/FILE]."
        )
    revision = match["revision"]
    return hub_file(
        match["repo"],
        match["file"] or HUB_FILE,
        # Names of revisions may hold slashes, which then stand as %2F.
        revision=unquote(revision) if revision else None,
    )


def hub_file(
    repo: str, name: str, *, revision: str | None = None, token: str | bool | None = None
) -> Path:
    """Downloads a file of a repository on the hub, unless it is in the hub's own cache already."""
    library = require("huggingface_hub", extra="hub", purpose="The hub")
    try:
        return Path(library.hf_hub_download(repo, name, revision=revision, token=token))
    # Anything between a missing network and a gated repository, from several libraries.
    except Exception as error:
        reason = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
        raise ValueError(
            f"{name} of {repo} cannot be downloaded from the hub ({reason}); check the name, the "
            f"revision and the network."
        ) from error


def upload_folder(
    folder: Path,
    repo_id: str,
    *,
    commit_message: str = "Add model",
    private: bool | None = None,
    token: str | None = None,
    branch: str | None = None,
    create_pr: bool | None = None,
) -> str:
    """Uploads a folder to a repository, which is created if there is none.

    Returns:
        The address of the commit.
    """
    api = require("huggingface_hub", extra="hub", purpose="The hub").HfApi(token=token)
    repo_id = api.create_repo(repo_id=repo_id, private=private, exist_ok=True).repo_id
    if branch is not None:
        api.create_branch(repo_id=repo_id, branch=branch, exist_ok=True)
    commit = api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        commit_message=commit_message,
        revision=branch,
        create_pr=create_pr,
    )
    return str(commit.commit_url)
