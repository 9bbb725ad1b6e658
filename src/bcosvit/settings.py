"""``--set key=value`` on the command line."""

import ast
from collections.abc import Iterable
from typing import Any


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """Parses settings of the form ``key=value``; values are Python literals (numbers, tuples, True,
    None), else text.

    Raises:
        ValueError: A setting has no key or no equals sign.

    Examples:
        >>> parse_settings(["b=1.5", "position=add"])
        {'b': 1.5, 'position': 'add'}
    """
    parsed: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ValueError(f"{setting!r} is not a setting; write key=value, e.g. maxout=1.")
        try:
            parsed[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            parsed[key.strip()] = value.strip()
    return parsed


def parse_values(text: str | None) -> tuple[int, ...] | None:
    """Parses whole numbers that are separated by commas.

    Raises:
        ValueError: The text is no such list.

    Examples:
        >>> parse_values("1,3")
        (1, 3)
    """
    if text is None:
        return None
    try:
        return tuple(int(value) for value in text.split(","))
    except ValueError:
        raise ValueError(
            f"{text!r} is no list of whole numbers; separate them by commas, e.g. 1,3."
        ) from None
