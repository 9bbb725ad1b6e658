"""Folders and drawn scenes: every layout that is accepted, every mistake that is refused."""

import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bcosvit.data.dataset import SourceError
from bcosvit.data.sources import check_source, open_source
from tests.data.support import color, folder, keys, png


def test_folder_with_train_and_val(tmp_path: Path) -> None:
    folder(tmp_path / "train", {"dog": 3, "cat": 2})
    folder(tmp_path / "val", {"cat": 1, "dog": 1}, start=50)
    folder(tmp_path / "test", {"cat": 1, "dog": 1}, start=90)
    source = open_source(tmp_path)
    assert source.classes == ("cat", "dog")
    assert keys(source.train) == [
        *(f"train/cat/00{i}.png" for i in range(2)),
        *(f"train/dog/00{i}.png" for i in range(3)),
    ]
    assert source.train.labels() == [0, 0, 1, 1, 1]
    assert keys(source.val) == ["val/cat/000.png", "val/dog/000.png"]
    image, label, key = source.val[1]
    assert isinstance(image, Image.Image)
    assert (image.getpixel((0, 0)), label, key) == (color(51), 1, "val/dog/000.png")


@pytest.mark.parametrize("name", ["val", "Valid", "validation", "test"])
def test_names_of_the_validation_folder(tmp_path: Path, name: str) -> None:
    folder(tmp_path / "train", {"a": 1, "b": 1})
    folder(tmp_path / name, {"a": 1, "b": 1})
    assert keys(open_source(tmp_path).val) == [f"{name}/a/000.png", f"{name}/b/000.png"]


def test_split_is_stratified_seeded_and_stable(tmp_path: Path) -> None:
    counts = {"one": 1, "two": 2, "ten": 10, "forty": 40}
    folder(tmp_path, counts)
    source = open_source(str(tmp_path), val_fraction=0.2)
    val = Counter(key.split("/")[0] for key in keys(source.val))
    assert val == {"two": 1, "ten": 2, "forty": 8}
    everything = keys(source.train) + keys(source.val)
    assert len(everything) == len(set(everything)) == 53
    assert keys(source.train) == sorted(keys(source.train))
    assert keys(open_source(tmp_path, val_fraction=0.2).val) == keys(source.val)
    assert keys(open_source(tmp_path, val_fraction=0.2, seed=1).val) != keys(source.val)
    # A new picture does not turn the split over, nor does a new class.
    (tmp_path / "forty" / "new.png").write_bytes(png())
    folder(tmp_path, {"more": 5})
    grown = {k for k in keys(open_source(tmp_path, val_fraction=0.2).val) if "more" not in k}
    assert len(grown ^ set(keys(source.val))) <= 2


def test_train_folder_alone_is_split(tmp_path: Path) -> None:
    folder(tmp_path / "train", {"a": 4, "b": 4})
    source = open_source(tmp_path)
    assert len(source.train) == 6
    assert all(key.startswith("train/") for key in keys(source.val))


@pytest.mark.parametrize("name", ["train", "Training"])
def test_a_class_may_be_called_train(tmp_path: Path, name: str) -> None:
    folder(tmp_path, {"bus": 3, "car": 3, name: 3})
    assert open_source(tmp_path).classes == tuple(sorted(("bus", "car", name)))
    # Beside nothing but other splits, it is a split whose classes are missing.
    folder(tmp_path / "loose", {"train": 3, "val": 3})
    with pytest.raises(SourceError, match="no class folder"):
        open_source(tmp_path / "loose")


def test_unicode_nested_and_hidden(tmp_path: Path) -> None:
    folder(tmp_path, {"東京 🐟": 2, "Ähre/2020": 1, "Ähre/2021": 1, ".git": 3, "__MACOSX": 1})
    source = open_source(tmp_path)
    assert source.classes == ("Ähre", "東京 🐟")
    assert len(source.train) + len(source.val) == 4


MISTAKES = {
    "missing folder": (lambda root: root / "nowhere", "is missing"),
    "a file": (lambda root: (root / "x").write_text("x") and root / "x", "is a file"),
    "nothing": (lambda root: root, "no classes"),
    "loose images": (
        lambda root: (root / "a.png").write_bytes(png()) and root,
        "no class folder",
    ),
    "single class": (lambda root: folder(root, {"only": 3}), "a single class .*'only'"),
    "empty class": (lambda root: folder(root, {"a": 2, "b": 0, "c": 1}), "b has no images"),
    "case": (lambda root: folder(root, {"Cat": 2, "cat": 2}), "'Cat' and 'cat' .*differ only"),
    "unicode": (
        lambda root: folder(root, {unicodedata.normalize(f, "Bär"): 2 for f in ("NFC", "NFD")}),
        "differ only",
    ),
    "spaces": (lambda root: folder(root, {"a": 2, "a ": 2}), "differ only"),
    "val differs": (
        lambda root: (
            (
                folder(root / "train", {"a": 2, "b": 2}),
                folder(root / "val", {"a": 2, "c": 2}),
            )
            and root
        ),
        "differ \\('b', 'c'\\)",
    ),
    "val without train": (lambda root: folder(root / "val", {"a": 2}).parent, "no train/"),
    "one image per class": (lambda root: folder(root, {"a": 1, "b": 1}), "second image"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named_before_training(mistake: str, tmp_path: Path) -> None:
    make, message = MISTAKES[mistake]
    data = make(tmp_path)
    with pytest.raises(SourceError, match=message) as caught:
        open_source(data)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def test_an_empty_class_tells_what_lies_there(tmp_path: Path) -> None:
    folder(tmp_path, {"a": 2, "b": 0})
    (tmp_path / "b" / "x.HEIC").touch()
    with pytest.raises(SourceError, match=r"b has no images but 1 \.heic files"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    "options", [{"val_fraction": 0.0}, {"val_fraction": 1}, {"max_skipped": 2}]
)
def test_impossible_options(tmp_path: Path, options: dict) -> None:
    folder(tmp_path, {"a": 2, "b": 2})
    with pytest.raises(SourceError, match=next(iter(options))):
        open_source(tmp_path, **options)


def test_fingerprint_follows_the_pictures(tmp_path: Path) -> None:
    folder(tmp_path, {"a": 4, "b": 4})
    first = open_source(tmp_path).fingerprint()
    assert open_source(str(tmp_path)).fingerprint() == first
    (tmp_path / "a" / "000.png").rename(tmp_path / "b" / "zzz.png")
    assert open_source(tmp_path).fingerprint() != first


def test_scenes_and_their_options() -> None:
    source = open_source("scenes?size=48&train=24&val=16")
    assert (len(source.train), len(source.val)) == (24, 16)
    image, label, key = source.train[3]
    assert isinstance(image, Image.Image)
    assert image.size == (48, 48)
    assert 0 <= label < len(source.classes)
    assert key == "scenes/train/3"
    assert source.train.labels()[3] == label
    same = open_source("scenes?size=48&train=24&val=16").train[3][0]
    assert np.array_equal(np.asarray(same), np.asarray(image))
    other = open_source("scenes:hard?size=48&train=24&val=16").train[3][0]
    assert not np.array_equal(np.asarray(other), np.asarray(image))
    seeded = open_source("scenes?size=48&train=24&val=16", seed=1).train[3][0]
    assert not np.array_equal(np.asarray(seeded), np.asarray(image))
    assert check_source(source)[1] == ()


def test_scenes_mistakes() -> None:
    with pytest.raises(SourceError, match="option sise"):
        open_source("scenes?sise=48")
    with pytest.raises(SourceError, match="'many': give a number"):
        open_source("scenes?train=many")
    with pytest.raises(ValueError, match="soft"):
        open_source("scenes:soft")


def test_a_folder_named_scenes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "scenes", {"a": 2, "b": 2})
    monkeypatch.chdir(tmp_path)
    assert open_source(Path("scenes")).classes == ("a", "b")
    assert open_source("./scenes").classes == ("a", "b")
