"""A real server under abuse: every mistake is a sentence, and nothing waits, stays or leaks."""

import asyncio
import http.client
import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn

from bcosvit.web.app import Server
from bcosvit.web.guard import FILES_ALIAS, allowed_hosts, impatient
from tests.report.support import write_pictures, write_weights
from tests.web.support import free_port, processor_seconds, serving, used_until_idle

META = {"_type": "gradio.FileData"}

WAIT = 60
"""Seconds that a busy machine may take for what a server that does not end it never does."""


class Abused:
    """A server with short limits, its folder and what it wrote to its standard error."""

    def __init__(self, address: str, folder: Path, photo: Path) -> None:
        self.address, self.folder, self.photo = address, folder, photo
        self.api = f"{address}gradio_api/"
        parts = urlsplit(address)
        self.place = (parts.hostname, parts.port)

    def upload(self) -> dict[str, object]:
        with self.photo.open("rb") as file:
            (path,) = httpx.post(self.api + "upload", files={"files": file}).json()
        return {"path": path, "meta": META}

    def call(self, endpoint: str, *data: object, **options: object) -> httpx.Response:
        return httpx.post(f"{self.api}call/{endpoint}", json={"data": list(data)}, **options)

    def read(self, endpoint: str, event: str) -> str:
        return httpx.get(f"{self.api}call/{endpoint}/{event}", timeout=60).text

    def files(self) -> list[Path]:
        return [path for path in (self.folder / "files").rglob("*") if path.is_file()]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("abused")
    weights = write_weights(folder / "model.safetensors")
    photo = next(write_pictures(folder / "pictures", 1).iterdir())
    options = ("--max-upload", "1", "--max-pictures", "2", "--queue", "6", "--concurrency", "1")
    options += ("--keep", "4", "--upload-timeout", "2", "--allow-host", "photos.example")
    errors = folder / "stderr.txt"
    with errors.open("w") as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            with serving(weights, *options, folder=folder) as address:
                os.dup2(saved, 2)
                yield Abused(address, folder, photo)
        finally:
            os.dup2(saved, 2)
            os.close(saved)
    # Whatever happened, whoever runs it has not seen a traceback.
    assert "Traceback" not in errors.read_text()


def sentence_of(answer: httpx.Response) -> str:
    found = answer.json()
    assert found["error"] == found["detail"]
    assert found["error"].endswith((".", "?"))
    assert len(found["error"].split()) > 4
    return found["error"]


PHOTO = object()


@pytest.mark.parametrize(
    ("endpoint", "data", "status", "says"),
    [
        ("predict", [PHOTO], 422, "takes 2 arguments (picture, top), and 1 were given"),
        ("predict", [PHOTO, 1, 2, 3], 422, "4 were given"),
        ("predict", [PHOTO, "five"], 422, "top is wrong: give a finite number"),
        ("predict", [PHOTO, {"a": 1}], 422, "top is wrong"),
        ("predict", ["photo.jpg", 5], 422, "picture is wrong: give an uploaded file"),
        ("predict", [{"path": 5, "meta": META}, 5], 422, "picture is wrong"),
        ("predict", [{"path": "a\0b", "meta": META}, 5], 422, "picture is wrong"),
        ("predict", [{"path": "a" * 5000, "meta": META}, 5], 422, "picture is wrong"),
        ("explain", [PHOTO, 3, "", 0.5, False], 422, "label is wrong: give a text"),
        ("explain", [PHOTO, "", "", 0.5, "yes"], 422, "joint is wrong: give true or false"),
        ("explain", [PHOTO, "", "", 0.5, False, 1], 422, "strict is wrong: give true or false"),
        ("region", [PHOTO, "", 0, 0, 1, 1, "yes"], 422, "strict is wrong: give true or false"),
        ("explain", [PHOTO, "", "", 0.5], 422, "takes 6 arguments"),
        ("explain", [PHOTO, "catt", "", 0.5, False], 422, "did you mean 'cat'"),
        ("explain", [PHOTO, "", "magic", 0.5, False], 422, "no method 'magic'"),
        ("report", [PHOTO, "", "", "html"], 422, "pictures is wrong: give a list"),
        ("report", [[PHOTO], "", "", "pdf"], 422, "no kind of file 'pdf'"),
        ("magic", [], 404, "no endpoint 'magic'"),
    ],
)
def test_mistakes_in_arguments(server, endpoint, data, status, says):
    photo = {"path": f"{FILES_ALIAS}/a/b.png", "meta": META}
    given = [photo if each is PHOTO else [photo] if each == [PHOTO] else each for each in data]
    answer = server.call(endpoint, *given)
    assert answer.status_code == status
    assert says in sentence_of(answer)


@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        ("POST", "call/predict", {"content": b"{no json"}, 400),
        ("POST", "call/predict", {"content": b"[" * 100_000}, 400),
        ("POST", "call/predict", {"json": [1, 2]}, 422),
        ("POST", "call/predict", {"json": {}}, 422),
        ("POST", "call/predict", {"json": {"data": "text"}}, 422),
        ("POST", "call/predict", {"json": {"data": [], "session_hash": 5}}, 422),
        ("POST", "call/predict", {"json": {"data": ["x" * 2_000_000]}}, 413),
        ("POST", "queue/join", {"json": {"data": []}}, 400),
        ("POST", "queue/join", {"json": {"data": [], "fn_index": "one", "session_hash": "a"}}, 422),
        ("POST", "run/predict", {"json": {"data": [None, 5]}}, 404),
        ("GET", "call/predict/unknown", {}, 404),
        ("GET", "queue/data?session_hash=unknown", {}, 404),
        ("GET", "queue/data", {}, 404),
        ("GET", "call/predict", {}, 405),
        ("GET", "upload", {}, 405),
        ("PUT", "call/predict", {}, 405),
        ("DELETE", "info", {}, 405),
        ("GET", "nothing", {}, 404),
        ("GET", "proxy=http://127.0.0.1:9/", {}, 404),
        ("GET", "file=http://127.0.0.1:9/", {}, 404),
        ("POST", "vibe-edit", {"json": {}}, 404),
        ("POST", "upload", {"content": b"no form"}, 400),
        ("POST", "upload", {"files": {"files": ("", b"content")}}, 400),
    ],
)
def test_mistakes_in_requests(server, method, path, options, status):
    answer = httpx.request(method, server.api + path, **options)
    assert answer.status_code == status, answer.text
    sentence_of(answer)


def test_what_only_the_queue_notices(server):
    """An unknown function of the page, and arguments by the page's own way."""
    for fn_index, session in ((999, "one"), (0, "two")):
        body = {"data": ["wrong"] * 40, "fn_index": fn_index, "session_hash": session}
        answer = httpx.post(server.api + "queue/join", json=body)
        if answer.status_code != 200:
            sentence_of(answer)
            continue
        text = httpx.get(f"{server.api}queue/data?session_hash={session}", timeout=30).text
        messages = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data:")]
        (done,) = [each for each in messages if each["msg"] == "process_completed"]
        assert not done["success"]
        assert done["output"]["error"].endswith(".")


def test_not_a_picture(server, tmp_path):
    answer = httpx.post(server.api + "upload", files={"files": ("a.png", b"no picture")})
    event = server.call("predict", {"path": answer.json()[0], "meta": META}, 5).json()["event_id"]
    done = server.read("predict", event)
    assert "event: error" in done
    assert "not an image of a known format" in done
    # Its result is read, so that nobody waits for it in vain.
    assert httpx.get(f"{server.api}call/predict/{event}").status_code == 404


def test_no_response_shows_a_path_of_the_server(server):
    seen = [httpx.get(server.address).text, httpx.get(server.address + "config").text]
    seen += [httpx.get(server.api + "info").text]
    file = server.upload()
    event = server.call("explain", file, "cat", "", 0.5, False).json()["event_id"]
    done = server.read("explain", event)
    assert "event: complete" in done
    seen += [file["path"], done]
    for text in seen:
        assert str(server.folder) not in text
        assert "/tmp/" not in text
        assert "site-packages" not in text
    numbers, drawing, *_ = json.loads(done.partition("data: ")[2].partition("\n")[0])
    assert numbers["class"] == "cat"
    got = httpx.get(drawing["url"])
    assert got.content.startswith(b"\x89PNG")
    # Nor can one be asked for.
    for path in ("/etc/passwd", str(server.photo), f"{FILES_ALIAS}/../../secret"):
        answer = httpx.get(f"{server.api}file={path}")
        assert answer.status_code in (403, 404)
        sentence_of(answer)


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({"Host": "localhost:1"}, True),
        ({"Host": "photos.example"}, True),
        ({"Host": "PHOTOS.example.:443"}, True),
        ({"Host": "evil.example"}, False),
        ({"Host": "192.168.0.7"}, False),
        ({"Host": "localhost.evil.example"}, False),
        ({"X-Forwarded-Host": "evil.example"}, False),
    ],
)
def test_hosts(server, headers, allowed):
    answer = httpx.get(server.api + "info", headers=headers)
    assert answer.status_code == (200 if allowed else 403)
    if not allowed:
        assert "--allow-host" in sentence_of(answer)


def test_hosts_of_a_machine_and_of_a_proxy():
    assert "addresses" in allowed_hosts("0.0.0.0")
    assert "addresses" not in allowed_hosts("127.0.0.1")
    assert "example.org" in allowed_hosts("127.0.0.1", root_path="https://example.org/explain")


def closed_within(connection: socket.socket, seconds: float) -> bytes:
    """What comes until the server closes the connection."""
    connection.settimeout(seconds)
    got = b""
    while part := connection.recv(65536):
        got += part
    return got


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"", b""),
        (b"POST /gradio_api/upload HTTP/1.1\r\nHost: local", b""),
        (
            b"POST /gradio_api/upload HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
            b"Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n",
            b"HTTP/1.1 408",
        ),
        (
            b"POST /api/explain HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
            b"Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n",
            b"HTTP/1.1 408",
        ),
        (
            b"POST /gradio_api/call/predict HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Length: 1000\r\n\r\n{",
            b"HTTP/1.1 408",
        ),
        (
            b"POST /gradio_api/upload HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Length: 99000000\r\n\r\n",
            b"HTTP/1.1 413",
        ),
    ],
    ids=[
        "nothing",
        "half of a header",
        "half of a file",
        "half of a form",
        "half of a body",
        "too much",
    ],
)
def test_requests_that_never_end(server, sent, expected):
    with socket.create_connection(server.place) as connection:
        connection.sendall(sent)
        assert closed_within(connection, WAIT).startswith(expected)


def test_a_connection_that_was_used_is_not_closed_between_two_requests():
    """The time in which a first request has to begin is over with that request."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    config = uvicorn.Config(app, port=0, lifespan="off", log_level="warning", ws="none")
    config.load()
    config.http_protocol_class = impatient(config.http_protocol_class, 0.3)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.02)
        place = server.servers[0].sockets[0].getsockname()
        connection = http.client.HTTPConnection(*place, timeout=10)
        for _ in range(2):
            connection.request("GET", "/")
            assert connection.getresponse().read() == b""
            time.sleep(0.6)
        connection.sock.sendall(b"GET / HT")
        assert closed_within(connection.sock, WAIT) == b""
        connection.close()
    finally:
        server.should_exit = True
        thread.join()


def test_whoever_connects_while_the_server_starts_is_answered():
    """The port is taken at once, however long the rest takes, and by one server."""
    may_start = threading.Event()

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            await receive()
            while not may_start.is_set():
                await asyncio.sleep(0.01)
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    config = uvicorn.Config(app, port=free_port(), lifespan="on", log_level="warning", ws="none")
    server = Server(config)
    starting = threading.Thread(target=server.run_in_thread)
    starting.start()
    try:
        while not hasattr(server, "thread"):
            time.sleep(0.01)
        connection = http.client.HTTPConnection("127.0.0.1", config.port, timeout=30)
        connection.request("GET", "/")
        assert not server.started
        with pytest.raises(OSError, match="in use"):
            Server(config).run_in_thread()
        may_start.set()
        assert connection.getresponse().status == 204
        connection.close()
    finally:
        may_start.set()
        starting.join()
        server.close()


def test_a_drip_does_not_prolong_it(server):
    with socket.create_connection(server.place) as connection:
        connection.sendall(
            b"POST /gradio_api/call/predict HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Length: 999\r\n\r\n"
        )
        end = time.monotonic() + WAIT
        with suppress(ConnectionError):
            while time.monotonic() < end:
                connection.sendall(b" ")
                time.sleep(0.4)
    assert time.monotonic() < end


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")
@pytest.mark.parametrize("hangs_up", [False, True])
def test_uploads_that_are_broken_off_leave_no_file_open(server, hangs_up):
    def opened() -> list[str]:
        links = []
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            with suppress(OSError):
                links.append(os.readlink(link))
        return [link for link in links if link.startswith(str(server.folder / "files"))]

    begun = (
        b"POST /gradio_api/upload HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
        b"Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n"
        b'Content-Disposition: form-data; name="files"; filename="a.png"\r\n\r\nhalf'
    )
    with socket.create_connection(server.place) as connection:
        connection.sendall(begun)
        while not opened():
            time.sleep(0.01)
        if not hangs_up:
            assert closed_within(connection, WAIT).startswith(b"HTTP/1.1 408")
    until = time.monotonic() + WAIT
    while opened() and time.monotonic() < until:
        time.sleep(0.1)
    assert opened() == []


def test_files_leave_the_disk(server):
    server.upload()
    assert server.files()
    # A file whose upload was broken off counts as well.
    with socket.create_connection(server.place) as connection:
        connection.sendall(
            b"POST /gradio_api/upload HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n"
            b"Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\nContent-Disposition: "
            b'form-data; name="files"; filename="a.png"\r\n\r\n' + b"a" * 2000
        )
        time.sleep(0.5)
    deadline = time.monotonic() + WAIT
    while server.files() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert server.files() == []


@pytest.fixture(scope="module")
def slow_server(tmp_path_factory):
    """One whose expensive methods take a while."""
    folder = tmp_path_factory.mktemp("slow")
    weights = write_weights(folder / "model.safetensors", image_size=96, width=96)
    photo = next(write_pictures(folder / "pictures", 1, size=100).iterdir())
    options = ("--queue", "20", "--concurrency", "1", "--keep", "600")
    with serving(weights, *options, folder=folder) as address:
        yield Abused(address, folder, photo)


@pytest.mark.slow
def test_clients_who_hang_up_stop_their_work(slow_server):
    file = slow_server.upload()
    before = processor_seconds(slow_server.address)
    for label in "01234":
        event = slow_server.call("explain", file, label, "occlusion", 0.5, False).json()["event_id"]
        connection = socket.create_connection(slow_server.place)
        path = f"/gradio_api/call/explain/{event}"
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        time.sleep(0.3)
        connection.close()
    used = used_until_idle(slow_server.address, before)
    # The first of them to its end, for comparison.
    before = processor_seconds(slow_server.address)
    event = slow_server.call("explain", file, "0", "occlusion", 0.5, False).json()["event_id"]
    assert "event: complete" in slow_server.read("explain", event)
    assert used < 5 / 2 * (processor_seconds(slow_server.address) - before)


@pytest.mark.slow
def test_cheap_requests_never_wait_behind_expensive_ones(slow_server):
    file = slow_server.upload()
    methods = ("occlusion", "intgrad", "smoothgrad", "occlusion", "intgrad", "smoothgrad")
    done: list[float] = []

    def ask(number: int, method: str) -> None:
        arguments = (file, ("cat", "dog")[number % 2], method, 0.5, False)
        event = slow_server.call("explain", *arguments).json()["event_id"]
        assert "event: complete" in slow_server.read("explain", event)
        done.append(time.monotonic())

    threads = [threading.Thread(target=ask, args=pair) for pair in enumerate(methods)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    for endpoint, data in (("model", []), ("explain", [file, "dog", "inherent", 0.5, False])):
        before = len(done)
        event = slow_server.call(endpoint, *data).json()["event_id"]
        assert "event: complete" in slow_server.read(endpoint, event)
        # One of the others may have been about to end.
        assert len(done) <= min(before + 1, len(methods) - 1)
    for thread in threads:
        thread.join()
    # One at a time: they end one after the other.
    assert len(done) == len(methods)


@pytest.mark.slow
def test_the_model_answers_while_the_queue_is_full(slow_server):
    file = slow_server.upload()
    answers = [slow_server.call("explain", file, "cat", "occlusion", 0.5, True) for _ in range(25)]
    refused = [each for each in answers if each.status_code == 503]
    assert refused
    assert "Queue is full" in sentence_of(refused[0])
    event = slow_server.call("model").json()["event_id"]
    assert "event: complete" in slow_server.read("model", event)
    # Nobody reads the others, and still they end.
    used_until_idle(slow_server.address, processor_seconds(slow_server.address))
