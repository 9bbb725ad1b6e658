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


@pytest.mark.slow
def test_training_in_a_terminal(folder):
    settings = ["--set", "epochs=1", "--set", "model.depth=1", "--set", "model.image_size=16"]
    images = "scenes?size=32&train=48&val=16"
    few = ["--set", "warmup_epochs=0", *settings]
    printed = in_terminal(folder, "train", images, *few, "--out", "runs/tiny")
    lines = printed.splitlines()
    # What it chose and why, and what it will take, before the first epoch.
    epoch = next(n for n, line in enumerate(lines) if line.startswith("epoch 1/1  loss"))
    before = "\n".join(lines[:epoch])
    for words in ("This machine:", "Feature cache:", "Batches:", "Workers:", "Prediction by"):
        assert words in before
    assert (folder / "runs" / "tiny" / "best.safetensors").exists()
    explained = in_terminal(
        folder, "explain", "pictures/0000.png", "--weights", "runs/tiny/best.safetensors"
    )
    assert "1 picture explained" in explained


CELLS = {
    "first": "import bcosvit\nmodel = bcosvit.load('model.safetensors')\n"
    "bcosvit.explain(model, 'pictures/0000.png')",
    "names": "model.classes[:2], model.transform.image_size",
    "rather": "bcosvit.explain(model, 'pictures/0000.png', 'dog', versus='cat')",
    "methods": "both = bcosvit.explain(model, ['pictures/0000.png', 'pictures/0001.png'], "
    "method=['inherent', 'ixg'])\nboth.save('both.png')\nboth.plot()",
    "pipeline": "bcosvit.Predictor.of(model)('pictures/0000.png', top_k=2)",
    "timm": "bcosvit.list_models('*ti*', pretrained=True)",
    "wrong": "try:\n    bcosvit.visualize\nexcept AttributeError as error:\n    print(error)",
}


def test_notebook(folder):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    cells = [nbformat.v4.new_code_cell(code) for code in CELLS.values()]
    notebook = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=120, resources=resources).execute()
    outputs = {name: cell.outputs[0] for name, cell in zip(CELLS, notebook.cells, strict=True)}

    def drawn(name):
        encoded = re.search(r"base64,([^\"]+)", outputs[name].data["text/html"]).group(1)
        return Image.open(io.BytesIO(base64.b64decode(encoded)))

    def text(name):
        return outputs[name].data["text/plain"]

    assert drawn("first").width > 4 * 224
    assert text("first").startswith("ImageAttribution(")
    assert text("names") == "(('cat', 'dog'), 16)"
    assert "dog rather than cat" in text("rather") and drawn("rather").width > 4 * 224
    # Two pictures, with two methods side by side.
    with Image.open(folder / "both.png") as both:
        assert both.height > 2 * 224
    assert "image/png" in outputs["methods"].data
    assert text("pipeline").count("'label'") == 2
    assert "bcos_vit_ti_87" in text("timm")
    assert "bcosvit.explain" in outputs["wrong"].text
