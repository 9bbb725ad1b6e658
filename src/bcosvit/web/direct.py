"""The HTTP API in one step: a request to ``/api/…`` is answered by JSON.

Gradio's way, which the page and ``gradio_client`` go, takes an upload, a call and a stream of
events. Here a form holds the picture, or JSON the path of one that has been uploaded before. The
guard checks host, size and speed of these requests, too.
"""

import asyncio
import base64
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from anyio import CapacityLimiter, to_thread
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import JSONResponse

from bcosvit.attribution.passes import Cancelled, cancellable
from bcosvit.report.explain import TOP
from bcosvit.report.images import png_bytes
from bcosvit.web import answers
from bcosvit.web.api import ENDPOINTS, META, check_call
from bcosvit.web.guard import DIRECT, Receive, Refusal, Scope, Send
from bcosvit.web.jobs import Jobs
from bcosvit.web.service import ExplanationService

NAMES = ("model", "predict", "explain", "region")
"""The endpoints; reports are files, which Gradio keeps."""

_DEFAULTS = {
    "picture": None,
    "label": "",
    "method": "",
    "top": TOP,
    "overlay": 0.75,
    "joint": False,
    "strict": False,
    **dict.fromkeys(("x", "y", "width", "height")),
}


class Direct:
    """ASGI app; see the module.

    Args:
        service: What is asked.
        jobs: How many requests wait.
        folder: The folder of uploads.
    """

    def __init__(self, service: ExplanationService, jobs: Jobs, folder: str) -> None:
        self.service, self.jobs, self.folder = service, jobs, Path(folder)
        limits = service.limits
        self._most = limits.queue + limits.concurrency
        self._threads: CapacityLimiter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        name = scope["path"].removeprefix(DIRECT).rstrip("/")
        if name not in NAMES:
            known = ", ".join(DIRECT + each for each in NAMES)
            raise Refusal(404, f"There is no endpoint {DIRECT + name[:64]!r}; choose from {known}.")
        if (scope["method"] == "GET") != (name == "model"):
            needed = "GET" if name == "model" else "POST"
            raise Refusal(
                405, f"{scope['method']} is not supported at {DIRECT}{name}; use {needed}."
            )
        if name == "model":
            answer = await self._computed(request, partial(answers.model, self.service))
        else:
            if self.jobs.is_full():
                raise Refusal(503, self.jobs.FULL)
            with self.jobs.direct():
                answer = await self._asked(request, name)
        await JSONResponse(answer)(scope, receive, send)

    async def _asked(self, request: Request, name: str) -> dict[str, Any]:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "application/json":
            return await self._answered(request, name, await request.json())
        if kind != "multipart/form-data":
            raise Refusal(
                415,
                "The request is neither a form nor JSON; send multipart/form-data with picture, or "
                "application/json with the path of an upload.",
            )
        try:
            form = await request.form(max_files=1, max_fields=20)
        except (HTTPException, MultiPartException) as error:
            about = getattr(error, "detail", None) or getattr(error, "message", "")
            raise Refusal(400, f"The form is damaged ({about}); send it again.") from None
        try:
            given: dict[str, Any] = {}
            for key, value in form.multi_items():
                if key in given:
                    raise Refusal(422, f"{key[:64]!r} is given twice; give it once.")
                given[key] = value if isinstance(value, UploadFile) else _parsed(name, key, value)
            return await self._answered(request, name, given)
        finally:
            await form.close()

    async def _answered(self, request: Request, name: str, given: dict[str, Any]) -> dict[str, Any]:
        try:
            run = self._prepared(name, given)
        except ValueError as error:
            raise Refusal(422, str(error)) from None
        return await self._computed(request, run)

    def _prepared(self, name: str, given: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        """Checks the arguments of an endpoint, and returns what computes its answer."""
        given = dict(given)
        images = given.pop("images", False) if name == "explain" else False
        if not isinstance(images, bool):
            raise ValueError("images is wrong: give true or false.")
        picture = given.pop("picture", None)
        upload = isinstance(picture, UploadFile)
        if not (upload or picture is None or isinstance(picture, str)):
            raise ValueError("picture is wrong: give a file, or the path of an upload.")
        known = None if upload or picture is None else {"path": picture, "meta": META}
        check_call(self.service, name, {**given, "picture": known})
        given = {key: given.get(key, _DEFAULTS[key]) for key in ENDPOINTS[name] if key != "picture"}
        opened = picture.file if isinstance(picture, UploadFile) else self._found(picture)
        return partial(_ANSWERS[name], self.service, opened, images=images, **given)

    def _found(self, picture: str | None) -> str | None:
        """The path of an upload, if it is one."""
        if not picture:
            return None
        path = Path(picture).resolve()
        if not path.is_relative_to(self.folder):
            raise ValueError(
                "The picture is not an upload of this server, or was deleted: upload it."
            )
        return str(path)

    async def _computed(
        self, request: Request, run: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Runs in a thread of its own, and gives up where the client hangs up."""
        if self._threads is None:
            self._threads = CapacityLimiter(self._most)
        left = threading.Event()

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            left.set()

        def compute() -> dict[str, Any]:
            with cancellable(left.is_set):
                return run()

        watching = asyncio.create_task(watch())
        try:
            return await to_thread.run_sync(compute, limiter=self._threads)
        except ValueError as error:
            raise Refusal(422, str(error)) from None
        except FileNotFoundError:
            raise Refusal(
                422, "The upload has been deleted in the meantime: upload the picture again."
            ) from None
        except Cancelled:
            raise Refusal(400, "The request was given up.") from None
        finally:
            watching.cancel()


def _parsed(endpoint: str, name: str, text: str) -> Any:
    """The value of a form's field, whose text says a number or a switch."""
    kind = "switch" if name == "images" else ENDPOINTS[endpoint].get(name)
    if kind == "switch":
        return {"true": True, "false": False}.get(text.strip().lower(), text)
    if kind == "number":
        try:
            return float(text)
        except ValueError:
            return text
    return text


def _explained(
    service: ExplanationService,
    picture: answers.Picture,
    *,
    label: str,
    method: str,
    overlay: float | None,
    joint: bool,
    strict: bool,
    images: bool,
) -> dict[str, Any]:
    if overlay is None:
        raise ValueError("overlay is missing: give a number from 0 to 1.")
    found = answers.explain(service, picture, label, method, joint=joint, strict=strict)
    if not images:
        return found.numbers
    drawn = {
        name: None if image is None else base64.b64encode(png_bytes(image)).decode()
        for name, image in found.images(overlay).items()
    }
    return found.numbers | {"images": drawn}


_ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {
    "predict": lambda service, picture, *, top, images: answers.predict(service, picture, top),
    "explain": _explained,
    "region": lambda service, picture, *, label, x, y, width, height, strict, images: (
        answers.region(service, picture, label, (x, y, width, height), strict=strict)
    ),
}
