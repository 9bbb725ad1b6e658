"""Makes mkdocstrings render the section ``Example:`` of a docstring as code.

It only knows the plural, and would read the code of the singular as Markdown.
"""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the section in all docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **options: Any) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"^(\s*)Example:$", r"\1Examples:", text, flags=re.M)
