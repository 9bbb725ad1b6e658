"""The weights and the photographs that come with the package, and the default model.

This module imports nothing heavy, so that help texts can name the models.
"""

from pathlib import Path

from bcosvit.messages import unknown

FOLDER = Path(__file__).parent / "pretrained"
"""Package data: NAME.safetensors with its model card NAME.md."""

PHOTOS = Path(__file__).parent / "photos"
"""Free photographs to try, with their authors in README.md."""

DEFAULT = "bcos_vit_lite2_imagenet"
"""The shipped model that is used where none is asked for."""


def shipped() -> tuple[str, ...]:
    """Lists the models whose weights came with this installation.

    Examples:
        >>> DEFAULT in shipped() or not shipped()
        True
    """
    return tuple(sorted(path.stem for path in FOLDER.glob("*.safetensors")))


def shipped_file(name: str) -> Path:
    """Returns the weights file of a shipped model."""
    return FOLDER / f"{name}.safetensors"


def photo(name: str = "chelsea") -> Path:
    """Returns the path of a photograph to try.

    Args:
        name: One of chelsea (a cat), coffee (a cup) and rocket.

    Raises:
        ValueError: There is no such photograph.

    Examples:
        >>> photo("coffee").name
        'coffee.jpg'
    """
    names = {path.stem: path for path in sorted(PHOTOS.glob("*.jpg"))}
    if name not in names:
        raise ValueError(unknown("photograph", name, names))
    return names[name]
