"""A server to ask, as a user starts it, with a small model.

It is a process of its own: so is a user's, and Gradio leaves event loops open, which would be
errors here.
"""

import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from bcosvit.predictor import Predictor
from bcosvit.web.service import ExplanationService, Limits
from tests.report.support import write_weights


def small_service(folder: Path, *, limits: Limits | None = None, **options) -> ExplanationService:
    """A service with a small model for 16×16 pixels."""
    weights = write_weights(folder / "model.safetensors", **options)
    return ExplanationService(predictor=Predictor.load(weights, "cpu"), limits=limits or Limits())


def free_port() -> int:
    """A port that nobody listens on, and that the system gives to no connection: until the server
    has been imported and takes it, seconds go by."""
    for port in random.Random(os.urandom(8)).sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("There is no free port between 20,000 and 32,000.")


OUTSIDE = """
import os, sys

def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        address = arguments[1] if event == "socket.connect" else arguments[0]
        host = address[0] if isinstance(address, tuple) else address
        if host not in ("127.0.0.1", "::1", "localhost", None):
            with open(os.environ["BCOSVIT_OUTSIDE"], "a") as file:
                print(event, address, file=file)

sys.addaudithook(watch)
"""
"""What Python runs before anything else in the server: records requests to other hosts."""


@contextmanager
def serving(weights: str | Path, *options: str, folder: Path) -> Iterator[str]:
    """The address of `bcosvit serve`; afterwards it has stopped without an error, left no files and
    contacted no other host.

    ``folder`` is for its files.
    """
    files, hooks, outside = folder / "files", folder / "hooks", folder / "outside.txt"
    for each in (files, hooks):
        each.mkdir()
    outside.touch()
    (hooks / "sitecustomize.py").write_text(OUTSIDE)
    command = [
        *(sys.executable, "-m", "bcosvit", "serve", "--weights", str(weights), "--device", "cpu"),
        *("--port", str(free_port()), *options),
    ]
    surroundings = {
        "OMP_NUM_THREADS": "1",
        "GRADIO_TEMP_DIR": str(files),
        "PYTHONPATH": os.pathsep.join([str(hooks), os.environ.get("PYTHONPATH", "")]),
        "BCOSVIT_OUTSIDE": str(outside),
    }
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **surroundings}
    )
    with process:
        try:
            line = process.stdout.readline()
            assert line.endswith("(press Ctrl-C to stop)\n"), line
            yield line.split()[0]
        finally:
            ended = process.poll()
            process.terminate()
            assert (ended, process.wait(timeout=30)) == (None, 0)
    assert [str(path) for path in files.rglob("*") if path.is_file()] == []
    assert outside.read_text() == ""


def processor_seconds(address: str) -> float:
    """What the server at an address has used."""
    port = str(urlsplit(address).port)
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = command.read_text().split("\0")
            if "serve" in words and port in words:
                fields = command.with_name("stat").read_text().rpartition(")")[2].split()
                return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    raise AssertionError("the server has ended")


def is_busy(address: str) -> bool:
    """Whether a server computes, also where others leave it little of the machine's time.

    One that rests uses 0.08 processor seconds in the two seconds in which it is watched.
    """
    before = processor_seconds(address)
    time.sleep(2)
    return processor_seconds(address) - before > 0.2


def used_until_idle(address: str, before: float) -> float:
    """Waits until a server rests, and returns its processor seconds since it had used ``before``.

    They depend on what is computed, but not on how much else the machine has to do.
    """
    end = time.monotonic() + 120
    while is_busy(address):
        assert time.monotonic() < end, "the server does not rest"
    return processor_seconds(address) - before


class _Forward(BaseHTTPRequestHandler):
    """Takes the proxy's path away and passes everything on, streams as they come."""

    target = ""

    def do_GET(self) -> None:
        length = int(self.headers.get("content-length", 0))
        headers = {"X-Forwarded-Host": self.headers["host"], "X-Forwarded-Proto": "http"}
        passed = ("accept", "content-type", "cookie", "host", "range")
        headers |= {name: self.headers[name] for name in passed if name in self.headers}
        path = self.path.removeprefix("/explain/")
        if path == self.path:
            self.send_error(404)
            return
        with httpx.stream(
            self.command,
            self.target + path,
            headers=headers | {"accept-encoding": "identity"},
            content=self.rfile.read(length),
            timeout=60,
        ) as answer:
            self.send_response(answer.status_code)
            for name, value in answer.headers.items():
                if name not in ("transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.end_headers()
            for chunk in answer.iter_raw():
                self.wfile.write(chunk)

    do_POST = do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def proxied(address: str) -> Iterator[str]:
    """The address of a proxy that shows a server below ``/explain/``."""
    handler = type("Forward", (_Forward,), {"target": address})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as proxy:
        proxy.daemon_threads = True
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{proxy.server_port}/explain/"
        finally:
            proxy.shutdown()
            thread.join()
