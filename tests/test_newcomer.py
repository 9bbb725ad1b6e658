"""A newcomer's first minutes in a real terminal and in a notebook; the page is in tests/web."""

import base64
import io
import os
import pty
import re
import subprocess
import sys

import pytest
from PIL import Image

from tests.report.support import write_pictures, write_weights


@pytest.fixture
def folder(tmp_path):
    write_weights(tmp_path / "model.safetensors")
    write_pictures(tmp_path / "pictures", 2)
    return tmp_path


def in_terminal(folder, *arguments: str) -> str:
    """What a command prints to a terminal, without its control sequences."""
    primary, secondary = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "bcosvit", *arguments],
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
        cwd=folder,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(secondary)
    printed = b""
    while True:
        try:
            piece = os.read(primary, 65536)
        # Linux says so that the other end is closed.
        except OSError:
            break
        if not piece:
            break
        printed += piece
    os.close(primary)
    assert process.wait(timeout=60) == 0, printed.decode()
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", printed.decode())


def test_terminal(folder):
    assert re.match(r"bcosvit \d", in_terminal(folder, "--version"))
    assert "explain" in in_terminal(folder, "--help")
    printed = in_terminal(folder, "explain", "pictures", "--weights", "model.safetensors")
    assert re.search(r"0000\.png +\S+.* %", printed)
    assert printed.count("independent sigmoids") == 1
    assert "2 pictures explained: report.html" in printed
    assert (folder / "report.html").exists()


def test_notebook(folder):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    cell = (
        "import bcosvit\n"
        "model = bcosvit.load('model.safetensors')\n"
        "bcosvit.explain(model, 'pictures/0000.png')"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=120, resources=resources).execute()
    (output,) = notebook.cells[0].outputs
    encoded = re.search(r"base64,([^\"]+)", output.data["text/html"]).group(1)
    assert Image.open(io.BytesIO(base64.b64decode(encoded))).width > 4 * 224
    assert output.data["text/plain"].startswith("ImageAttribution(")
