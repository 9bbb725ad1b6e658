"""The models whose weights come with the package, and which of them is the default.

This module imports nothing heavy, so that help texts can name the models.
"""

from pathlib import Path

FOLDER = Path(__file__).parent / "pretrained"
"""Package data: NAME.safetensors with its model card NAME.md."""

DEFAULT = "bcos_efficientnet_lite2_imagenet"
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
