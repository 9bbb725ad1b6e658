"""What every request passes before Gradio sees it, and every response before a user does.

The guard checks the host, the path, the size and the speed of a request and, for the endpoints of
the API, its arguments. Whatever is wrong is answered with a status and one sentence. It also hides
where files are stored: users see names below `FILES_ALIAS` instead of the server's folder.
"""

import asyncio
import ipaddress
import json
import re
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from starlette.formparsers import MultiPartException

from bcosvit.web.jobs import Jobs
from bcosvit.web.service import Limits

POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'"
)
"""Gradio's page needs inline scripts; other hosts are never contacted."""

FILES_ALIAS = "/bcosvit-files"
"""What users see instead of the folder of uploads and results."""

JSON_BYTES = 1_000_000
"""The most that a request without files may contain."""

PREFIX = "/gradio_api/"

DIRECT = "/api/"
"""Where requests are answered without Gradio."""

_PATHS = re.compile(
    r"/(|config/?|(assets|static|svelte)/.*|theme\.css|favicon\.ico|manifest\.json|robots\.txt"
    r"|pwa_icon(/\d+)?|audit/.*|api/.*"
    r"|gradio_api/(info/?|openapi\.json|app_id/?|startup-events|theme\.css|queue/(join|data)"
    r"|(call|run|api)/[^/]+/?|call/[^/]+/[^/]+|upload|upload_progress|heartbeat/[^/]+|cancel|reset/?"
    r"|file=.*|custom_component/.*))"
)
"""What the page and the API need; Gradio's other routes (proxies, reloading, logins) do not exist
here."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Check = Callable[[str, Any], None]


class Refusal(MultiPartException):
    """A response with a status and a sentence.

    Of all exceptions, only after this one does Gradio close the files of an upload.
    """

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence


def allowed_hosts(
    bound: str, extra: Iterable[str] = (), root_path: str | None = None
) -> frozenset[str]:
    """Returns the hosts by which a server may be addressed.

    Args:
        bound: The address that the server listens on. On all addresses of a machine
            (``0.0.0.0``), its name and any address are allowed as well.
        extra: More names; ``*`` allows all.
        root_path: Where a proxy shows the page; the name in an address is allowed.

    Examples:
        >>> sorted(allowed_hosts("127.0.0.1", ["example.org"]))
        ['127.0.0.1', '::1', 'example.org', 'localhost']
    """
    hosts = {"localhost", "127.0.0.1", "::1", bound.lower(), *(name.lower() for name in extra)}
    if bound in ("0.0.0.0", "::", ""):
        hosts |= {socket.gethostname().lower(), "addresses"}
    if root_path and (name := urlsplit(root_path).hostname):
        hosts.add(name.lower())
    return frozenset(hosts)


class Guard:
    """ASGI middleware; see the module.

    Args:
        app: What is guarded.
        hosts: As from `allowed_hosts`.
        limits: What is accepted.
        folder: The folder of uploads and results.
        check: Raises ``ValueError`` if the arguments of an endpoint are wrong, and
            ``LookupError`` if there is none.
        jobs: What is computed for whom.
        direct: What answers below `DIRECT`.
    """

    def __init__(
        self,
        app: App,
        *,
        hosts: frozenset[str],
        limits: Limits,
        folder: str,
        check: Check,
        jobs: Jobs,
        direct: App,
    ) -> None:
        self.app, self.hosts, self.limits, self.check = app, hosts, limits, check
        self.jobs, self.direct = jobs, direct
        self.folder, self.alias = folder.encode(), FILES_ALIAS.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # Gradio has no websockets.
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        request = _Request(self, scope, receive, send)
        try:
            await request.answer()
            if request.refusal is not None:
                await request.refuse(request.refusal)
        except Refusal as refusal:
            # What was wrong first, not what somebody made of it.
            await request.refuse(request.refusal or refusal)
        except Exception as error:
            if request.refusal is not None:
                await request.refuse(request.refusal)
            elif request.path == PREFIX + "upload" and isinstance(
                error, AttributeError | TypeError
            ):
                # Gradio takes a field without the name of a file for one.
                await request.refuse(Refusal(400, _NO_FILE))
            elif not request.gone:
                # One line for whoever runs the server; users get a sentence.
                print(f"{scope['path']}: {type(error).__name__}: {error}", file=sys.stderr)
                await request.refuse(Refusal(500, WENT_WRONG))

    def check_host(self, headers: dict[bytes, bytes]) -> None:
        """Refuses a request that was meant for another host, or came through one.

        A page of anybody can have its own name point to this machine, and would then be allowed by
        browsers to read what the server answers.
        """
        for name in (b"host", b"x-forwarded-host"):
            given = headers.get(name)
            if given is None and name == b"host":
                raise Refusal(400, "The request has no Host header; send one.")
            for each in [] if given is None else given.decode("latin-1").split(","):
                host = _host_of(each)
                if not self._is_allowed(host):
                    raise Refusal(
                        403,
                        f"This server is not known as {host!r}; whoever runs it can allow the name "
                        f"with --allow-host.",
                    )

    def _is_allowed(self, host: str) -> bool:
        if host in self.hosts or "*" in self.hosts:
            return True
        if "addresses" not in self.hosts:
            return False
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return True

    def hidden(self, content: bytes) -> bytes:
        """``content`` without the server's folder."""
        for plain in (self.folder, quote(self.folder.decode(), safe="").encode()):
            content = content.replace(plain, self.alias)
        return content

    def restored(self, content: bytes) -> bytes:
        """``content`` with the server's folder."""
        return content.replace(self.alias + b"/", self.folder + b"/")


LINGER = 2.0
"""Seconds for which the rest of a refused request is read."""
WENT_WRONG = "Something went wrong on the server; try again, or tell whoever runs it."
_NO_FILE = "The upload holds no file; send each picture as a form field files with a file name."
_ENDED_EARLY = "The request ended before it was complete; send it again."
_TOO_SLOW = "The request took too long to arrive; send it again over a faster connection."


class _Request:
    """One request on its way in and out."""

    def __init__(self, guard: Guard, scope: Scope, receive: Receive, send: Send) -> None:
        self.guard, self.scope, self._receive, self._send = guard, scope, receive, send
        self.headers = {name.lower(): value for name, value in scope["headers"]}
        self.path: str = scope["path"]
        self.refusal: Refusal | None = None
        self.started = self.gone = False
        self._seconds = guard.limits.upload_seconds
        self._ends: float | None = asyncio.get_running_loop().time() + self._seconds
        self._bytes = 0
        self._kept: Scope | None = None
        self._content = b""
        self._is_text = False

    async def answer(self) -> None:
        guard, method = self.guard, self.scope["method"]
        guard.check_host(self.headers)
        if not _PATHS.fullmatch(self.path) or "://" in self.path.partition("file=")[2]:
            raise Refusal(
                404, f"There is nothing at {self.path}; {PREFIX}info lists the endpoints."
            )
        if method not in ("GET", "HEAD", "POST"):
            raise Refusal(405, f"{method} is not supported; use GET or POST.")
        self.most = JSON_BYTES
        if self.path == PREFIX + "upload":
            self.most += 1_000_000 * guard.limits.megabytes * guard.limits.pictures
        is_form = self.headers.get(b"content-type", b"").lower().startswith(b"multipart/form-data")
        is_direct = self.path.startswith(DIRECT)
        if is_direct and is_form:
            self.most += 1_000_000 * guard.limits.megabytes
        length = self.headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self.most:
            raise self._too_large()
        for key in ("path", "raw_path"):
            if isinstance(self.scope.get(key), bytes):
                self.scope[key] = guard.restored(self.scope[key])
            elif key in self.scope and self.scope[key] is not None:
                self.scope[key] = guard.restored(self.scope[key].encode()).decode()
        if not self.path.startswith(("/assets", "/static", "/svelte")):
            # What is hidden has to be found.
            coded = [
                pair for pair in self.scope["headers"] if pair[0].lower() != b"accept-encoding"
            ]
            self.scope["headers"] = coded
        stream = None
        if method == "POST" and self.path != PREFIX + "upload" and not (is_direct and is_form):
            await self._check_body()
        else:
            stream = self._check_stream()
        if stream is None:
            app = guard.direct if is_direct else guard.app
            await app(self.scope, self.receive, self.send)
            return
        with guard.jobs.listening(stream):
            await guard.app(self.scope, self.receive, self.send)

    def _too_large(self) -> Refusal:
        return Refusal(
            413,
            f"The request is larger than {self.most // 1_000_000} MB; send less at once, or shrink "
            f"the pictures.",
        )

    def _check_stream(self) -> str | None:
        """Refuses to wait for results that nobody computes; returns whose results are read."""
        query = parse_qs(self.scope.get("query_string", b"").decode("latin-1"))
        found = re.fullmatch(PREFIX + r"call/(?:v2/)?[^/]+/([^/]+)", self.path)
        if found:
            wanted, known = found[1], self.guard.jobs.has_event(found[1])
        elif self.path == PREFIX + "queue/data":
            wanted = query.get("session_hash", [""])[0]
            known = self.guard.jobs.has_session(wanted)
        else:
            return None
        if not known:
            raise Refusal(
                404,
                f"There is no result for {wanted[:64]!r}, or it has been read already; ask again.",
            )
        return wanted

    async def _check_body(self) -> None:
        """Reads all of a small body, checks it and passes it on."""
        content = b""
        while True:
            message = await self.receive()
            content += message.get("body", b"")
            if not message.get("more_body"):
                break
        what = "data"
        if self.path.startswith(DIRECT):
            what = "the path of an upload as picture, or a form (multipart/form-data) with the file"
        try:
            body = json.loads(content or b"null")
        except (ValueError, RecursionError):
            raise Refusal(400, f"The request is not JSON; send an object with {what}.") from None
        if not isinstance(body, dict):
            raise Refusal(422, f"The request is not a JSON object; send one with {what}.")
        # A session's name is the user's own choice, and part of messages.
        session = body.get("session_hash")
        if session is not None and not (isinstance(session, str) and len(session) <= 64):
            raise Refusal(422, "session_hash is not a text of at most 64 characters; shorten it.")
        called = re.fullmatch(PREFIX + r"(?:call|run|api)/(?:v2/)?([^/]+)/?", self.path)
        restored = self.guard.restored(content)
        if called:
            named = "/call/v2/" in self.path
            if not named and not isinstance(body.get("data"), list):
                raise Refusal(422, "The request has no list of arguments; send it as data.")
            given = json.loads(restored)
            try:
                self.guard.check(called[1], given if named else given["data"])
            except LookupError as error:
                raise Refusal(404, str(error.args[0])) from None
            except ValueError as error:
                raise Refusal(422, str(error)) from None
        queued = self.path == PREFIX + "queue/join" or (called and called[1] != "model")
        if queued and self.guard.jobs.is_full():
            raise Refusal(503, self.guard.jobs.FULL)
        self._kept = {"type": "http.request", "body": restored, "more_body": False}
        headers = [pair for pair in self.scope["headers"] if pair[0].lower() != b"content-length"]
        self.scope["headers"] = [*headers, (b"content-length", str(len(restored)).encode())]

    async def receive(self) -> Scope:
        """The next part of the body, which must not take forever to arrive."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            return kept
        if self._ends is None:
            return await self._receive()
        left = self._ends - asyncio.get_running_loop().time()
        try:
            message = await asyncio.wait_for(self._receive(), max(0.0, left))
        except asyncio.TimeoutError:  # before Python 3.11 it is not TimeoutError
            self.refusal = Refusal(408, _TOO_SLOW)
            raise self.refusal from None
        if message["type"] == "http.disconnect":
            self.gone = True
            if self.scope["method"] == "POST":
                raise Refusal(400, _ENDED_EARLY)
        elif not message.get("more_body"):
            # From here on only the end of the connection is waited for.
            self._ends = None
        self._bytes += len(message.get("body", b""))
        if self._bytes > self.most:
            self.refusal = self._too_large()
            raise self.refusal
        return message

    async def send(self, message: Scope) -> None:
        """Passes a response on, without the server's folder and with a sentence for errors."""
        if self.refusal is not None:
            return
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            kind = dict(headers).get(b"content-type", b"")
            self._is_text = any(
                each in kind for each in (b"json", b"html", b"event-stream", b"text/plain")
            ) and not self.path.startswith(PREFIX + "file=")
            self._is_stream = b"event-stream" in kind
            self._is_error = message["status"] >= 400
            headers = [(n, v) for n, v in headers if n != b"content-length" or not self._is_text]
            message["headers"] = [*headers, (b"content-security-policy", POLICY.encode())]
            self._start = message
            if not (self._is_text or self._is_error) or self._is_stream:
                self.started = True
                await self._send(message)
            return
        if message["type"] != "http.response.body" or not (self._is_text or self._is_error):
            await self._send(message)
            return
        if self._is_stream:
            # Messages of a stream come in one piece each.
            body = self.guard.hidden(message.get("body", b""))
            await self._send({**message, "body": body})
            return
        self._content += message.get("body", b"")
        if message.get("more_body"):
            return
        if self._is_error:
            status = self._start["status"]
            await self.refuse(Refusal(status, _sentence(status, self)))
            return
        content = self.guard.hidden(self._content)
        length = (b"content-length", str(len(content)).encode())
        self._start["headers"] = [*self._start["headers"], length]
        self.started = True
        await self._send(self._start)
        await self._send({"type": "http.response.body", "body": content})

    async def refuse(self, refusal: Refusal) -> None:
        if self.started or self.gone:
            return
        self.started = True
        self.refusal = refusal
        sentence = self.guard.hidden(refusal.sentence.encode()).decode()
        # "detail" is what Gradio's clients read, "error" what its streams contain.
        content = json.dumps({"error": sentence, "detail": sentence}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            (b"content-security-policy", POLICY.encode()),
            # What else comes on this connection gets no answer.
            (b"connection", b"close"),
        ]
        start = {"type": "http.response.start", "status": refusal.status, "headers": headers}
        await self._send(start)
        body = b"" if self.scope["method"] == "HEAD" else content
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        if refusal.status != 408:
            await self._discard_rest()
        await self._send({"type": "http.response.body", "body": b""})

    async def _discard_rest(self) -> None:
        """Reads what a client is still sending: if the connection were closed before that, the
        client would lose the answer."""

        async def read() -> None:
            while self._ends is not None:
                message = await self._receive()
                if not message.get("more_body"):
                    break

        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(read(), LINGER)


def _host_of(given: str) -> str:
    """The host without its port, in lower case."""
    given = given.strip().lower()
    if given.startswith("["):
        return given[1:].partition("]")[0]
    return given.rpartition(":")[0].rstrip(".") if given.count(":") == 1 else given.rstrip(".")


def _sentence(status: int, request: _Request) -> str:
    """What Gradio or its libraries say about an error, as a sentence."""
    path = unquote(request.path)
    if status == 404:
        if "file=" in path:
            return "There is no such file, or it has been deleted; ask for it again."
        return f"There is nothing at {path}; {PREFIX}info lists the endpoints."
    if status == 405:
        return f"{request.scope['method']} is not supported at {path}; use GET or POST."
    if status == 403:
        return "Only files that this server has made may be read; ask for one."
    if status >= 500 and status != 503:
        return WENT_WRONG
    try:
        detail = json.loads(request._content)
    except ValueError:
        detail = request._content.decode("utf-8", "replace")
    detail = detail.get("detail", detail) if isinstance(detail, dict) else detail
    if isinstance(detail, list) and detail and isinstance(detail[0], dict):
        first = detail[0]
        where = ".".join(str(part) for part in first.get("loc", ())[1:])
        return f"The request is not valid ({where or 'body'}: {first.get('msg')}); correct it."
    if status == 413:
        most = request.guard.limits.megabytes
        return f"A file is larger than {most} MB; shrink the picture."
    text = " ".join(str(detail or "").split())
    return f"The request is not valid ({text[:200].rstrip('.') or status}); correct it."


def impatient(protocol: type[Any], seconds: float) -> type[Any]:
    """Returns an HTTP protocol of uvicorn that closes connections on which no request begins.

    Args:
        protocol: The protocol.
        seconds: How long the first line and the headers of a request may take to arrive.
    """

    class Impatient(protocol):  # type: ignore[misc]
        _headers_due: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._expect_headers()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._is_idle():
                self._expect_headers()
            else:
                self._stop_waiting()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _is_idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _expect_headers(self) -> None:
            if self._headers_due is None:
                self._headers_due = self.loop.call_later(seconds, self._give_up)

        def _stop_waiting(self) -> None:
            # From here on uvicorn's own timer closes a connection that stays idle.
            if self._headers_due is not None:
                self._headers_due.cancel()
            self._headers_due = None

        def _give_up(self) -> None:
            self._headers_due = None
            if self._is_idle() and not self.transport.is_closing():
                self.transport.close()

    return Impatient
