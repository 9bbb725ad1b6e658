"""The page and the API as one Gradio app, and the server that runs it.

Nothing leaves the machine: analytics are off, fonts are the system's, server-side rendering by Node
is off, and a content security policy forbids the browser to contact other hosts. Uploads and
downloads are deleted after a while, and when the server stops.
"""

import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any

import gradio as gr
from gradio import http_server
from gradio.exceptions import InvalidPathError
from starlette.middleware import Middleware

from bcosvit.web.api import ENDPOINTS, add_api, all_arguments, check_call
from bcosvit.web.audits import audit_routes
from bcosvit.web.direct import Direct
from bcosvit.web.guard import WENT_WRONG, Guard, allowed_hosts, impatient
from bcosvit.web.jobs import JOBS, Jobs
from bcosvit.web.page import STATIC, add_page
from bcosvit.web.service import ExplanationService

SESSIONS = 100
"""How many sessions Gradio stores, where each request of the API is one, too. They contain nothing
of ours, so that a user whose session is deleted does not notice."""

FONTS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "sans-serif")
MONO = ("ui-monospace", "SF Mono", "Menlo", "Consolas", "monospace")

_FOLDER = "GRADIO_TEMP_DIR"


def build(service: ExplanationService) -> gr.Blocks:
    """Builds the Gradio app with page and API."""
    limits = service.limits
    with gr.Blocks(
        title="bcosvit: what the model saw",
        analytics_enabled=False,
        delete_cache=(max(1, limits.seconds // 10), limits.seconds),
    ) as blocks:
        add_page(service)
        add_api(service)
        blocks.load(None, js=(STATIC / "paste.js").read_text(), api_visibility="private")
    # The guard refuses what is too much, and nothing skips the queue.
    blocks.queue(max_size=None, api_open=False)
    setattr(blocks, JOBS, Jobs(blocks, limits))
    blocks.process_api = _with_sentences(blocks.process_api, partial(check_call, service))
    return blocks


def _with_sentences(
    process: Callable[..., Awaitable[dict[str, Any]]], check: Callable[[str, Any], None]
) -> Callable[..., Awaitable[dict[str, Any]]]:
    """Returns Gradio's ``process_api`` with a sentence for each error, and no traceback."""

    @wraps(process)
    async def process_api(block_fn: Any, inputs: list[Any], *rest: Any, **named: Any) -> Any:
        is_endpoint = getattr(block_fn, "api_name", None) in ENDPOINTS
        try:
            if is_endpoint:
                inputs = all_arguments(block_fn.api_name, inputs)
                check(block_fn.api_name, inputs)
            return await process(block_fn, inputs, *rest, **named)
        except gr.Error:
            raise
        except InvalidPathError:
            message = "The picture is not an upload of this server, or was deleted: upload it."
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            # Of ours come sentences; of Gradio's, about what a page or a program has sent.
            message = f"{error}" if is_endpoint and type(error) is ValueError else _INVALID
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            message = WENT_WRONG
        raise gr.Error(message, print_exception=False)

    return process_api


_INVALID = "The request is not valid: load the page again, or see the API's description."


class Server(http_server.Server):
    """Gradio's server, which listens before it starts: who connects early waits.

    Gradio's own finds out that a port is free, leaves it, and takes it later, when somebody else
    may have it; and it gives up on a machine that needs more than five seconds for that.
    """

    def run_in_thread(self) -> None:
        host, port = self.config.host, self.config.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=self.config.backlog)
        sockets = {"sockets": [listening]}
        self.thread = threading.Thread(target=self.run, kwargs=sockets, daemon=True)
        self.thread.start()
        while not self.started:
            if not self.thread.is_alive():
                listening.close()
                raise OSError(f"The server at port {port} ended before it had started.")
            time.sleep(1e-3)


@contextmanager
def _listening_first() -> Iterator[None]:
    """While it lasts, what Gradio launches is `Server`."""
    before, http_server.Server = http_server.Server, Server  # type: ignore[misc]
    try:
        yield
    finally:
        http_server.Server = before  # type: ignore[misc]


@contextmanager
def serving(
    service: ExplanationService,
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    root_path: str | None = None,
    allow_hosts: Sequence[str] = (),
    audit: str | None = None,
) -> Iterator[str]:
    """Serves page and API in background threads until the block ends.

    Args:
        service: What is served.
        host: The address to listen on.
        port: The port to listen on.
        root_path: The path or address at which a proxy shows the page.
        allow_hosts: Names by which the server may be addressed, besides its own.
        audit: The folder of an audit, which is served at ``/audit/``.

    Yields:
        The address of the page.

    Raises:
        ValueError: If the port cannot be used.
    """
    limits = service.limits
    # A folder without an audit is found before the server runs.
    pages = None if audit is None else audit_routes(service, audit)
    with _temporary_files() as folder:
        blocks = build(service)
        guard = Middleware(
            Guard,
            hosts=allowed_hosts(host, allow_hosts, root_path),
            limits=limits,
            folder=folder,
            check=partial(check_call, service),
            jobs=(jobs := getattr(blocks, JOBS)),
            direct=Direct(service, jobs, folder),
        )
        try:
            with _listening_first():
                blocks.launch(
                    server_name=host,
                    server_port=port,
                    root_path=root_path,
                    max_file_size=limits.megabytes * 1_000_000,
                    # Waiting requests have threads of their own, so that none waits for a thread.
                    max_threads=limits.queue + limits.concurrency + 8,
                    theme=_theme(),
                    css=(STATIC / "style.css").read_text(),
                    footer_links=["api"],
                    app_kwargs={"middleware": [guard]},
                    share=False,
                    ssr_mode=False,
                    run_history=False,
                    enable_monitoring=False,
                    quiet=True,
                    prevent_thread_lock=True,
                    state_session_capacity=SESSIONS,
                )
        except OSError as error:
            raise ValueError(
                f"Port {port} of {host} cannot be used; give another with --port or --host."
            ) from error
        config = blocks.server.config
        config.http_protocol_class = impatient(config.http_protocol_class, limits.upload_seconds)
        stop = threading.Event()
        sweeper = threading.Thread(target=_sweep, args=(folder, service, stop), daemon=True)
        sweeper.start()
        if pages is not None:
            # First, since Gradio's own routes take what they can.
            blocks.app.router.routes.insert(0, pages)
        try:
            yield str(blocks.local_url)
        finally:
            stop.set()
            blocks.close(verbose=False)
            sweeper.join()


def _sweep(folder: str, service: ExplanationService, stop: threading.Event) -> None:
    """Deletes files that are too old, also those of uploads that were broken off."""
    seconds = service.limits.seconds
    while not stop.wait(min(60.0, max(0.5, seconds / 10))):
        service.forget()
        for path in sorted(Path(folder).rglob("*"), reverse=True):
            # Somebody else may delete it first, and a folder may be in use.
            with suppress(OSError):
                if time.time() - path.stat().st_mtime < seconds:
                    continue
                path.rmdir() if path.is_dir() else path.unlink()


@contextmanager
def _temporary_files() -> Iterator[str]:
    """A folder for uploads and downloads, which is always removed at the end.

    Gradio removes its files only if it ends while no browser is connected.
    """
    before = os.environ.get(_FOLDER)
    with tempfile.TemporaryDirectory(prefix="bcosvit-", dir=before) as folder:
        # As Gradio writes it.
        folder = os.environ[_FOLDER] = str(Path(folder).resolve())
        try:
            yield folder
        finally:
            if before is None:
                del os.environ[_FOLDER]
            else:
                os.environ[_FOLDER] = before


def _theme() -> gr.themes.Base:
    """Few colors, the system's fonts, and enough contrast for all text."""
    soft = {
        f"{name}{mode}": color
        for name in ("body_text_color_subdued", "block_info_text_color", "block_label_text_color")
        for mode, color in (("", "*neutral_600"), ("_dark", "*neutral_300"))
    }
    return gr.themes.Base(primary_hue="red", neutral_hue="zinc", font=FONTS, font_mono=MONO).set(
        **soft
    )
