"""Adapts docstrings to mkdocstrings, which would otherwise read some of their parts as Markdown.

The section ``Example:`` is known to it in the plural only, and roles such as ``:func:`` not at all.
"""

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Rewrites all docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **options: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
            obj.docstring.value = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text)
