"""Where weights are: shipped by name, on disk, behind a web address, or on the Hugging Face hub.

``locate`` turns any of these into a local file, so that everything that takes weights takes them
all. What is downloaded is pinned: an address carries the SHA-256 of its file, a repository may
carry a revision. Nothing is ever unpickled on the way.
"""

import hashlib
import http.client
import re
import urllib.request
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from bcosvit.files import atomic, cache_folder

FOLDER = Path(__file__).parents[1] / "pretrained"
"""Package data: NAME.safetensors with its model card NAME.md."""

DEFAULT = "bcos_vit_ti_87_imagenette"
"""The shipped model that is used where none is asked for."""

HUB_FILE = "model.safetensors"
"""What a repository of the hub calls its weights, unless the address names a file."""

_CHUNK = 1 << 20
_TIMEOUT = 30
"""Seconds without a byte after which a download is given up."""


def shipped() -> tuple[str, ...]:
    """Names of the models whose weights came with this installation."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.safetensors")))


def locate(where: str | Path) -> Path:
    """The local file that ``where`` means.

    A shipped name; a path, of a file or of a folder that ``save_pretrained`` wrote; ``file://PATH``;
    ``https://ADDRESS#sha256=SUM``; or ``hf://OWNER/REPOSITORY[@REVISION][/FILE]``. The last two are
    fetched once and kept.
    """
    if isinstance(where, str):
        if where in shipped():
            return FOLDER / f"{where}.safetensors"
        scheme = where.partition("://")[0].lower() if "://" in where else ""
        if scheme in ("https", "http"):
            return _download(where)
        if scheme == "hf":
            return _from_hub(where)
        if scheme == "file":
            return _from_file_address(where)
        if scheme:
            raise ValueError(
                f"{where} cannot be fetched: {scheme}:// is not known here; give {_allowed()}."
            )
    path = Path(where)
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
    name = Path(unquote(parts.path)).name.lstrip(".") or HUB_FILE
    target = cache_folder("weights") / wanted[:16] / name
    if target.is_file() and _sum_of(target) == wanted:
        return target
    address = urlunsplit(parts._replace(fragment=""))
    with atomic(target) as temporary:
        try:
            with (
                urllib.request.urlopen(address, timeout=_TIMEOUT) as answer,
                temporary.open("wb") as file,
            ):
                while chunk := answer.read(_CHUNK):
                    file.write(chunk)
        except (OSError, http.client.HTTPException) as error:
            raise ValueError(
                f"{address} cannot be fetched ({error}); check the address and the network."
            ) from error
        if (found := _sum_of(temporary)) != wanted:
            raise ValueError(
                f"{address} gave a file with the SHA-256 {found}, not {wanted} as asked for, so it "
                f"is not used; check the address, and whether the file was replaced."
            )
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
        while chunk := file.read(_CHUNK):
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
    """A file of a repository on the hub, from the hub's own cache where it is there already."""
    try:
        from huggingface_hub import hf_hub_download
    except ModuleNotFoundError as missing:
        raise ValueError(
            f"The hub needs {missing.name}, which is not installed: pip install 'bcosvit[hub]'."
        ) from missing
    try:
        return Path(hf_hub_download(repo, name, revision=revision, token=token))
    # Anything between a missing network and a gated repository, from several libraries.
    except Exception as error:
        reason = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
        raise ValueError(
            f"{name} of {repo} cannot be fetched from the hub ({reason}); check the name, the "
            f"revision and the network."
        ) from error
