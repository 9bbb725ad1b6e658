"""`bcosvit serve` on the command line: its mistakes."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bcosvit.cli import app


def test_without_gradio_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    for name in [name for name in sys.modules if name.startswith("bcosvit.web.")]:
        monkeypatch.delitem(sys.modules, name)
    error = CliRunner().invoke(app, ["serve", "--weights", "x"]).exception
    assert isinstance(error, ValueError)
    assert "needs gradio" in str(error)
    assert "pip install 'bcosvit[web]'" in str(error)


def test_a_missing_model():
    error = CliRunner().invoke(app, ["serve", "--weights", "missing.safetensors"]).exception
    assert isinstance(error, ValueError)
    assert "There is no weights file missing.safetensors" in str(error)


@pytest.mark.parametrize("option", ["--max-upload", "--queue", "--concurrency", "--port"])
def test_options_are_checked(option):
    result = CliRunner().invoke(app, ["serve", option, "0"])
    assert result.exit_code == 2
    assert option in result.output


@pytest.mark.slow
def test_a_port_that_is_taken(service):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        command = [Path(sys.executable).parent / "bcosvit", "serve", "--port", port]
        done = subprocess.run(
            [*command, "--weights", service.predictor.weights],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 2
    message = " ".join(done.stderr.split())
    assert f"Error: Port {port} of 127.0.0.1 cannot be used" in message
    assert "Traceback" not in message
