"""Weights by name and by address: each way leads to the same file, or to one sentence."""

import functools
import hashlib
import http.server
import os
import sys
import threading

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from bcosvit import create_model, from_pretrained, load, save
from bcosvit.cli import app
from bcosvit.files import cache_folder
from bcosvit.models.hub import locate
from bcosvit.models.published import load_backbone
from bcosvit.models.weights import read_metadata
from bcosvit.shipped import DEFAULT, shipped, shipped_file
from tests.conftest import randomize, small_config, tiny_config
from tests.report.support import write_pictures, write_weights


@pytest.fixture
def weights(tmp_path):
    """A file whose name must be quoted in an address."""
    folder = tmp_path / "served"
    folder.mkdir()
    path = folder / "a model.safetensors"
    save(randomize(create_model(small_config())), path)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "bcosvit" / "weights"


@pytest.fixture
def asked(weights):
    """A server on loopback for the folder of ``weights``; what it was asked for, its port first."""
    found = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            found.append(self.path)

    handler = functools.partial(Handler, directory=weights.parent)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found.append(server.server_port)
        yield found
        server.shutdown()


def sum_of(path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def address(asked, weights, digest=None) -> str:
    name = weights.name.replace(" ", "%20")
    return f"http://127.0.0.1:{asked[0]}/{name}#sha256={digest or sum_of(weights)}"


def same(model, weights) -> bool:
    other = load(weights).state_dict()
    return all(torch.equal(tensor, other[key]) for key, tensor in model.state_dict().items())


def test_an_address_is_fetched_once(asked, weights, cache):
    where = address(asked, weights)
    assert same(load(where), weights)
    assert read_metadata(where) == read_metadata(weights)
    assert asked[1:] == ["/a%20model.safetensors"]
    assert [path.name for path in cache.rglob("*") if path.is_file()] == [weights.name]
    assert cache == cache_folder("weights")


def test_what_was_cached_and_then_damaged_is_fetched_again(asked, weights):
    where = address(asked, weights)
    with locate(where).open("r+b") as file:
        file.write(b"damaged")
    assert same(load(where), weights)
    assert len(asked[1:]) == 2


@pytest.mark.parametrize("ending", ["", "#", "#sha256=", "#sha256=12ab", "#md5=" + "0" * 64])
def test_an_address_must_say_its_sum(ending):
    with pytest.raises(ValueError, match="append #sha256= and the 64"):
        load("https://example.invalid/model.safetensors" + ending)


def test_another_file_than_asked_for_is_refused(asked, weights, cache):
    with pytest.raises(ValueError, match=f"{'0' * 64}.*{sum_of(weights)}"):
        load(address(asked, weights, "0" * 64))
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_what_cannot_be_fetched(asked, weights, cache):
    missing = address(asked, weights).replace("model", "nothing")
    with pytest.raises(ValueError, match=r"cannot be downloaded \(HTTP Error 404"):
        load(missing)
    with pytest.raises(ValueError, match="ftp:// is not known here; give a path"):
        load("ftp://example.invalid/model.safetensors")
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_file_addresses(weights):
    assert same(load(weights.as_uri()), weights)
    assert same(load(f"{weights.as_uri()}#sha256={sum_of(weights)}"), weights)
    with pytest.raises(ValueError, match="not the one in"):
        load(f"{weights.as_uri()}#sha256={'0' * 64}")
    with pytest.raises(ValueError, match="no weights file"):
        load(weights.as_uri() + "x")


@pytest.mark.parametrize(
    ("where", "call"),
    [
        ("hf://me/cats", ("me/cats", "model.safetensors", None)),
        ("hf://me/cats@v1.0", ("me/cats", "model.safetensors", "v1.0")),
        ("hf://me/cats@refs%2Fpr%2F1/a/b.safetensors", ("me/cats", "a/b.safetensors", "refs/pr/1")),
        ("hf://me/cats/b.safetensors", ("me/cats", "b.safetensors", None)),
    ],
)
def test_hub_addresses(monkeypatch, weights, where, call):
    calls = []

    def download(repo_id, filename, *, revision=None, token=None):
        calls.append((repo_id, filename, revision))
        return str(weights)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert same(load(where), weights)
    assert calls == [call]


def test_hub_mistakes(monkeypatch):
    for where in ("hf://cats", "hf://", "hf://me/cats@/x"):
        with pytest.raises(ValueError, match=r"write hf://OWNER/REPOSITORY"):
            locate(where)
    # The library's own refusal, without a network: names begin with a letter or digit.
    with pytest.raises(ValueError, match=r"model.safetensors of -/- cannot be downloaded"):
        locate("hf://-/-")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"pip install 'bcosvit\[hub\]'"):
        locate("hf://me/cats")


def test_a_backbone_comes_by_address_too(asked, weights):
    dense = create_model(tiny_config().backbone)
    path = weights.with_name("dense.pth")
    torch.save(randomize(dense).state_dict(), path)
    model = create_model(tiny_config())
    load_backbone(model, address(asked, path))
    assert torch.equal(model.tokenizer.backbone.conv0.weight, dense.features.conv0.weight)


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """Stands in for the folder of shipped weights."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setattr("bcosvit.shipped.FOLDER", folder)
    return folder


def test_shipped_names(shelf, monkeypatch):
    assert shipped() == ()
    with pytest.raises(ValueError, match=f"no weights file for the default model {DEFAULT}"):
        load(DEFAULT)
    write_weights(shelf / f"{DEFAULT}.safetensors")
    write_weights(shelf / "another.safetensors")
    (shelf / "another.md").write_text("# A card")
    assert shipped() == ("another", DEFAULT)
    assert same(load("another"), shelf / "another.safetensors")
    with pytest.raises(ValueError, match=f"or a shipped model: another, {DEFAULT}"):
        load("anther")


def test_training_starts_from_a_shipped_model(shelf):
    from bcosvit.train.checkpoints import config_of, initialize

    write_weights(shelf / "another.safetensors", classes=None)
    model = create_model(config_of("another"))
    assert initialize(model, "another") == "The model starts from another."
    assert same(model, shelf / "another.safetensors")


def test_a_folder(weights, tmp_path):
    load(weights).save_pretrained(tmp_path / "folder")
    assert same(load(tmp_path / "folder"), weights)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no weights file .*empty/model.safetensors; give a path"):
        load(tmp_path / "empty")


def test_explain_needs_no_weights(shelf, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_pictures(tmp_path / "pictures", 1)
    result = CliRunner().invoke(app, ["explain", "pictures"])
    assert "no weights file for the default model" in str(result.exception)
    write_weights(shelf / f"{DEFAULT}.safetensors")
    result = CliRunner().invoke(app, ["explain", "pictures"])
    assert result.exit_code == 0, result.output
    assert DEFAULT in (tmp_path / "report.html").read_text("utf-8")


def test_what_is_shipped_is_complete():
    """Every shipped model has a card, loads, and the default is among them where any is."""
    for name in shipped():
        assert shipped_file(name).with_suffix(".md").read_text("utf-8").startswith("#")
        assert not load(name).training
    assert DEFAULT in shipped() or not shipped()


def test_shipped_weights_are_finite():
    """Half precision overflows above 65,504, which would silence a channel."""
    for name in shipped():
        tensors = load_file(locate(name))
        assert [key for key, tensor in tensors.items() if not tensor.isfinite().all()] == []


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("x" * 5000 + ".safetensors", "There is no weights file xxx"),
        ("x" * 5000 + "/y", "cannot be downloaded from the hub"),
        ("https://[::1/x#sha256=" + "0" * 64, "is no address"),
        ("file://[::1", "is no address"),
        ("\0/\0", "cannot be downloaded from the hub"),
    ],
)
def test_names_that_no_file_can_have(where, says, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=says):
        from_pretrained(where)


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "loop", "device"])
def test_folders_without_a_weights_file(kind, tmp_path):
    weights = tmp_path / "model.safetensors"
    {
        "missing": lambda: None,
        "folder": weights.mkdir,
        "pipe": lambda: os.mkfifo(weights),
        "loop": lambda: weights.symlink_to(weights),
        "device": lambda: weights.symlink_to("/dev/zero"),
    }[kind]()
    with pytest.raises(ValueError, match="There is no weights file"):
        from_pretrained(tmp_path)


def test_nothing_but_the_weights_file_of_a_folder_is_read(tmp_path):
    model = create_model(small_config())
    model.save_pretrained(tmp_path)
    for name in ("config.json", "preprocessor_config.json", "README.md"):
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
    assert from_pretrained(tmp_path).config == model.config


@pytest.mark.parametrize("where", [None, 3, b"model.safetensors", [], True])
def test_what_is_no_address(where):
    with pytest.raises(ValueError, match="Weights cannot be read from"):
        load(where)


def test_an_address_may_be_long():
    with pytest.raises(ValueError, match="cannot be downloaded"):
        locate(f"https://127.0.0.1:1/{'a' * 300}#sha256={'0' * 64}")
