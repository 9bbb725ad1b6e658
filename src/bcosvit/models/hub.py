"""Models as repositories: ``save_pretrained``, ``from_pretrained``, ``push_to_hub``.

The interface is that of huggingface_hub's mixin. Its class would have to be imported to be
inherited from, and the library is optional, so this one is our own; huggingface_hub is imported
when something is pushed or fetched. A folder holds ``model.safetensors`` (which alone is enough
for ``bcosvit.load``), ``config.json`` for people and the hub, and the card, ``README.md``.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from bcosvit.files import atomic
from bcosvit.models.card import card_of
from bcosvit.models.config import Config, to_dict
from bcosvit.models.pretrained import HUB_FILE, hub_file, locate

if TYPE_CHECKING:
    from bcosvit.models.base import AnyModel

H = TypeVar("H", bound="HubMixin")


class HubMixin:
    """What every classifier can do with a folder or a repository."""

    config: Config

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        metadata: Mapping[str, str] | None = None,
        pictures: Mapping[str, bytes] | None = None,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **options: Any,
    ) -> None:
        """Writes weights, config and card to ``folder``.

        ``metadata`` goes into the weights as with ``bcosvit.save`` (class names, run);
        ``pictures``, files by name, are shown in the card. With ``push_to_hub`` the folder then
        goes to ``repo_id``, by default its own name; ``options`` are those of ``push_to_hub``.
        """
        # Weights know models, and models are made of this.
        from bcosvit.models.weights import save

        folder = Path(folder)
        notes, pictures = dict(metadata or {}), dict(pictures or {})
        save(cast("AnyModel", self), folder / HUB_FILE, metadata=notes)
        config = {"library_name": "bcosvit", "config": to_dict(self.config)}
        texts = {
            "config.json": json.dumps(config, indent=2) + "\n",
            "README.md": card_of(self.config, notes, tuple(pictures), repo_id),
        }
        files = {name: text.encode() for name, text in texts.items()} | pictures
        for name, content in files.items():
            with atomic(folder / name) as temporary:
                temporary.write_bytes(content)
        if push_to_hub:
            _upload(folder, repo_id or folder.name, **options)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        metadata: Mapping[str, str] | None = None,
        pictures: Mapping[str, bytes] | None = None,
        commit_message: str = "Add model",
        private: bool | None = None,
        token: str | None = None,
        branch: str | None = None,
        create_pr: bool | None = None,
    ) -> str:
        """Makes the repository where there is none, fills it, and returns the commit's address."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, metadata=metadata, pictures=pictures, repo_id=repo_id)
            return _upload(
                Path(folder),
                repo_id,
                commit_message=commit_message,
                private=private,
                token=token,
                branch=branch,
                create_pr=create_pr,
            )

    @classmethod
    def from_pretrained(
        cls: type[H],
        where: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
    ) -> H:
        """The model in a folder, in a repository ``OWNER/NAME``, or anywhere else that
        ``bcosvit.load`` takes, in evaluation mode."""
        from bcosvit.models.weights import load

        model = load(_weights_of(where, revision, token))
        if not isinstance(model, cls):
            raise ValueError(
                f"{where} holds a {type(model).__name__}, not a {cls.__name__}; "
                f"load it with bcosvit.load."
            )
        return model


def _weights_of(where: str | Path, revision: str | None, token: str | bool | None) -> Path:
    if isinstance(where, str) and where.count("/") == 1 and not Path(where).exists():
        return hub_file(where, HUB_FILE, revision=revision, token=token)
    if revision is not None:
        raise ValueError(f"{where} is no repository, so it has no revision; leave revision out.")
    return locate(where)


def _upload(
    folder: Path,
    repo_id: str,
    *,
    commit_message: str = "Add model",
    private: bool | None = None,
    token: str | None = None,
    branch: str | None = None,
    create_pr: bool | None = None,
) -> str:
    try:
        from huggingface_hub import HfApi
    except ModuleNotFoundError as missing:
        raise ValueError(
            f"The hub needs {missing.name}, which is not installed: pip install 'bcosvit[hub]'."
        ) from missing
    api = HfApi(token=token)
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
