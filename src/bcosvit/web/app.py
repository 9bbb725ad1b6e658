"""The demo as one Gradio app, and how it is started.

Nothing leaves the machine: analytics are off, fonts are the system's, server-side rendering by Node
is off, and a content security policy forbids the browser every other host. Uploads and files that
were made are deleted after a while, and when the server stops.
"""

import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import gradio as gr
from starlette.middleware import Middleware

from bcosvit.web import style
from bcosvit.web.answers import Answers
from bcosvit.web.api import add_api
from bcosvit.web.page import add_page

POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'"
)
"""Gradio's page needs inline scripts; what matters is that nothing is asked of other hosts."""

SESSIONS = 100
"""Of which Gradio keeps a copy of the page's settings; a request of the API is one, too. Nothing of
ours is in them, so that a user whose session is dropped does not notice."""

_FOLDER = "GRADIO_TEMP_DIR"

Message = MutableMapping[str, Any]


class SameHost:
    """Puts the policy on every answer; written for ASGI, so that streams stay streams."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                policy = (b"content-security-policy", POLICY.encode())
                message["headers"] = [*message.get("headers", ()), policy]
            await send(message)

        await self.app(scope, receive, sending)


def build(answers: Answers) -> gr.Blocks:
    """Page and API."""
    limits = answers.limits
    with gr.Blocks(
        title="bcosvit: what the model saw",
        analytics_enabled=False,
        delete_cache=(max(1, limits.seconds // 10), limits.seconds),
    ) as blocks:
        add_page(answers)
        add_api(answers)
        blocks.load(None, js=style.PASTE, api_visibility="private")
    blocks.queue(max_size=limits.queue)
    return blocks


@contextmanager
def serving(
    answers: Answers, *, host: str = "127.0.0.1", port: int = 7860, root_path: str | None = None
) -> Iterator[str]:
    """Serves in threads of its own until the block ends; yields the address."""
    with _own_files():
        blocks = build(answers)
        try:
            blocks.launch(
                server_name=host,
                server_port=port,
                root_path=root_path,
                max_file_size=answers.limits.megabytes * 1_000_000,
                theme=_theme(),
                css=style.CSS,
                footer_links=["api"],
                app_kwargs={"middleware": [Middleware(SameHost)]},
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
def _own_files() -> Iterator[None]:
    """A folder for what is uploaded and made, removed whatever happens.

    Gradio removes its files when it ends well, which it does not while a browser is connected.
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
    """Calm, with the system's fonts, and every text dark or light enough to be read."""
    soft = {
        f"{name}{mode}": color
        for name in ("body_text_color_subdued", "block_info_text_color", "block_label_text_color")
        for mode, color in (("", "*neutral_600"), ("_dark", "*neutral_300"))
    }
    return gr.themes.Base(
        primary_hue="red", neutral_hue="zinc", font=style.FONTS, font_mono=style.MONO
    ).set(**soft)
