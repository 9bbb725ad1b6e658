"""Weights files, pictures and a strict reader of HTML for tests of reports."""

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import torch
from PIL import Image

from bcosvit import create_model, save
from bcosvit.data.scenes import Scenes
from tests.conftest import randomize, small_config

CLASSES = ("cat", "dog", "sea star", "<b>mouse</b>", "tench, Tinca tinca")


def write_weights(path: Path, *, classes: tuple[str, ...] | None = CLASSES, **options) -> Path:
    """A small model for 16×16 pixels that is sure of different classes for different pictures."""
    options = {"num_classes": 5 if classes is None else len(classes), **options}
    if options.get("family") != "conventional":
        # Random weights give logits of thousands at the default.
        options = {"logit_scale": 5e-6, **options}
    model = randomize(create_model(small_config(**options)))
    notes = {} if classes is None else {"bcosvit.classes": json.dumps(classes)}
    save(model, path, metadata=notes)
    return path


def write_pictures(folder: Path, count: int, size: int = 40) -> Path:
    """PNG files of drawn scenes."""
    folder.mkdir(parents=True, exist_ok=True)
    scenes = Scenes("val", size=max(size, 32), length=count)
    for index in range(count):
        scenes[index].image.save(folder / f"{index:04}.png")
    return folder


class Page(HTMLParser):
    """A page read strictly: every tag is closed, in order, and no id is given twice."""

    VOID = frozenset({"meta", "link", "img", "br", "hr", "input"})

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text("utf-8")
        self.open: list[str] = []
        self.ids: list[str] = []
        self.images: list[dict[str, str]] = []
        self.links: list[str] = []
        self.headings: list[str] = []
        self.words: list[str] = []
        self.tags: list[str] = []
        self.feed(self.source)
        self.close()
        assert self.open == []
        assert len(self.ids) == len(set(self.ids))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append(tag)
        if "id" in given:
            self.ids.append(given["id"])
        if tag == "img":
            self.images.append(given)
        self.links += [given[name] for name in ("src", "href", "srcset", "action") if name in given]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.words.append(data)
        if self.open[-1:] in (["h2"], ["h3"]):
            self.headings.append(data.strip())

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    def pictures(self) -> list[Image.Image]:
        """All inlined pictures, decoded."""
        found = []
        for image in self.images:
            kind, data = re.fullmatch(r"data:image/(png|jpeg);base64,(.+)", image["src"]).groups()
            picture = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
            picture.load()
            assert picture.format.lower() == kind
            found.append(picture)
        return found

    def assert_self_contained(self) -> None:
        """Nothing is asked for from elsewhere, every picture has an alt text and its size."""
        assert not re.search(r"https?://|@import|url\((?!#)|<script|<iframe|//\w", self.outside())
        for link in self.links:
            assert re.match(r"data:|#|[\w-]+\.csv$", link), link
        for link in (link for link in self.links if link.startswith("#")):
            assert link[1:] in self.ids
        for image, picture in zip(self.images, self.pictures(), strict=True):
            assert image["alt"]
            assert (int(image["width"]), int(image["height"])) == picture.size

    def outside(self) -> str:
        """The page without the pictures' data."""
        return re.sub(r"base64,[^\"]+", "", self.source)


def maps(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))
