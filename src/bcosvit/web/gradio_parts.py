"""What page and API share of Gradio: a safe upload, files that are handed out, errors."""

import functools
import html
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr

from bcosvit.web.limits import Limits


def upload(**options: Any) -> gr.File:
    """A file component that takes what was uploaded, and fetches nothing for anybody."""
    component = gr.File(**options)
    keep = component.async_move_resource_to_block_cache

    async def keep_uploads(url_or_file_path: str | Path | None) -> str | None:
        if str(url_or_file_path).startswith(("http:", "https:")):
            raise gr.Error(
                "Pictures are not fetched from addresses: upload the file.", print_exception=False
            )
        return await keep(url_or_file_path)

    # On the object: for a class of ours Gradio would write a stub file beside this one.
    component.async_move_resource_to_block_cache = keep_uploads  # type: ignore[method-assign]
    return component


def told(function: Callable[..., Any], *, as_html: bool = False) -> Callable[..., Any]:
    """``function`` with a ``ValueError`` as the one sentence that a user is told.

    The page shows messages as HTML, and they quote names that a stranger has chosen.
    """

    @functools.wraps(function)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except ValueError as error:
            message = html.escape(str(error)) if as_html else str(error)
            raise gr.Error(message, print_exception=False) from None

    return wrapped


def handed_out(component: gr.components.Component, make: Callable[[Path], Path]) -> str:
    """A file that ``make`` writes into a folder, kept by Gradio until it is old.

    In a folder of its own: Gradio puts equal contents into one file, which a second user would
    write while the first one reads.
    """
    own = Path(tempfile.mkdtemp(dir=component.GRADIO_CACHE))
    with tempfile.TemporaryDirectory() as folder:
        kept = shutil.move(made := make(Path(folder)), own / made.name)
    component.temp_files.add(str(kept))
    return str(kept)


def queued(limits: Limits) -> dict[str, Any]:
    """All that uses the model waits in one line."""
    return {"concurrency_id": "model", "concurrency_limit": limits.concurrency}
