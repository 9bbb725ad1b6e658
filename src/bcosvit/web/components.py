"""What the page and the API have in common: uploads, files to download, error messages."""

import functools
import html
import inspect
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import gradio as gr

from bcosvit.attribution.passes import Cancelled, cancellable
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

    It ends early where the user has left; a generator looks after that itself.

    Args:
        function: The function, or a function whose results are shown one after the other.
        as_html: Whether messages are escaped, because the page shows them as HTML.
    """

    @functools.wraps(function)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        with _messages(as_html), cancellable(has_left()):
            return function(*arguments, **named)

    @functools.wraps(function)
    def streamed(*arguments: Any, **named: Any) -> Any:
        with _messages(as_html):
            yield from function(*arguments, **named)

    return streamed if inspect.isgeneratorfunction(function) else wrapped


@contextmanager
def _messages(as_html: bool) -> Iterator[None]:
    try:
        yield
        return
    except ValueError as error:
        message = html.escape(str(error)) if as_html else str(error)
    except FileNotFoundError:
        message = "The upload has been deleted in the meantime: upload the picture again."
    except Cancelled:
        message = "The request was given up."
    raise gr.Error(message, print_exception=False)


class Latest:
    """The latest request of each page; earlier ones are given up.

    Examples:
        >>> latest = Latest()
        >>> first = latest.begin("page")
        >>> first.is_latest()
        True
        >>> second = latest.begin("page")
        >>> first.is_latest(), second.is_latest()
        (False, True)
    """

    PAGES = 10_000
    """Pages that are remembered."""

    def __init__(self) -> None:
        self._latest: OrderedDict[str, LatestRequest] = OrderedDict()
        self._lock = Lock()

    def begin(self, page: str) -> "LatestRequest":
        """Begins a request of a page."""
        request = LatestRequest(self, page)
        with self._lock:
            self._latest[page] = request
            self._latest.move_to_end(page)
            if len(self._latest) > self.PAGES:
                self._latest.popitem(last=False)
        return request

    def stop(self, page: str) -> None:
        """Stops the latest request of a page, because its user says so."""
        with self._lock:
            if page in self._latest:
                self._latest[page].stopped = True

    def has(self, request: "LatestRequest") -> bool:
        """Whether no later request of the same page has begun."""
        with self._lock:
            return self._latest.get(request.page) is request


class LatestRequest:
    """One request of a page, as `Latest` counts them."""

    def __init__(self, latest: Latest, page: str) -> None:
        self.latest, self.page = latest, page
        self.stopped = False
        """Whether the user has stopped it."""

    def is_latest(self) -> bool:
        """Whether no later request of the same page has begun."""
        return self.latest.has(self)


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
