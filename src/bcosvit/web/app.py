"""The page and the API as one Gradio app, and the server that runs it.

Nothing leaves the machine: analytics are off, fonts are the system's, server-side rendering by Node
is off, and a content security policy forbids the browser to contact other hosts. Uploads and
downloads are deleted after a while, and when the server stops.
"""

import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import gradio as gr
from starlette.middleware import Middleware

from bcosvit.web.api import add_api
from bcosvit.web.page import STATIC, add_page
from bcosvit.web.service import ExplanationService

POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'"
)
"""Gradio's page needs inline scripts; other hosts are never contacted."""

SESSIONS = 100
"""How many sessions Gradio stores, where each request of the API is one, too. They contain nothing
of ours, so that a user whose session is deleted does not notice."""

FONTS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "sans-serif")
MONO = ("ui-monospace", "SF Mono", "Menlo", "Consolas", "monospace")

_FOLDER = "GRADIO_TEMP_DIR"

Message = MutableMapping[str, Any]


class SecurityPolicy:
    """ASGI middleware that adds the content security policy to all responses."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                policy = (b"content-security-policy", POLICY.encode())
                message["headers"] = [*message.get("headers", ()), policy]
            await send(message)

        await self.app(scope, receive, sending)


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
    blocks.queue(max_size=limits.queue)
    return blocks


@contextmanager
def serving(
    service: ExplanationService,
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    root_path: str | None = None,
) -> Iterator[str]:
    """Serves page and API in background threads until the block ends.

    Args:
        service: What is served.
        host: The address to listen on.
        port: The port to listen on.
        root_path: The path or address at which a proxy shows the page.

    Yields:
        The address of the page.

    Raises:
        ValueError: If the port cannot be used.
    """
    with _temporary_files():
        blocks = build(service)
        try:
            blocks.launch(
                server_name=host,
                server_port=port,
                root_path=root_path,
                max_file_size=service.limits.megabytes * 1_000_000,
                theme=_theme(),
                css=(STATIC / "style.css").read_text(),
                footer_links=["api"],
                app_kwargs={"middleware": [Middleware(SecurityPolicy)]},
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
        try:
            yield str(blocks.local_url)
        finally:
            blocks.close(verbose=False)


@contextmanager
def _temporary_files() -> Iterator[None]:
    """A folder for uploads and downloads, which is always removed at the end.

    Gradio removes its files only if it ends while no browser is connected.
    """
    before = os.environ.get(_FOLDER)
    with tempfile.TemporaryDirectory(prefix="bcosvit-", dir=before) as folder:
        os.environ[_FOLDER] = folder
        try:
            yield
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
