"""What the page and the API have in common: uploads, files to download, error messages."""

import functools
import html
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr

from bcosvit.attribution.base import Cancelled, cancellable
from bcosvit.web.jobs import has_left


def upload_component(**options: Any) -> gr.File:
    """Returns a file component that accepts uploads only, not addresses that the server fetches."""
    component = gr.File(**options)
    original = component.async_move_resource_to_block_cache

    async def uploads_only(url_or_file_path: str | Path | None) -> str | None:
        if str(url_or_file_path).startswith(("http:", "https:")):
            raise gr.Error(
                "Pictures are not fetched from addresses: upload the file.", print_exception=False
            )
        return await original(url_or_file_path)

    # On the object, since Gradio writes a stub file beside the source of each subclass.
    component.async_move_resource_to_block_cache = uploads_only  # type: ignore[method-assign]
    return component


def with_messages(function: Callable[..., Any], *, as_html: bool = False) -> Callable[..., Any]:
    """Returns ``function`` with each ``ValueError`` turned into a message for the user.

    It ends early where the user has left.

    Args:
        function: The function.
        as_html: Whether messages are escaped, because the page shows them as HTML.
    """

    @functools.wraps(function)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        try:
            with cancellable(has_left()):
                return function(*arguments, **named)
        except ValueError as error:
            message = html.escape(str(error)) if as_html else str(error)
        except FileNotFoundError:
            message = "The upload has been deleted in the meantime: upload the picture again."
        except Cancelled:
            message = "The request was given up."
        raise gr.Error(message, print_exception=False)

    return wrapped


def downloadable(component: gr.components.Component, write: Callable[[Path], Path]) -> str:
    """Writes a file to download, which Gradio deletes when it is old.

    Args:
        component: The component that offers the file.
        write: A function that writes a file into a folder and returns its path.

    Returns:
        The path. Each file gets its own folder, since Gradio stores equal contents as one file,
        which a second user would overwrite while the first one reads it.
    """
    own = Path(tempfile.mkdtemp(dir=component.GRADIO_CACHE))
    with tempfile.TemporaryDirectory() as folder:
        moved = shutil.move(made := write(Path(folder)), own / made.name)
    component.temp_files.add(str(moved))
    return str(moved)


QUEUE: dict[str, Any] = {"concurrency_limit": None}
"""The options of all events: the service itself decides what runs at the same time."""
