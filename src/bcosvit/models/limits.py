"""The bounds of the fields of configs, which come with weights of unknown origin.

A model is described before its weights are compared with it, so every field has a range.
"""

from typing import Any

from bcosvit.messages import printable

LIMITS = {
    "num_classes": 1_000_000,
    "width": 65_536,
    "num_heads": 4_096,
    "depth": 1_000,
    "maxout": 64,
    "patch": 1_024,
    "tap": 65_536,
    "image_size": 16_384,
    "growth": 4_096,
    "bottleneck": 64,
    "stem_width": 65_536,
    "blocks": 1_000,
    "widths": 65_536,
}
"""The largest value of every whole number in a config, far above what is of use."""
MOST_STAGES = 8
"""Dense blocks of a DenseNet, convolutions of a stem."""
LARGEST_NUMBER = 1e9
"""The largest size of numbers that need not be whole."""


def check_choice(what: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises an error unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ValueError(
            f"{what} = {_shown(value)} is not allowed: choose from {', '.join(allowed)}."
        )


def check_number(what: str, value: object) -> None:
    """Raises an error unless ``value`` is a number of at most `LARGEST_NUMBER` either way."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{what} = {_shown(value)} is not allowed: give a number.")
    # Comparisons with nan are false.
    if not -LARGEST_NUMBER <= value <= LARGEST_NUMBER:
        raise ValueError(
            f"{what} = {value:g} is not allowed: give a finite number of at most "
            f"{LARGEST_NUMBER:g} either way."
        )


def check_positive(what: str, value: object) -> None:
    """Raises an error unless ``value`` is a whole number from 1 to its limit."""
    if not _is_whole(what, value):
        raise ValueError(
            f"{what} = {_shown(value)} is not allowed: give an integer from 1 to {LIMITS[what]}."
        )


def check_stages(what: str, values: tuple[Any, ...], meaning: str) -> None:
    """Raises an error unless ``values`` are up to `MOST_STAGES` numbers within their limit."""
    if not 1 <= len(values) <= MOST_STAGES or not all(_is_whole(what, v) for v in values):
        raise ValueError(
            f"{what} = {_shown(values)} is not allowed: give 1 to {MOST_STAGES} integers from 1 to "
            f"{LIMITS[what]}, the {meaning}."
        )


def check_size(pair: tuple[Any, ...]) -> None:
    """Raises an error unless ``pair`` is a height and a width within their limit."""
    if len(pair) != 2 or not all(_is_whole("image_size", side) for side in pair):
        raise ValueError(
            f"image_size = {_shown(pair)} is not allowed: give pixels, or (height, width), from 1 "
            f"to {LIMITS['image_size']} each."
        )


def check_flag(what: str, value: object) -> None:
    """Raises an error unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{what} = {_shown(value)} is not allowed: give True or False.")


def check_text(what: str, value: object) -> None:
    """Raises an error unless ``value`` is a printable text of at most 1000 characters."""
    if not isinstance(value, str) or len(value) > 1000 or not value.isprintable():
        raise ValueError(
            f"{what} = {_shown(value)} is not allowed: give a text of at most 1000 characters."
        )


def _is_whole(what: str, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LIMITS[what]


def _shown(value: object) -> str:
    return printable(repr(value), 100)
